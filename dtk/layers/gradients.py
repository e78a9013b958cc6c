"""Functions with custom gradients, which AutoGraph does not rewrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Function

_Called = TypeVar("_Called")

# Maps a tensor, or the gradient of a tensor.
Map: TypeAlias = Callable[[tf.Tensor], tf.Tensor]


def unconverted(function: _Called) -> _Called:
    """Keep AutoGraph from rewriting a function: that is slow and gains nothing here."""
    kept: _Called = tf.autograph.experimental.do_not_convert(function)
    return kept


@unconverted
def with_gradient(value: tf.Tensor, forward: Map, backward: Map) -> tf.Tensor:
    """Return `forward(value)`; its gradient is `backward` of the result's gradient."""

    @tf.custom_gradient
    def mapped(x: tf.Tensor) -> tuple[tf.Tensor, Map]:
        return forward(x), lambda dy: unconverted(backward)(tf.convert_to_tensor(dy))

    return mapped(tf.convert_to_tensor(value))


@unconverted
def pseudo_connect(token: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Make a tensor depend on a token, so that the backward pass reaches the `send` behind it.

    Args:
        token: The token from `send`, or another tensor that must not be left out.
        value: The tensor that you use further.

    Returns:
        `value`. Its gradient goes to `value`, and zeros to `token`.
    """

    @tf.custom_gradient
    def connected(a: tf.Tensor, b: tf.Tensor) -> tuple[tf.Tensor, Function[tuple[tf.Tensor, ...]]]:
        zeros = tf.zeros_like(a)
        return tf.identity(b), lambda dy: (zeros, dy)

    return connected(token, tf.convert_to_tensor(value))


def watched(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Return the same tensor, made to depend on a variable that every tape watches.

    Otherwise, if a rank's value depends on no variable, its backward pass would leave out the
    collective for which the other ranks wait.
    """
    return pseudo_connect(tf.convert_to_tensor(communicator.watched), value)
