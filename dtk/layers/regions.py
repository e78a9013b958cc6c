"""The borders of regions that ranks compute in parts, for a loss that is equal on all ranks.

Outside such a region tensors are equal on all ranks of a group, and so is the loss. The functions
of Shoeybi et al. (Megatron-LM, arXiv:1909.08053), forward and backward:

    copy_to_group        identity     all-reduce    equal inputs, used for different parts
    reduce_from_group    all-reduce   identity      partial sums -> the sum
    gather_from_group    allgather    slice         parts -> the whole
    scatter_to_group     slice        allgather     the whole -> parts

The gradient of each function is its opposite, so gradients of gradients are right. No gradient is
sent for a tensor that depends on no source of the gradient, such as a batch; all ranks agree on
that.
"""

from __future__ import annotations

import tensorflow as tf

from dtk.communicators.base import Communicator, unconverted
from dtk.communicators.local import LocalCommunicator
from dtk.communicators.shard import Shard
from dtk.layers.collectives import with_gradient

__all__ = ["copy_to_group", "gather_from_group", "reduce_from_group", "scatter_to_group"]


@unconverted
def copy_to_group(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Enter a region with a tensor that every rank uses as a whole.

    Args:
        value: A tensor that is equal on all ranks.
        communicator: Communicator of the group.

    Returns:
        `value`; its gradient is the sum of all ranks' gradients.
    """
    return with_gradient(value, tf.identity, lambda dy: reduce_from_group(dy, communicator))


@unconverted
def reduce_from_group(value: tf.Tensor, communicator: Communicator) -> tf.Tensor:
    """Leave a region in which every rank has computed a part of a sum.

    Args:
        value: This rank's part, with the shape of the sum.
        communicator: Communicator of the group.

    Returns:
        The sum, on every rank.
    """
    return with_gradient(value, communicator.allreduce, lambda dy: copy_to_group(dy, communicator))


@unconverted
def gather_from_group(value: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Leave a region in which every rank has computed a part of a tensor.

    Args:
        value: This rank's part.
        shard: How the tensor is divided.

    Returns:
        The whole tensor, on every rank.
    """
    return with_gradient(value, shard.whole, lambda dy: scatter_to_group(dy, shard))


@unconverted
def scatter_to_group(value: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Enter a region in which every rank uses a part of a tensor.

    Args:
        value: A tensor that is equal on all ranks.
        shard: How the tensor is divided.

    Returns:
        This rank's part.
    """
    return with_gradient(value, shard.part, lambda dy: gather_from_group(dy, shard))


def model_group(communicator: Communicator | None = None) -> Communicator:
    """Return the communicator of the ranks that hold parts of one model."""
    if communicator is not None:
        return communicator
    strategy = tf.distribute.get_strategy()
    group: Communicator | None = getattr(strategy, "model_communicator", None)
    return group or LocalCommunicator()


def agreed_lengths(length: int, communicator: Communicator) -> tuple[int, ...]:
    """Return the length of an axis on every rank; all ranks of the group call it in `build`."""
    if communicator.size == 1:
        return (length,)
    with tf.init_scope():
        lengths = communicator.allgather(tf.constant([length]), [1] * communicator.size)
        return tuple(int(one) for one in lengths.numpy())
