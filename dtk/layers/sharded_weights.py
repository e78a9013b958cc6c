"""Initializers, regularizers and constraints of a variable in parts, one part on every rank.

They treat the parts as one whole variable, so that a layer in parts equals the layer of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.shard import Shard
from dtk.layers.regions import gather_from_group, reduce_from_group
from dtk.nests import Function

# Take the variable's shape and dtype, and the variable's value.
_Initializer: TypeAlias = Function[tf.Tensor]
_OfValue: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

# Sums over elements: the penalty of the whole is the sum of the penalties of its parts.
_ADDITIVE = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
# Norms along axes that the constraint names.
_NORMS = (
    keras.constraints.MaxNorm,
    keras.constraints.MinMaxNorm,
    keras.constraints.UnitNorm,
)


class PartInitializer:
    """Draws the whole variable, and keeps this rank's part.

    All ranks take the numbers of the group's first rank: ranks that draw different numbers would
    hold parts of different variables.
    """

    def __init__(self, initializer: _Initializer, shard: Shard, whole_shape: Sequence[int]) -> None:
        self._initializer = initializer
        self._shard = shard
        self._whole_shape = tuple(whole_shape)

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
        """Return this rank's part."""
        del shape
        whole = tf.convert_to_tensor(self._initializer(self._whole_shape, dtype=dtype))
        return self._shard.part(self._shard.communicator.broadcast(whole, 0))


class SharedInitializer:
    """Draws a variable that all ranks of a group hold as a whole, with the same values."""

    def __init__(self, initializer: _Initializer, shard: Shard) -> None:
        self._initializer = initializer
        self._shard = shard

    def __call__(self, shape: Sequence[int], dtype: str | None = None) -> tf.Tensor:
        """Return the initial value."""
        value = tf.convert_to_tensor(self._initializer(shape, dtype=dtype))
        return self._shard.communicator.broadcast(value, 0)


def part_regularizer(regularizer: _OfValue | None, shard: Shard) -> _OfValue | None:
    """Return a regularizer that takes a part and returns the penalty of the whole, on every rank.

    The penalty counts once over the group: its gradient on a rank is the gradient of this rank's
    part. Sums over elements (L1, L2) send one number; any other regularizer gathers the variable.
    """
    if regularizer is None:
        return None
    if type(regularizer) in _ADDITIVE:
        return lambda part: reduce_from_group(regularizer(part), shard.communicator)
    return lambda part: regularizer(gather_from_group(tf.convert_to_tensor(part), shard))


def part_constraint(constraint: _OfValue | None, shard: Shard) -> _OfValue | None:
    """Return a constraint on a part with the effect of the constraint on the whole.

    A constraint on each element, or on norms along other axes than the divided one, sends nothing;
    any other gathers the variable after each update.
    """
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return constraint
    if type(constraint) in _NORMS:
        axes: int | Sequence[int] = getattr(constraint, "axis", 0)
        if shard.axis not in ([axes] if isinstance(axes, int) else list(axes)) and _counted(axes):
            return constraint
    return lambda part: shard.part(constraint(shard.whole(tf.convert_to_tensor(part))))


def _counted(axes: int | Sequence[int]) -> bool:
    return min([axes] if isinstance(axes, int) else axes) >= 0
