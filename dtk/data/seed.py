"""Seeds: what must agree on all ranks, and what must not."""

from __future__ import annotations

import keras
import numpy as np

from dtk.communicators.base import Communicator
from dtk.strategies.base import DtkStrategy
from dtk.trainer.ranks.seeds import spread_seed


def set_seed(seed: int, strategy: DtkStrategy) -> int:
    """Seed everything that must agree on all ranks, and return a seed that is this rank's own.

    Weights and the order of rows must be the same everywhere, because every rank reads the same
    global batches and keeps a slice. Give the returned seed to what must differ, such as the
    augmentation in a pipeline made with `dtk.data.shard`.

    Args:
        seed: The job's seed.
        strategy: Whose rank asks.

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
    """Return the seed itself, or where it is None a number from numpy's generator.

    Every rank draws, also where only one rank's number will count: generators stay alike.
    """
    return int(np.random.randint(2**31)) if seed is None else seed


def agree_on_seed(seed: int | None, communicator: Communicator, root: int = 0) -> int:
    """Return `root`'s seed on every rank; where that is None, the one `root` draws.

    Example:
        >>> from dtk.communicators import create
        >>> agree_on_seed(7, create("local"))
        7
    """
    return communicator.broadcast_object(drawn(seed), root)
