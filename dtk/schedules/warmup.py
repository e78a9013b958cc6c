"""A smaller learning rate for the first steps (Goyal et al. 2017, arXiv:1706.02677)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

import keras
from keras import ops

if TYPE_CHECKING:
    import tensorflow as tf

# The factor of a rate, from the first factor and the progress of the warm-up, 0 to 1.
SHAPES: dict[str, Callable[[float, tf.Tensor], tf.Tensor | float]] = {
    "linear": lambda start, progress: start + (1.0 - start) * progress,
    "exponential": lambda start, progress: start ** (1.0 - progress),
    "constant": lambda start, progress: start,
}


class WarmupConfig(TypedDict):
    """Arguments of `LearningRateWarmup`, as Keras saves them."""

    learning_rate: float | dict[str, object]  # a number, or a schedule serialized by Keras
    steps: int  # length of the warm-up in steps
    start: float  # factor of the first step
    shape: str  # name of one of SHAPES


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

    Example:
        >>> rates = LearningRateWarmup(0.8, steps=4, start=0.25)
        >>> [round(float(rates(step)), 4) for step in range(6)]
        [0.2, 0.35, 0.5, 0.65, 0.8, 0.8]
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        steps: int,
        start: float = 0.0,
        shape: str = "linear",
    ):
        super().__init__()
        if not _is_rate(learning_rate):
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

    def get_config(self) -> WarmupConfig:
        """Return the constructor's arguments, as Keras saves them."""
        rate = self.learning_rate
        if callable(rate):
            rate = keras.optimizers.schedules.serialize(rate)
        return {
            "learning_rate": rate,
            "steps": self.steps,
            "start": self.start,
            "shape": self.shape,
        }

    @classmethod
    def from_config(cls, config: WarmupConfig) -> LearningRateWarmup:
        """Make a schedule from a configuration."""
        rate = config["learning_rate"]
        if isinstance(rate, dict):
            rate = keras.optimizers.schedules.deserialize(rate)
        return cls(rate, steps=config["steps"], start=config["start"], shape=config["shape"])


def _is_rate(value: object) -> bool:
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
