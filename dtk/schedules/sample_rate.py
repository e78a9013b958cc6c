"""Learning rates per sample, which have the same meaning at every batch size.

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

from dtk.schedules.time_constant import check_batch_size, check_momentum


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
    return sample_rate * _samples(batch_size, momentum, unit_gain)


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
    return learning_rate / _samples(batch_size, momentum, unit_gain)


def _samples(batch_size: int, momentum: float, unit_gain: bool) -> float:
    check_batch_size(batch_size)
    check_momentum(momentum)
    return batch_size * (1.0 - momentum if unit_gain else 1.0)
