"""The learning rate of an optimizer, multiplied during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypedDict

import keras
import tensorflow as tf

from dtk.nests import Config
from dtk.optimizers import LARS
from dtk.trainer.gradients import shared_optimizer


class ScaledConfig(TypedDict):
    """Arguments of `ScaledSchedule`, as Keras saves them."""

    schedule: Config  # the schedule, serialized by Keras
    factor: float  # factor of its rate


@keras.saving.register_keras_serializable(package="dtk")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Another schedule's rate times a factor that can change during training.

    Example:
        >>> import keras
        >>> inner = keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.5)
        >>> round(float(ScaledSchedule(inner, 4.0)(0)), 6)
        0.4
    """

    def __init__(
        self, schedule: keras.optimizers.schedules.LearningRateSchedule, factor: float = 1.0
    ):
        self.schedule = schedule
        self.factor = tf.Variable(factor, trainable=False, dtype=tf.float32, name="rate_factor")

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        return self.schedule(step) * self.factor

    def get_config(self) -> ScaledConfig:
        """Return schedule and factor, as Keras saves them."""
        return {
            "schedule": keras.optimizers.schedules.serialize(self.schedule),
            "factor": float(self.factor.numpy()),
        }

    @classmethod
    def from_config(cls, config: ScaledConfig) -> ScaledSchedule:
        """Make a schedule from a configuration."""
        schedule = keras.optimizers.schedules.deserialize(config["schedule"])
        return cls(schedule, config["factor"])


@dataclasses.dataclass
class Scaling:
    """State of the scaling of one optimizer's learning rate."""

    base: float  # the script's rate
    factor: float  # factor of the rate after the warm-up
    applied: float = 1.0  # current factor of the rate
    warm: bool = False  # whether the warm-up is over


def scaling_from(state: Mapping[str, float]) -> Scaling:
    """Make a scaling from a saved state."""
    return Scaling(state["base"], state["factor"], state["applied"], bool(state["warm"]))


def rate_now(optimizer: keras.Optimizer) -> float:
    """Return the rate of the next step."""
    return float(keras.ops.convert_to_tensor(optimizer.learning_rate).numpy())


def check_settable(optimizer: keras.Optimizer, who: str) -> None:
    """Raise if callbacks cannot set the rate, since the optimizer computes it."""
    schedule = shared_optimizer.schedule_of(optimizer)
    if schedule is not None:
        raise ValueError(
            f"{who} sets the learning rate, but the optimizer computes its own ({schedule!r}); "
            "give the optimizer a number (for rates per sample, or rates that change after so many "
            "samples, use dtk.callbacks.SampleRate)"
        )


def multiply_rate(
    optimizer: keras.Optimizer, factor: float, momentum_correction: bool = True
) -> None:
    """Multiply an optimizer's rate, which must be a number, and its momentum buffers."""
    rate = Rate(optimizer, Scaling(rate_now(optimizer), 1.0), momentum_correction)
    rate.apply(factor)


class Rate:
    """Learning rate of an optimizer, if it is a number."""

    retrace = False

    def __init__(self, optimizer: keras.Optimizer, scaling: Scaling, momentum_correction: bool):
        self.optimizer = optimizer
        self.scaling = scaling
        self._buffers = momentum_buffers(optimizer) if momentum_correction else []

    def apply(self, factor: float) -> None:
        """Set the rate to `base * factor`, and scale the momentum buffers by the change."""
        before = self.scaling.applied
        if factor == before:
            return
        self._set(factor)
        self.scaling.applied = factor
        for buffer in self._buffers:
            buffer.assign(buffer.value * (factor / before))

    def _set(self, factor: float) -> None:
        self.optimizer.learning_rate = self.scaling.base * factor


class ScheduledRate(Rate):
    """Learning rate of an optimizer with a schedule; the schedule is multiplied."""

    def __init__(self, optimizer: keras.Optimizer, scaling: Scaling, momentum_correction: bool):
        super().__init__(optimizer, scaling, momentum_correction)
        schedule = shared_optimizer.schedule_of(optimizer)
        if not isinstance(schedule, ScaledSchedule):
            schedule = ScaledSchedule(schedule)
            optimizer.learning_rate = schedule
            self.retrace = True
        self._schedule = schedule
        self._set(scaling.applied)

    def _set(self, factor: float) -> None:
        self._schedule.factor.assign(factor)


def rate_of(optimizer: keras.Optimizer, scaling: Scaling, momentum_correction: bool) -> Rate:
    """Return an optimizer's rate."""
    kind = Rate if shared_optimizer.schedule_of(optimizer) is None else ScheduledRate
    return kind(optimizer, scaling, momentum_correction)


def momentum_buffers(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables that hold a sum of past gradients times the learning rate."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if not isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.RMSprop | LARS):
        return []
    return [v for v in optimizer.variables if v.name.endswith("_momentum")]
