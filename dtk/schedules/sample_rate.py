"""Learning rates per sample, which mean the same at every batch size.

CNTK's SGD adds up gradients and has momentum of unit gain; Keras's takes their mean and has not:

    CNTK    v = mu v + (1 - mu) sum g      w = w - sample_rate * v
    Keras   v = mu v - rate * mean g       w = w + v

so both take the same steps when rate = sample_rate * batch * (1 - mu), for as long as neither
changes. When sample_rate does, Keras's v still holds the old one, and is to be multiplied by
new/old; when the batch does, v holds samples at another momentum. `dtk.callbacks.SampleRate` takes
care of both while `fit` runs.

Of a short last batch Keras takes the mean too, so its samples count for more; leave it out, or use
`SampleRate`, or let the loss be a sum: `reduction="sum"` and a `batch_size` of 1 here are exact for
every batch.
"""

from __future__ import annotations

from dtk.schedules.time_constant import check_batch_size, check_momentum


def learning_rate_from_sample_rate(
    sample_rate: float, batch_size: int, momentum: float = 0.0, unit_gain: bool = True
) -> float:
    """Return Keras's rate for a rate per sample.

    Args:
        sample_rate: What one sample's gradient is multiplied with.
        batch_size: Global batch, in samples.
        momentum: mu, as given to `keras.optimizers.SGD`.
        unit_gain: Whether the rate was made for v = mu v + (1 - mu) sum g; else mu v + sum g.

    Returns:
        The rate to give to `keras.optimizers.SGD`.

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
        learning_rate: As given to `keras.optimizers.SGD`.
        batch_size: Global batch, in samples.
        momentum: mu, likewise.
        unit_gain: Whether the result is for v = mu v + (1 - mu) sum g; else mu v + sum g.

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
