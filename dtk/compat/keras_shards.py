"""Marks on Keras variables that hold one rank's part of a tensor.

Nothing private of Keras is used: a mark is an attribute of dtk's own.
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
    """Return how the tensor is divided of which a variable holds one rank's part.

    Args:
        variable: A Keras variable.

    Returns:
        What `set_shard` was given; None of a variable that holds a tensor as a whole.
    """
    mark = getattr(variable, _MARK, None)
    return mark if isinstance(mark, Shard) else None


def set_owner(variable: keras.Variable, owner: OneRanks) -> None:
    """Mark a variable as one that this rank of a group holds alone."""
    setattr(variable, _MARK, owner)


def is_of_all(variable: keras.Variable) -> bool:
    """Return whether all ranks hold a variable, and hold the same."""
    return getattr(variable, _MARK, None) is None


def group_of(variable: keras.Variable) -> Communicator | None:
    """Return the communicator of the ranks that hold the parts a variable is one of."""
    mark = getattr(variable, _MARK, None)
    return mark.communicator if isinstance(mark, Shard | OneRanks) else None


def copy_mark(variable: keras.Variable, slot: keras.Variable) -> None:
    """Mark what an optimizer remembers of a variable as that variable is marked."""
    setattr(slot, _MARK, getattr(variable, _MARK, None))
