"""Keras schedules of the learning rate: a warm-up, a decay, and rates by the samples seen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import keras
from keras import ops

from dtk.nests import Config
from dtk.schedules.runs import Runs, ends_of, is_count, is_rate, parse_runs, value_at

if TYPE_CHECKING:
    import tensorflow as tf

# The factor of a rate, from the first factor and the progress of the warm-up, 0 to 1.
SHAPES: dict[str, Callable[[float, tf.Tensor], tf.Tensor | float]] = {
    "linear": lambda start, progress: start + (1.0 - start) * progress,
    "exponential": lambda start, progress: start ** (1.0 - progress),
    "constant": lambda start, progress: start,
}


@keras.saving.register_keras_serializable(package="dtk")
class LearningRateWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """A number, or another schedule's rate, times a factor that rises to 1 in the first steps.

    The factor changes with every iteration. The other schedule runs from the first step, as if
    there were no warm-up, so the rate does not jump when the warm-up ends. For training with k
    times the rate, Goyal's gradual warm-up is `start=1 / k`.

        factor
        1 |        .----- linear        start + (1 - start) t/T
          |     . :       exponential   start^(1 - t/T)
          |  .    :       constant      start
        s |.......:
          +-------T--> t

    `dtk.callbacks.LearningRateScaling` also scales the rate by the number of workers and corrects
    momentum; use only one of the two.

    Args:
        learning_rate: A number, or a schedule.
        steps: T, length of the warm-up in steps; 0 for none.
        start: Factor of the first step, up to 1.0; may be 0.0 if the shape is linear.
        shape: "linear" (the paper's gradual warm-up), "exponential", or "constant".

    Raises:
        ValueError: An argument is out of range.

    Source: Goyal et al. 2017, arXiv:1706.02677.

    Example:
        >>> rates = LearningRateWarmup(0.8, steps=4, start=0.25)
        >>> [round(float(rates(step)), 4) for step in range(6)]
        [0.2, 0.35, 0.5, 0.65, 0.8, 0.8]
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule | Config,
        steps: int,
        start: float = 0.0,
        shape: str = "linear",
    ):
        super().__init__()
        if isinstance(learning_rate, dict):  # a schedule, in a saved configuration
            learning_rate = keras.optimizers.schedules.deserialize(learning_rate)
        schedule = keras.optimizers.schedules.LearningRateSchedule
        if not (isinstance(learning_rate, schedule) or is_rate(learning_rate)):
            raise ValueError(
                f"learning_rate={learning_rate!r}; expected a number of at least 0 or a "
                "keras.optimizers.schedules.LearningRateSchedule"
            )
        if not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps={steps!r}; expected a number of steps, 0 or more")
        if shape not in SHAPES:
            raise ValueError(f"shape={shape!r}; expected one of {', '.join(SHAPES)}")
        if not 0.0 <= start <= 1.0 or (start == 0.0 and shape != "linear"):
            raise ValueError(
                f"start={start!r}; expected a factor up to 1.0, and above 0.0 unless the shape is "
                f"linear (here {shape})"
            )
        self.learning_rate = learning_rate
        self.steps = steps
        self.start = start
        self.shape = shape

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        after = self.learning_rate
        rate = after(step) if callable(after) else ops.convert_to_tensor(after, "float32")
        progress = ops.cast(step, "float32") / max(self.steps, 1)
        factor = SHAPES[self.shape](self.start, progress)
        return rate * ops.where(ops.cast(step, "float32") < self.steps, factor, 1.0)

    def get_config(self) -> Config:
        """Return the constructor's arguments, as Keras saves them."""
        rate = self.learning_rate
        return {
            "learning_rate": keras.optimizers.schedules.serialize(rate) if callable(rate) else rate,
            "steps": self.steps,
            "start": self.start,
            "shape": self.shape,
        }


def polynomial_decay(
    learning_rate: float,
    steps: int,
    warmup_steps: int = 0,
    start: float = 0.0,
    power: float = 2.0,
) -> LearningRateWarmup:
    """Return Keras's `PolynomialDecay` to zero, rate (1 - t/T)^2, after a linear warm-up.

    t counts from the first step, so the rate reaches zero after `steps`, warm-up included. It is
    the rate of the LARS paper (You, Gitman & Ginsburg 2017, arXiv:1708.03888).

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
    rates = parse_runs(schedule, "learning rate", is_rate, "a finite number of at least 0")
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
    runs = [batch_size] if isinstance(batch_size, int) else batch_size
    sizes = parse_runs(runs, "batch size", is_count, "an integer of at least 1")
    if epoch_size is not None and not is_count(epoch_size):
        raise ValueError(f"epoch_size={epoch_size!r}; expected a number of samples, 1 or more")
    if epoch_size is None and len(sizes) > 1:
        raise ValueError(
            f"batch_size={batch_size!r} changes with the epochs, whose length is unknown; give "
            "epoch_size, the samples in one"
        )
    return sizes


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

    Source: "ImageNet in 15 Minutes" (Akiba, Suzuki & Fukuda 2017, arXiv:1711.04325).

    Example:
        >>> rates = slow_start(32768, 1281167)
        >>> [round(float(rates(40 * epoch)), 4) for epoch in (0, 40, 70, 85, 89)]
        [6.4, 0.96, 0.128, 0.0128, 0.0128]
    """
    rate = base * batch_size / 256
    schedule = [(epochs, rate * factor) for epochs, factor in SLOW_START]
    return by_samples(schedule, batch_size, epoch_size)
