"""Marks on Keras variables that hold one rank's part of a tensor.

This uses nothing private of Keras: a mark is an attribute that dtk adds.
"""

from __future__ import annotations

import keras

from dtk.communicators.base import Communicator
from dtk.communicators.shard import OneRanks, Shard

_MARK = "_dtk_part"


def set_shard(variable: keras.Variable, shard: Shard) -> None:
    """Mark a variable as one rank's part of a tensor.

    Checkpoints, clipping by the global norm and checks between ranks read the mark.
    """
    if variable.shape is not None:
        shard.whole_shape(variable.shape)
    setattr(variable, _MARK, shard)


def shard_of(variable: keras.Variable) -> Shard | None:
    """Return the shard of a variable that holds one rank's part of a tensor.

    Args:
        variable: A Keras variable.

    Returns:
        The shard given to `set_shard`; None for a variable that holds a whole tensor.
    """
    mark = getattr(variable, _MARK, None)
    return mark if isinstance(mark, Shard) else None


def set_owner(variable: keras.Variable, owner: OneRanks) -> None:
    """Mark a variable that only this rank of a group holds."""
    setattr(variable, _MARK, owner)


def is_of_all(variable: keras.Variable) -> bool:
    """Return whether all ranks hold the same variable with equal values."""
    return getattr(variable, _MARK, None) is None


def group_of(variable: keras.Variable) -> Communicator | None:
    """Return the communicator of the ranks that hold the parts of a variable's tensor."""
    mark = getattr(variable, _MARK, None)
    return mark.communicator if isinstance(mark, Shard | OneRanks) else None


def copy_mark(variable: keras.Variable, slot: keras.Variable) -> None:
    """Mark a slot variable like the variable it belongs to."""
    setattr(slot, _MARK, getattr(variable, _MARK, None))
