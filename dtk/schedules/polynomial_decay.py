"""The learning rate of the LARS paper (You, Gitman & Ginsburg 2017, arXiv:1708.03888)."""

from __future__ import annotations

import keras

from dtk.schedules.warmup import LearningRateWarmup


def polynomial_decay(
    learning_rate: float,
    steps: int,
    warmup_steps: int = 0,
    start: float = 0.0,
    power: float = 2.0,
) -> LearningRateWarmup:
    """Return Keras's `PolynomialDecay` to zero, rate (1 - t/T)^2, after a linear warm-up.

    t counts from the first step, so the rate reaches zero after `steps`, warm-up included.

    Args:
        learning_rate: The rate to decay from.
        steps: T, length of the training.
        warmup_steps: Length of the warm-up.
        start: Factor of the first step of the warm-up.
        power: Exponent.

    Returns:
        The schedule, for an optimizer.

    Raises:
        ValueError: A number of steps or `start` is out of range.

    Example:
        >>> rates = polynomial_decay(1.0, steps=10, warmup_steps=2)
        >>> [round(float(rates(step)), 4) for step in (0, 1, 2, 5, 10, 99)]
        [0.0, 0.405, 0.64, 0.25, 0.0, 0.0]
    """
    decay = keras.optimizers.schedules.PolynomialDecay(learning_rate, steps, 0.0, power)
    return LearningRateWarmup(decay, warmup_steps, start)
