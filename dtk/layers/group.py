"""The ranks that hold the parts of one model."""

from __future__ import annotations

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalCommunicator


def model_group(communicator: Communicator | None) -> Communicator:
    """Return the communicator that parts of a model use.

    Args:
        communicator: One that was asked for; None for that of the current strategy.

    Returns:
        `model_communicator` of the strategy in whose scope this is called; of this process alone
        without one.
    """
    if communicator is not None:
        return communicator
    found = getattr(tf.distribute.get_strategy(), "model_communicator", None)
    return found if isinstance(found, Communicator) else LocalCommunicator()
