"""Learning rates by the number of samples seen, for any batch size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import keras

from dtk.schedules.runs import Runs, ends_of, is_count, parse_runs, value_at


def by_samples(
    schedule: Sequence[float | tuple[int, float]],
    batch_size: int | Sequence[int | tuple[int, int]],
    epoch_size: int | None = None,
    per_sample: bool = False,
) -> keras.optimizers.schedules.PiecewiseConstantDecay:
    """Return a Keras schedule from a list of rates and `(count, rate)` pairs; the last persists.

    A count is in samples, or with `epoch_size` in epochs. The samples seen before a step decide its
    rate. The optimizer counts its steps and saves the count, so a restart changes nothing.

    Args:
        schedule: The rates.
        batch_size: Global batch of every step; or, with `epoch_size`, a schedule as for
            `dtk.callbacks.BatchSizeSchedule`.
        epoch_size: Samples in an epoch of `fit`, whose last batch may be short; None to count in
            samples, with full batches only.
        per_sample: Whether the rates are for one sample; they are then multiplied by the batch
            size. With momentum, see `learning_rate_from_sample_rate`; if the batch size or the rate
            changes during training, see `dtk.callbacks.SampleRate`.

    Returns:
        The schedule, for an optimizer.

    Raises:
        ValueError: A list is malformed, or the batch size changes and `epoch_size` is missing.

    Example:
        >>> rates = by_samples([(256, 0.1), 0.01], batch_size=64)
        >>> [round(float(rates(step)), 4) for step in (0, 3, 4, 99)]
        [0.1, 0.1, 0.01, 0.01]

        Ten samples an epoch, in batches of 4, 4 and 2, and from epoch 2 on of 8 and 2:

        >>> rates = by_samples([(2, 0.1), 0.01], [(2, 4), 8], epoch_size=10, per_sample=True)
        >>> [round(float(rates(step)), 4) for step in (0, 5, 6)]
        [0.4, 0.4, 0.08]

    Source: the schedules of CNTK.
    """
    rates = parse_runs(schedule, "learning rate", _is_rate, "a finite number of at least 0")
    sizes = _sizes(batch_size, epoch_size)
    # Leave out the end of the last batch size, but not of the last rate: Keras needs a boundary.
    starts = sorted({0, *ends_of(rates), *ends_of(sizes)[:-1]})
    values = [
        float(value_at(rates, start) * (value_at(sizes, start) if per_sample else 1))
        for start in starts
    ]
    # Keras takes the next value after a boundary, not at the boundary.
    boundaries = [step - 1 for step in _steps_at(starts, sizes, epoch_size)[1:]]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, values)


def _steps_at(starts: list[int], sizes: Runs, epoch_size: int | None) -> list[int]:
    """Return the first step at or after each position; in between the batch size is constant."""
    if epoch_size is None:
        return [math.ceil(start / sizes[0][1]) for start in starts]
    lengths = (
        (stop - start) * math.ceil(epoch_size / value_at(sizes, start))
        for start, stop in itertools.pairwise(starts)
    )
    return list(itertools.accumulate(lengths, initial=0))


def _sizes(batch_size: int | Sequence[int | tuple[int, int]], epoch_size: int | None) -> Runs:
    given = [batch_size] if isinstance(batch_size, int) else batch_size
    sizes = parse_runs(given, "batch size", is_count, "an integer of at least 1")
    if epoch_size is not None and not is_count(epoch_size):
        raise ValueError(f"epoch_size={epoch_size!r}; expected a number of samples, 1 or more")
    if epoch_size is None and len(sizes) > 1:
        raise ValueError(
            f"batch_size={batch_size!r} changes with the epochs, whose length is unknown; give "
            "epoch_size, the samples in one"
        )
    return sizes


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
