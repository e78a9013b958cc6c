"""Outputs of one rank that are inputs of another, and the gradients that go back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Function


def send(value: tf.Tensor, dest: int, communicator: Communicator) -> None:
    """Send a tensor to another rank of a pipeline, beside what others send and receive.

    Args:
        value: The tensor.
        dest: The rank.
        communicator: Of the pipeline's ranks.
    """
    with communicator.concurrent(f"pipeline {communicator.rank}-{dest}"):
        communicator.send(value, dest)


def receive(
    shape: Sequence[int] | tf.Tensor,
    static: Sequence[int | None] | tf.TensorShape,
    dtype: tf.DType | str,
    source: int,
    communicator: Communicator,
) -> tf.Tensor:
    """Receive a tensor from another rank of a pipeline, beside what others send and receive.

    Args:
        shape: Of the tensor.
        static: What is known of the shape while a graph is traced.
        dtype: Of the tensor.
        source: The rank.
        communicator: Of the pipeline's ranks.

    Returns:
        The tensor.
    """
    with communicator.concurrent(f"pipeline {source}-{communicator.rank}"):
        return tf.ensure_shape(communicator.recv(shape, dtype, source), static)


class Link:
    """What one pass through a pipeline sends and receives on this rank.

    The gradient of what is sent is received, that of what is received is sent. TensorFlow computes
    gradients only along a path from the loss to a variable: `anchor` and the tokens of `send` are
    that path where it leads through other ranks (as ChainerMN's `pseudo_connect`).

    Args:
        communicator: Of the pipeline's ranks.
        anchor: Any tensor made of a trainable variable of this rank; None where no gradients are
            computed.
    """

    def __init__(self, communicator: Communicator, anchor: tf.Tensor | None):
        self._communicator = communicator
        self._anchor = anchor
        self._tokens: list[tf.Tensor] = []

    def send(self, value: tf.Tensor, dest: int) -> None:
        """Send a tensor to another rank, which receives it.

        Args:
            value: Rows first.
            dest: The rank.
        """
        communicator = self._communicator

        @tf.custom_gradient
        def sent(given: tf.Tensor) -> tuple[tf.Tensor, Function[tf.Tensor]]:
            send(given, dest, communicator)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                del upstream
                return receive(tf.shape(given), given.shape, given.dtype, dest, communicator)

            return tf.zeros([], given.dtype), gradient

        self._tokens.append(sent(value))

    def receive(
        self, rows: tf.Tensor, shape: Sequence[int], dtype: tf.DType | str, source: int
    ) -> tf.Tensor:
        """Receive a tensor from another rank, which sends it.

        Args:
            rows: How many.
            shape: Of a row.
            dtype: Of the tensor.
            source: The rank.

        Returns:
            The tensor, of shape `[rows, *shape]`.
        """
        communicator = self._communicator

        def received() -> tf.Tensor:
            return receive([rows, *shape], [None, *shape], dtype, source, communicator)

        @tf.custom_gradient
        def connected(anchor: tf.Tensor) -> tuple[tf.Tensor, Function[tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                send(upstream, source, communicator)
                return tf.zeros_like(anchor)

            return received(), gradient

        return received() if self._anchor is None else connected(self._anchor)

    def from_last(self, value: tf.Tensor) -> tf.Tensor:
        """Give every rank the last rank's tensor.

        The gradient goes to the last rank alone, which has computed the tensor: all ranks compute
        the same loss of it.

        Args:
            value: On the last rank the tensor, elsewhere anything of its shape.

        Returns:
            The tensor.
        """
        communicator, root = self._communicator, self._communicator.size - 1

        @tf.custom_gradient
        def shared(
            given: tf.Tensor, *tokens: tf.Tensor
        ) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
            def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
                return (upstream, *map(tf.zeros_like, tokens))

            found = communicator.broadcast(given, root)
            return tf.ensure_shape(found, given.shape), gradient

        return shared(value, *self._tokens)
