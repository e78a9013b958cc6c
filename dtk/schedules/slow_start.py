"""Rates of PFN's "ImageNet in 15 Minutes" (Akiba, Suzuki & Fukuda 2017, arXiv:1711.04325)."""

from __future__ import annotations

import keras

from dtk.schedules.samples import by_samples

# Epochs, and the factor of the linearly scaled rate.
SLOW_START = [(40, 0.5), (30, 0.075), (15, 0.01), (5, 0.001)]


def slow_start(
    batch_size: int, epoch_size: int, base: float = 0.1
) -> keras.optimizers.schedules.PiecewiseConstantDecay:
    """Return the rates of the recipe, relative to 0.1 * batch / 256.

    The factors are 0.5 for 40 epochs, 0.075 for 30, 0.01 for 15 and 0.001 for 5. Use the schedule
    with `dtk.optimizers.RMSpropWarmup`.

    Args:
        batch_size: Global batch, in samples.
        epoch_size: Samples in an epoch of `fit`.
        base: The rate for a batch of 256.

    Returns:
        The schedule, for an optimizer.

    Raises:
        ValueError: A size is not a positive integer.

    Example:
        >>> rates = slow_start(32768, 1281167)
        >>> [round(float(rates(40 * epoch)), 4) for epoch in (0, 40, 70, 85, 89)]
        [6.4, 0.96, 0.128, 0.0128, 0.0128]
    """
    rate = base * batch_size / 256
    schedule = [(epochs, rate * factor) for epochs, factor in SLOW_START]
    return by_samples(schedule, batch_size, epoch_size)
