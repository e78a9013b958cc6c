"""Outputs of one rank that are inputs of another, and the gradients that go back."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Function, Nest

# Microbatch m is sent under this tag plus m, which leaves the tags below to layers of the user's.
_FIRST_TAG = 1 << 20


def send(value: tf.Tensor, dest: int, communicator: Communicator, microbatch: int) -> None:
    """Send a tensor to another rank of a pipeline, as soon as it is there."""
    with communicator.concurrent(f"pipeline {communicator.rank}-{dest}/{microbatch}"):
        communicator.send(value, dest, _FIRST_TAG + microbatch)


def receive(
    shape: Sequence[int] | tf.Tensor,
    static: Sequence[int | None] | tf.TensorShape,
    dtype: tf.DType | str,
    source: int,
    communicator: Communicator,
    microbatch: int,
) -> tf.Tensor:
    """Receive a tensor from another rank of a pipeline, whenever it comes."""
    with communicator.concurrent(f"pipeline {source}-{communicator.rank}/{microbatch}"):
        found = communicator.recv(shape, dtype, source, _FIRST_TAG + microbatch)
    return tf.ensure_shape(found, static)


class StageTransfer:
    """What one pass through a pipeline sends and receives on this rank.

    The gradient of what is sent is received, that of what is received is sent. TensorFlow computes
    gradients only along a path from the loss to a variable: `anchor` and the tokens of `send` are
    that path where it leads through other ranks (as ChainerMN's `pseudo_connect`).

    A graph computes whatever is ready. What other stages wait for must come early, so one
    microbatch is computed behind the other, forwards (`begin`) and backwards (`end`).
    """

    def __init__(self, communicator: Communicator, anchor: tf.Tensor | None):
        self._communicator = communicator
        self._anchor = anchor
        self._tokens: list[tf.Tensor] = []
        self._forwards: list[tf.Tensor] = []
        self._backwards: list[tf.Tensor] = []

    def begin(self, inputs: Nest) -> Nest:
        """Return inputs of a microbatch that are there once the one before is computed."""
        with tf.control_dependencies(self._forwards):
            return tf.nest.map_structure(tf.identity, inputs)

    def end(self, output: tf.Tensor) -> tf.Tensor:
        """Return the output of a microbatch, before which the next one does not begin.

        Its gradient is there once those of the microbatch before, in the order backwards, are.
        """
        self._forwards = [output]

        @tf.custom_gradient
        def ended(given: tf.Tensor) -> tuple[tf.Tensor, Function[tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                with tf.control_dependencies(self._backwards):
                    return tf.identity(upstream)

            return tf.identity(given), gradient

        return ended(output)

    def send(self, value: tf.Tensor, dest: int, microbatch: int) -> None:
        """Send a tensor to another rank, which receives it."""
        communicator = self._communicator

        @tf.custom_gradient
        def sent(given: tf.Tensor) -> tuple[tf.Tensor, Function[tf.Tensor]]:
            send(given, dest, communicator, microbatch)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                del upstream
                shape = tf.shape(given)
                return receive(shape, given.shape, given.dtype, dest, communicator, microbatch)

            return tf.zeros([], given.dtype), gradient

        self._tokens.append(sent(value))

    def receive(
        self, shape: Sequence[int | tf.Tensor], dtype: tf.DType | str, source: int, microbatch: int
    ) -> tf.Tensor:
        """Receive a tensor from another rank, which sends it."""
        communicator = self._communicator
        static = [None, *shape[1:]]

        def received() -> tf.Tensor:
            return receive(shape, static, dtype, source, communicator, microbatch)

        @tf.custom_gradient
        def connected(anchor: tf.Tensor) -> tuple[tf.Tensor, Function[tf.Tensor]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                self._backwards = [upstream]
                send(upstream, source, communicator, microbatch)
                return tf.zeros_like(anchor)

            return received(), gradient

        return received() if self._anchor is None else connected(self._anchor)

    def from_last(self, value: tf.Tensor) -> tf.Tensor:
        """Give every rank the last rank's tensor.

        The gradient goes to the last rank alone, which has computed the tensor: all ranks compute
        the same loss of it.
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
