"""The ranks that share data, from a strategy or a communicator."""

from __future__ import annotations

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.strategies.base import DtkStrategy


def group_of(strategy_or_communicator: DtkStrategy | Communicator | None = None) -> Communicator:
    """Return a strategy's communicator, or the communicator itself.

    Example:
        >>> from dtk.communicators import create
        >>> group_of(create("local")).size
        1
    """
    given = strategy_or_communicator
    if given is None and tf.distribute.has_strategy():
        given = tf.distribute.get_strategy()
    if isinstance(given, DtkStrategy):
        return given.communicator
    if isinstance(given, Communicator):
        return given
    what = "nothing outside a strategy's scope" if given is None else f"a {type(given).__name__}"
    raise ValueError(
        f"which ranks share the data? got {what}; give one of dtk's strategies or communicators, "
        "or call this inside strategy.scope()"
    )
