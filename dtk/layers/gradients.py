"""Functions with gradients of their own, which AutoGraph leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Function

_Called = TypeVar("_Called")

# Of a tensor, or of the gradient of one.
Map: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


def unconverted(function: _Called) -> _Called:
    """Keep AutoGraph from rewriting a function, which is slow and gains nothing here."""
    kept: _Called = tf.autograph.experimental.do_not_convert(function)
    return kept


@unconverted
def with_gradient(value: tf.Tensor, forward: Map, backward: Map) -> tf.Tensor:
    """Return `forward(value)`, whose gradient is `backward` of the result's."""

    @tf.custom_gradient
    def mapped(x: tf.Tensor) -> tuple[tf.Tensor, Map]:
        return forward(x), lambda dy: unconverted(backward)(tf.convert_to_tensor(dy))

    return mapped(tf.convert_to_tensor(value))


@unconverted
def pseudo_connect(token: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Make a tensor depend on a token, so that the backward pass reaches the `send` behind it.

    Args:
        token: As `send` returns it, or another tensor that must not be left out.
        value: The tensor that is used further.

    Returns:
        `value`. Its gradient goes to `value`, and zeros to `token`.
    """

    @tf.custom_gradient
    def connected(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
        zeros = tf.zeros_like(a)
        return tf.identity(b), lambda dy: (zeros, dy)

    return connected(token, tf.convert_to_tensor(value))


def watched(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Return the same tensor, which every tape takes note of.

    Other ranks wait in the backward pass for the part of a rank whose value depends on nothing.
    """
    return pseudo_connect(tf.convert_to_tensor(communicator.watched), value)
