"""The ranks that hold the parts of a layer."""

from __future__ import annotations

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator


def model_group(given: Communicator | None = None) -> Communicator:
    """Return the communicator of the ranks that hold parts of one model."""
    if given is not None:
        return given
    strategy = tf.distribute.get_strategy()
    found: Communicator | None = getattr(strategy, "model_communicator", None)
    return found or LocalCommunicator()


def agreed_lengths(length: int, communicator: Communicator) -> tuple[int, ...]:
    """Return the length of an axis on every rank; all ranks of the group call it in `build`."""
    if communicator.size == 1:
        return (length,)
    with tf.init_scope():
        lengths = communicator.allgather(tf.constant([length]), [1] * communicator.size)
        return tuple(int(one) for one in lengths.numpy())
