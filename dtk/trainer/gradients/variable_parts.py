"""Let optimizers update parts of variables as they would update the whole.

A large variable is cut by rows over several servers, a rank of a model-parallel group holds one
part of it, or each rank updates one part of it (`sharded_optimizer`). An optimizer sees each part
as a separate variable. The result is the same if an element's step (on servers: a row's) depends on
that element only. The exceptions:

    clipping to a norm          the squares of the parts are summed here; in float64, as ranks may
                                hold parts of different dtypes
    finite gradients            a loss scale falls when any part is not finite
    one ratio, mean or matrix   Lamb, LARS, Adafactor, Muon: refused
    constraints over rows       UnitNorm(axis=0) and the like: refused on servers
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import with_values
from dtk.compat import keras_optimizers, keras_variables
from dtk.compat.keras_variables import copy_mark, is_of_all, is_sharded, shard_of
from dtk.errors import at_rank
from dtk.nests import Gradients
from dtk.optimizers.layerwise import LayerwiseOptimizer
from dtk.trainer.strategy import Strategy


def members(optimizer: keras.Optimizer) -> list[keras.Optimizer]:
    """Return an optimizer and the optimizers inside it, outermost first."""
    found, left = [], [optimizer]
    while left:
        found.append(left.pop(0))
        inner = getattr(found[-1], "inner_optimizer", None)
        left += [] if inner is None else [inner]
        if keras_optimizers.is_multi(found[-1]):
            left += found[-1].optimizers
    return found


# Optimizers and constraints that parts would change.


def check_parts(
    optimizer: keras.Optimizer, variable: keras.Variable, parts: Sequence[keras.Variable]
) -> None:
    """Refuse an optimizer or a constraint that needs a whole variable, if servers hold parts."""
    if len(parts) == 1:
        return
    for member in members(optimizer):
        reason = needs_whole(member, variable) if _updates(member, parts) else None
        if reason is not None:
            raise ValueError(
                f"optimizer {optimizer.name!r} ({type(member).__name__}) {reason}, but "
                f"variable_partitioner= has cut {variable.path!r} into {len(parts)} parts on "
                "several servers. Make the strategy without variable_partitioner, or with one that "
                "leaves this variable whole; or use an optimizer that takes each row for itself, "
                "such as Adagrad or Adam"
            )
    if variable.constraint is not None and not _is_by_rows(variable.constraint, variable):
        raise ValueError(
            f"the constraint {type(variable.constraint).__name__} of {variable.path!r} needs more "
            f"than a row at a time, but variable_partitioner= has cut the variable into "
            f"{len(parts)} parts on several servers. Use a constraint of each row (axis=1), or "
            "a partitioner that leaves this variable whole"
        )


def _check_shards(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], strategy: Strategy
) -> None:
    """Refuse an optimizer that needs a whole variable, of which this rank holds a part."""
    for variable in variables:
        in_parts = shard_of(variable) is not None and not is_sharded(variable)
        reason = needs_whole(optimizer, variable) if in_parts else None
        if reason is not None:
            raise ValueError(
                at_rank(
                    strategy.rank,
                    f"optimizer {optimizer.name!r} ({type(optimizer).__name__}) {reason}, but this "
                    f"rank holds only a part of {variable.path!r}. Use an optimizer that takes "
                    "each element for itself, such as SGD or Adam, or leave this layer whole",
                )
            )


def _updates(member: keras.Optimizer, parts: Sequence[keras.Variable]) -> bool:
    """Return whether an optimizer updates these parts; several may share a model's variables."""
    if not member.built:
        return True
    known = {id(variable) for variable in keras_optimizers.trained_variables(member)}
    return any(id(part) in known for part in parts)


def needs_whole(member: keras.Optimizer, variable: keras.Variable) -> str | None:
    """Return, in words, why an optimizer needs the whole variable; None if it does not."""
    if isinstance(member, keras.optimizers.Adafactor):
        return "scales steps by means over a whole variable"
    if isinstance(member, LayerwiseOptimizer):  # of which LAMB is a Keras Lamb, too
        by_norm = not member.skips(variable)
    else:
        by_norm = isinstance(member, keras.optimizers.Lamb)
    if by_norm:
        return "scales a step by the norm of the whole variable"
    if isinstance(member, keras.optimizers.Muon) and not keras_optimizers.takes_adamw(
        member, variable
    ):
        return "makes a whole matrix orthogonal"
    return None


def _is_by_rows(constraint: Callable[[tf.Tensor], tf.Tensor], variable: keras.Variable) -> bool:
    """Return whether a constraint gives two rows together the same values as each row alone."""
    shape = (2, *variable.shape[1:])
    values = np.random.default_rng(0).normal(size=shape)
    values[1] *= 100.0
    with tf.init_scope():
        rows = keras.ops.convert_to_tensor(values, variable.dtype)
        separate = [constraint(rows[:1]), constraint(rows[1:])]
        return np.allclose(constraint(rows), np.concatenate(separate), rtol=1e-3)


# Clipping.


def take_parts(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Make an optimizer treat parts of variables as it would treat whole ones."""
    group = strategy.part_communicator
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        if group.size > 1:
            everywhere = functools.partial(group.allreduce, op="min")
            keras_optimizers.patch_check_finite(optimizer, everywhere)
    elif group.size > 1 or optimizer.clipnorm:
        clip = functools.partial(_clip, optimizer, strategy)
        keras_optimizers.patch_clip(optimizer, clip)


def _clip(
    optimizer: keras.Optimizer,
    strategy: Strategy,
    gradients: Gradients,
    variables: Sequence[keras.Variable],
    clip: keras_optimizers.Clip,
) -> Gradients:
    """Clip gradients as the optimizer would clip the gradients of whole variables."""
    group = strategy.part_communicator
    _check_shards(optimizer, variables, strategy)
    # Keras has removed every None already.
    if optimizer.global_clipnorm and not optimizer.clipnorm and group.size > 1:
        squares = [tf.zeros([], tf.float64), tf.zeros([], tf.float64)]
        for gradient, variable in zip(gradients, variables, strict=True):
            squares[is_of_all(variable)] += _square_sum(gradient)
        norm = tf.sqrt(group.allreduce(squares[False]) + squares[True])
        most = tf.constant(optimizer.global_clipnorm, norm.dtype)
        # NaN where the norm is not finite, as in Keras.
        factor = most * tf.minimum(1.0 / norm, 1.0 / most) + (norm - norm)
        # Keras's product makes slices dense, too.
        return [_scaled(tf.convert_to_tensor(gradient), factor) for gradient in gradients]
    clipped = list(clip(gradients))
    wholes: dict[int, list[int]] = {}  # the parts of each variable that is in parts
    for i, variable in enumerate(variables if optimizer.clipnorm else ()):
        if isinstance(variable, keras_variables.VariablePart):
            wholes.setdefault(id(variable.whole), []).append(i)
        elif shard_of(variable) is not None:
            wholes[id(variable)] = [i]
    if not wholes:
        return clipped
    sums = [tf.add_n([_square_sum(gradients[i]) for i in parts]) for parts in wholes.values()]
    squares = tf.stack(sums) if group.size == 1 else group.allreduce(tf.stack(sums))
    most = tf.constant(optimizer.clipnorm, tf.float64)
    for square, parts in zip(tf.unstack(squares, len(wholes)), wholes.values(), strict=True):
        factor = most / tf.maximum(tf.sqrt(square), most)
        for i in parts:
            clipped[i] = _scaled(gradients[i], factor)
    return clipped


def _square_sum(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(keras_optimizers.square_sum(gradient), tf.float64)


def _scaled(
    gradient: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor
) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, _scaled(gradient.values, factor))
    return gradient * tf.cast(factor, gradient.dtype)


def mark_slots(optimizer: keras.Optimizer) -> None:
    """Mark the slot variables of parts of variables as parts of the same kind."""
    for member in members(optimizer):
        if member.built and not all(map(is_of_all, keras_optimizers.trained_variables(member))):
            for slot, variable, _ in keras_optimizers.slots_by_variable(member):
                if is_of_all(slot):
                    copy_mark(variable, slot)
