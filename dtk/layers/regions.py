"""The borders of what ranks compute in parts: gradients of a loss that every rank computes alike.

Outside such a region tensors are equal on all ranks of a group, and so is the loss. The functions
of Shoeybi et al. (Megatron-LM, arXiv:1909.08053), forward and backward:

    copy_to_group        identity     all-reduce    equal inputs, used for different parts
    reduce_from_group    all-reduce   identity      partial sums -> the sum
    gather_from_group    allgather    slice         parts -> the whole
    scatter_to_group     slice        allgather     the whole -> parts

Each one's gradient is made of the one opposite, so gradients of gradients are right. Nothing is
sent for what depends on nothing that is differentiated by, such as a batch; that is alike on all
ranks.
"""

from __future__ import annotations

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.shard import Shard
from dtk.layers.gradients import unconverted, with_gradient

__all__ = ["copy_to_group", "gather_from_group", "reduce_from_group", "scatter_to_group"]


@unconverted
def copy_to_group(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Enter a region with a tensor that every rank uses as a whole.

    Args:
        value: Equal on all ranks.
        communicator: Of the group.

    Returns:
        `value`; its gradient is the sum of all ranks'.
    """
    return with_gradient(
        value,
        tf.identity,
        lambda dy: reduce_from_group(dy, communicator),
    )


@unconverted
def reduce_from_group(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Leave a region in which every rank has computed a part of a sum.

    Args:
        value: This rank's part, of the shape of the sum.
        communicator: Of the group.

    Returns:
        The sum, on every rank.
    """
    return with_gradient(
        value,
        communicator.allreduce,
        lambda dy: copy_to_group(dy, communicator),
    )


@unconverted
def gather_from_group(value: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Leave a region in which every rank has computed a part of a tensor.

    Args:
        value: This rank's part.
        shard: How the tensor is divided.

    Returns:
        The whole tensor, on every rank.
    """
    return with_gradient(
        value,
        shard.whole,
        lambda dy: scatter_to_group(dy, shard),
    )


@unconverted
def scatter_to_group(value: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Enter a region with a tensor of which every rank uses a part.

    Args:
        value: Equal on all ranks.
        shard: How it is divided.

    Returns:
        This rank's part.
    """
    return with_gradient(
        value,
        shard.part,
        lambda dy: gather_from_group(dy, shard),
    )
