"""Note the step, the rank and the variables of gradients that are not finite.

Gradients are checked before ranks sum them: afterwards all ranks hold the same NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.exchange.base import Gradient
from dtk.exchange.factors import Factored
from dtk.nests import Array


class NonFinite(NamedTuple):
    """Gradients of one rank's replica that were not finite."""

    step: int  # number of the optimizer's steps before it, accumulated steps included
    rank: int
    replica: int  # number of the replica on its rank, from 0
    variables: tuple[str, ...]  # paths of the variables


class NonFiniteNotes:
    """Notes about one optimizer's gradients on this rank."""

    def __init__(self, rank: int, scaled: bool) -> None:
        self._rank = rank
        self._scaled = scaled
        self._taken: list[NonFinite] = []
        self._lock = threading.Lock()

    def note(
        self, steps: tf.Tensor, replica: int, paths: Sequence[str], gradients: list[Gradient]
    ) -> None:
        """Add ops to the step that note which of its gradients are not finite."""
        finite = tf.stack([_is_finite(g) for g in gradients])

        def take(step: Array, finite: Array) -> bool:
            self.take(int(step), replica, paths, finite.tolist())
            return True

        def note() -> tf.Tensor:
            return tf.numpy_function(take, [tf.cast(steps, tf.int64), finite], tf.bool)

        tf.cond(tf.reduce_all(finite), lambda: tf.constant(True), note)

    def take(self, step: int, replica: int, paths: Sequence[str], finite: Sequence[bool]) -> None:
        """Note a step's gradients: the first such step is kept; under a loss scale, the last."""
        bad = tuple(path for path, good in zip(paths, finite, strict=True) if not good)
        with self._lock:
            if self._taken and self._taken[0].step != step:
                if not self._scaled:
                    return
                self._taken.clear()
            self._taken.append(NonFinite(step, self._rank, replica, bad))

    def found(self, steps: int, loss_is_finite: bool) -> list[NonFinite]:
        """Return the notes; under a loss scale, only if the loss is not finite either."""
        with self._lock:
            if self._scaled:
                # `steps` does not count a step that was skipped because gradients overflowed.
                return [n for n in self._taken if n.step == steps and not loss_is_finite]
            return list(self._taken)


def _is_finite(gradient: Gradient) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values
    if isinstance(gradient, Factored):
        return _is_finite(gradient.left) & _is_finite(gradient.right)
    return tf.reduce_all(tf.math.is_finite(gradient))
