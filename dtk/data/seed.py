"""Seeds: what must agree on all ranks, and what must not."""

from __future__ import annotations

import keras

from dtk.strategies.agreement import spread_seed
from dtk.strategies.base import DtkStrategy


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
    return spread_seed(seed, strategy.rank)
