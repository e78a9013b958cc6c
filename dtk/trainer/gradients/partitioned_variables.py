"""Let optimizers update the parts of a variable as they would update the whole.

A large variable is cut by rows over several servers, and an optimizer sees each part as a separate
variable. The result is the same if a row's step depends on that row only. The exceptions:

    clipping to a norm          the squared norms of the parts are summed here
    one ratio, mean or matrix   Lamb, LARS, Adafactor, Muon: refused
    constraints over rows       UnitNorm(axis=0) and the like: refused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables
from dtk.nests import Gradients
from dtk.optimizers.layerwise import LayerwiseOptimizer


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
    """Refuse an optimizer or a constraint that needs a whole variable, if it is in parts."""
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


def clip_wholes(optimizer: keras.Optimizer) -> None:
    """Make an optimizer's `clipnorm` clip parts by the norm of the whole variable's gradient."""

    def clip(
        gradients: Gradients,
        variables: Sequence[keras.Variable],
        clip_each: keras_optimizers.Clip,
    ) -> Gradients:
        clipped = list(clip_each(gradients))
        wholes: dict[int, list[int]] = {}
        for index, variable in enumerate(variables):
            if isinstance(variable, keras_variables.VariablePart):
                wholes.setdefault(id(variable.whole), []).append(index)
        for indices in wholes.values():
            together = _clipped_together([gradients[i] for i in indices], optimizer.clipnorm)
            for index, gradient in zip(indices, together, strict=True):
                clipped[index] = gradient
        return clipped

    if optimizer.clipnorm:
        keras_optimizers.patch_clip(optimizer, clip)


def _clipped_together(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices], most: float
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Clip the gradients of a variable's parts as `tf.clip_by_norm` clips the whole gradient."""
    squares = [tf.reduce_sum(tf.square(_rows(g))) for g in gradients]
    norm = tf.sqrt(tf.add_n(squares))
    return [
        tf.IndexedSlices(_scaled(g.values, most, norm), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else _scaled(g, most, norm)
        for g in gradients
    ]


def _rows(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _scaled(values: tf.Tensor, most: float, norm: tf.Tensor) -> tf.Tensor:
    return values * most / tf.maximum(norm, tf.cast(most, norm.dtype))
