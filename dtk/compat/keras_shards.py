"""Marks on Keras variables that hold one rank's part of a tensor.

Nothing private of Keras is used: a mark is an attribute of dtk's own.
"""

from __future__ import annotations

import keras

from dtk.communicators.shard import Shard

_SHARD = "_dtk_shard"


def set_shard(variable: keras.Variable, shard: Shard) -> None:
    """Mark a variable as one rank's part of a tensor.

    Checkpoints, clipping by the global norm and checks between ranks read the mark.

    Args:
        variable: It holds the part of this rank.
        shard: How the whole tensor is divided.

    Raises:
        ValueError: The variable is built, and its shape is not that of the part.
    """
    if variable.shape is not None:
        shard.whole_shape(variable.shape)
    setattr(variable, _SHARD, shard)


def shard_of(variable: keras.Variable) -> Shard | None:
    """Return how the tensor is divided of which a variable holds one rank's part.

    Args:
        variable: A Keras variable.

    Returns:
        What `set_shard` was given; None of a variable that holds a tensor as a whole.
    """
    shard: Shard | None = getattr(variable, _SHARD, None)
    return shard
