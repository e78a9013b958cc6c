"""Epochs divided by the number of workers, for scripts that count epochs per worker."""

from __future__ import annotations

import math

from dtk.trainer.strategy import Strategy


def epochs_per_worker(epochs: int, strategy: Strategy, minimum: int = 1) -> int:
    """Return how many epochs each worker runs if all share them: `ceil(epochs / size)`.

    Under a dtk strategy an epoch is one pass of all workers together over the data, so the number
    of epochs does *not* depend on the number of workers, and most scripts need no division. Divide
    in scripts for the other convention, where every worker passes over all data by itself
    (unsharded `tf.data` with a per-worker batch), or to trade epochs for a larger learning rate.
    Divide before `fit`, so that the progress bar and every schedule see the real number.

    Args:
        epochs: Epochs of one worker.
        strategy: A dtk strategy, or an object with a `size`.
        minimum: The least number to return.

    Returns:
        The number of epochs, at least `minimum`.

    Raises:
        ValueError: `epochs` is negative or `minimum` below 1.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> epochs_per_worker(30, strategy)
        30
    """
    if epochs < 0:
        raise ValueError(f"epochs must be 0 or more, got {epochs}")
    if minimum < 1:
        raise ValueError(f"minimum must be at least 1, got {minimum}")
    return max(minimum, math.ceil(epochs / strategy.size))
