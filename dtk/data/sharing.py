"""The ranks that share data, and their random numbers: equal on all ranks, or different on each."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.nests import Array
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.ranks.shared_weights import spread_seed


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


def set_seed(seed: int, strategy: DtkStrategy) -> int:
    """Seed everything that must be equal on all ranks, and return another seed for each rank.

    Weights and the order of rows must be the same everywhere, because every rank reads the same
    global batches and keeps a slice. Use the returned seed where ranks must differ, for example for
    the augmentation in a pipeline made with `dtk.data.shard`.

    Args:
        seed: The job's seed.
        strategy: The strategy, which knows this process's rank.

    Returns:
        `seed` on rank 0, and a different number on every other rank.

    Example:
        >>> import dtk
        >>> dtk.data.set_seed(7, dtk.strategies.AllReduceStrategy("local"))
        7
    """
    keras.utils.set_random_seed(seed)
    return spread_seed(seed, strategy.communicator.rank)


def drawn(seed: int | None) -> int:
    """Return the seed, or a number from numpy's generator if it is None.

    Every rank draws, even if only one rank's number counts, so that generators stay equal.
    """
    return int(np.random.randint(2**31)) if seed is None else seed


def agree_on_seed(seed: int | None, communicator: Communicator, root: int = 0) -> int:
    """Return `root`'s seed on every rank; if it is None, `root` draws one.

    Example:
        >>> from dtk.communicators import create
        >>> agree_on_seed(7, create("local"))
        7
    """
    return communicator.broadcast_object(drawn(seed), root)


def permutation(rows: int, seed: int) -> Array:
    """Return the rows `0 .. rows - 1` in random order.

    Like ChainerMN, this draws from numpy's `RandomState`, which gives the same numbers in every
    version of numpy. So a seed gives the same order as in ChainerMN.

    Example:
        >>> permutation(6, seed=0).tolist()
        [5, 2, 1, 3, 0, 4]
    """
    return np.random.RandomState(seed).permutation(rows)
