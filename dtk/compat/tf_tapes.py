"""Gradient tapes that differentiate with respect to values in place of variables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeAlias

import tensorflow as tf

from dtk.compat.replacing import replaced
from dtk.nests import Gradients, Nest

# The values with respect to which a tape differentiates, kept on it: variable's id -> tensor.
_WATCHED = "_dtk_watched"
Values: TypeAlias = Mapping[int, tf.Tensor]

# Computes the gradients of a target with respect to a list of sources.
Gradient: TypeAlias = Callable[[Nest, list[tf.Tensor | tf.Variable]], Gradients]


def tapes_over(
    watched: Callable[[], Values], differentiate: Callable[[Gradient, Values, Nest, Nest], Nest]
) -> AbstractContextManager[None]:
    """Return a context that changes what tapes watch and how they give gradients."""
    enter, gradient = tf.GradientTape.__enter__, tf.GradientTape.gradient

    def watching(tape: tf.GradientTape) -> tf.GradientTape:
        entered = enter(tape)
        values = watched()
        setattr(entered, _WATCHED, values)
        entered.watch(list(values.values()))
        return entered

    @functools.wraps(gradient)
    def through(
        tape: tf.GradientTape, target: Nest, sources: Nest, *args: object, **kwargs: object
    ) -> Nest:
        def own(target: Nest, sources: list[tf.Tensor | tf.Variable]) -> Gradients:
            return gradient(tape, target, sources, *args, **kwargs)

        return differentiate(own, getattr(tape, _WATCHED, {}), target, sources)

    return replaced(tf.GradientTape, __enter__=watching, gradient=through)
