"""Momentum as a time constant: for how many samples a gradient counts, at any batch size."""

from __future__ import annotations

import math


def momentum_from_time_constant(time_constant: float, batch_size: int) -> float:
    """Return the momentum of a step, mu = exp(-batch / tau).

    After tau samples a gradient's weight has fallen to 1/e, whatever the number of steps.

    Args:
        time_constant: tau, in samples; 0 for no momentum.
        batch_size: Global batch, in samples.

    Raises:
        ValueError: The time constant is negative or not finite, or the batch is empty.

    Example:
        >>> round(momentum_from_time_constant(1100, 128), 4), momentum_from_time_constant(0, 128)
        (0.8902, 0.0)

    Source: CNTK's `momentum_as_time_constant_schedule`.
    """
    check_batch_size(batch_size)
    if not 0.0 <= time_constant < math.inf:
        raise ValueError(
            f"time_constant={time_constant!r}; expected a finite number of samples, 0 or more"
        )
    return math.exp(-batch_size / time_constant) if time_constant else 0.0


def time_constant_from_momentum(momentum: float, batch_size: int) -> float:
    """Return the time constant of a momentum, tau = -batch / ln(mu), in samples.

    Args:
        momentum: mu, 0.0 up to but below 1.0.
        batch_size: Global batch, in samples.

    Raises:
        ValueError: The momentum is out of range, or the batch is empty.

    Example:
        >>> round(time_constant_from_momentum(0.9, 128)), time_constant_from_momentum(0.0, 128)
        (1215, 0.0)
    """
    check_batch_size(batch_size)
    check_momentum(momentum)
    return -batch_size / math.log(momentum) if momentum else 0.0


def check_momentum(momentum: float) -> None:
    """Raise unless 0 <= momentum < 1."""
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum!r}; expected 0.0 up to but below 1.0")


def check_batch_size(batch_size: float) -> None:
    """Raise for an empty batch."""
    if not batch_size >= 1:
        raise ValueError(f"batch_size={batch_size!r}; expected a number of samples, 1 or more")
