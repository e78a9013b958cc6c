"""Let optimizers update model-parallel parts of variables as they would update the whole.

Each rank of a model-parallel group holds a part, which an optimizer updates as a separate variable.
The result is the same if an element's step depends on that element only. The exceptions:

    clipping to a norm          the squares of the parts are summed over the group here; in
                                float64, as ranks may hold parts of different dtypes
    finite gradients            a loss scale falls when any part is not finite
    one ratio, mean or matrix   Lamb, LARS, Adafactor, Muon: refused
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from dtk.compat import keras_optimizers
from dtk.compat.keras_optimizers import square_sum
from dtk.compat.keras_variables import copy_mark, is_of_all, shard_of
from dtk.errors import at_rank
from dtk.nests import Gradients
from dtk.trainer.gradients.partitioned_variables import members, needs_whole
from dtk.trainer.strategy import Strategy


def take_shards(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make an optimizer treat parts of variables as it would treat whole ones."""
    if strategy.model_communicator.size == 1:
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        everywhere = functools.partial(strategy.model_communicator.allreduce, op="min")
        keras_optimizers.patch_check_finite(optimizer, everywhere)
        return
    shards = _Shards(optimizer, strategy)
    keras_optimizers.patch_clip(optimizer, shards.clip)


class _Shards:
    """Clipping by one optimizer of the parts that ranks hold."""

    def __init__(self, optimizer: keras.Optimizer, strategy: Strategy):
        self._optimizer, self._strategy = optimizer, strategy

    def clip(
        self,
        gradients: Gradients,
        variables: Sequence[keras.Variable],
        clip: keras_optimizers.Clip,
    ) -> Gradients:
        """Clip gradients as the optimizer would clip the gradients of whole variables."""
        self._check(variables)
        optimizer, group = self._optimizer, self._strategy.model_communicator
        found = [g for g in gradients if g is not None]  # Keras has removed every None already
        if optimizer.clipnorm:
            return self._clip_each(found, variables, clip)
        if not optimizer.global_clipnorm:
            return clip(gradients)
        squares = [tf.zeros([], tf.float64), tf.zeros([], tf.float64)]
        for gradient, variable in zip(found, variables, strict=True):
            squares[is_of_all(variable)] += tf.cast(square_sum(gradient), tf.float64)
        norm = tf.sqrt(group.allreduce(squares[False]) + squares[True])
        most = tf.constant(optimizer.global_clipnorm, norm.dtype)
        # NaN where the norm is not finite, as in Keras.
        factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
        return [keras.ops.multiply(g, tf.cast(factor, g.dtype)) for g in found]

    def _clip_each(
        self,
        gradients: Gradients,
        variables: Sequence[keras.Variable],
        clip: keras_optimizers.Clip,
    ) -> Gradients:
        parts = [i for i, v in enumerate(variables) if shard_of(v) is not None]
        clipped = list(clip(gradients))
        if not parts:
            return clipped
        squares = tf.stack([tf.cast(square_sum(gradients[i]), tf.float64) for i in parts])
        squares = self._strategy.model_communicator.allreduce(squares)
        most = tf.constant(self._optimizer.clipnorm, tf.float64)
        for i, square in zip(parts, tf.unstack(squares, len(parts)), strict=True):
            factor = most / tf.maximum(tf.sqrt(square), most)
            gradient = gradients[i]
            assert gradient is not None
            clipped[i] = keras.ops.multiply(gradient, tf.cast(factor, gradient.dtype))
        return clipped

    def _check(self, variables: Sequence[keras.Variable]) -> None:
        for variable in variables:
            shard = shard_of(variable)
            reason = needs_whole(self._optimizer, variable) if shard is not None else None
            if reason is not None:
                raise ValueError(
                    at_rank(
                        self._strategy.rank,
                        f"optimizer {self._optimizer.name!r} ({type(self._optimizer).__name__}) "
                        f"{reason}, but this rank holds only a part of {variable.path!r}. Use an "
                        "optimizer that takes each element for itself, such as SGD or Adam, or "
                        "leave this layer whole",
                    )
                )


def mark_slots(optimizer: keras.Optimizer) -> None:
    """Mark the slot variables of parts of variables as parts of the same kind."""
    for member in members(optimizer):
        if not member.built:
            continue
        if all(map(is_of_all, keras_optimizers.trained_variables(member))):
            continue
        for slot, variable, _ in keras_optimizers.slots_by_variable(member):
            copy_mark(variable, slot)
