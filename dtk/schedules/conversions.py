"""Momentum and learning rates that mean the same at every batch size, as numbers for Keras's SGD.

CNTK's SGD sums gradients and its momentum has unit gain; Keras's SGD takes the mean, without unit
gain:

    CNTK    v = mu v + (1 - mu) sum g      w = w - sample_rate * v
    Keras   v = mu v - rate * mean g       w = w + v

So both take the same steps if rate = sample_rate * batch * (1 - mu), while neither changes. If
sample_rate changes, Keras's v still contains the old rate and must be multiplied by new/old; if the
batch changes, v contains samples with another momentum. `dtk.callbacks.SampleRate` corrects both
while `fit` runs.

Keras also takes the mean of a short last batch, so its samples count more. Leave this batch out, or
use `SampleRate`, or make the loss a sum: `reduction="sum"` and a `batch_size` of 1 here are exact
for every batch.
"""

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
    _check(batch_size)
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
    _check(batch_size, momentum)
    return -batch_size / math.log(momentum) if momentum else 0.0


def learning_rate_from_sample_rate(
    sample_rate: float, batch_size: int, momentum: float = 0.0, unit_gain: bool = True
) -> float:
    """Return Keras's rate for a rate per sample.

    Args:
        sample_rate: Factor of one sample's gradient.
        batch_size: Global batch, in samples.
        momentum: mu, the momentum of `keras.optimizers.SGD`.
        unit_gain: Whether the rate is for v = mu v + (1 - mu) sum g; else for v = mu v + sum g.

    Returns:
        The rate for `keras.optimizers.SGD`.

    Raises:
        ValueError: The momentum is not in [0, 1), or the batch is empty.

    Example:
        >>> round(learning_rate_from_sample_rate(0.0078125, 128, momentum=0.9), 6)
        0.1
    """
    _check(batch_size, momentum)
    return sample_rate * (batch_size * (1.0 - momentum if unit_gain else 1.0))


def sample_rate_from_learning_rate(
    learning_rate: float, batch_size: int, momentum: float = 0.0, unit_gain: bool = True
) -> float:
    """Return the rate per sample of a Keras rate, rate / batch / (1 - mu).

    Args:
        learning_rate: The rate of `keras.optimizers.SGD`.
        batch_size: Global batch, in samples.
        momentum: mu, the momentum of `keras.optimizers.SGD`.
        unit_gain: Whether the result is for v = mu v + (1 - mu) sum g; else for v = mu v + sum g.

    Raises:
        ValueError: The momentum is not in [0, 1), or the batch is empty.

    Example:
        >>> round(sample_rate_from_learning_rate(0.1, 128, momentum=0.9), 7)
        0.0078125
    """
    return learning_rate / learning_rate_from_sample_rate(1.0, batch_size, momentum, unit_gain)


def _check(batch_size: float, momentum: float = 0.0) -> None:
    if not batch_size >= 1:
        raise ValueError(f"batch_size={batch_size!r}; expected a number of samples, 1 or more")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum={momentum!r}; expected 0.0 up to but below 1.0")
