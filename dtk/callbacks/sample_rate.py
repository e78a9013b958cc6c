"""A learning rate per sample, for any batch size: CNTK's SGD."""

from __future__ import annotations

import math
from typing import NamedTuple

import keras

from dtk.callbacks.hyperparameters.momentum import Momentum, carried_over, innermost, momentum_of
from dtk.callbacks.hyperparameters.rate import check_settable, rate_now
from dtk.callbacks.momentum_schedule import MomentumSchedule, SamplesState, Values
from dtk.nests import Logs
from dtk.schedules import learning_rate_from_sample_rate, time_constant_from_momentum
from dtk.schedules.runs import parse_runs
from dtk.trainer.distributed_trainer import DistributedTrainer


def is_rate(value: object) -> bool:
    """Return whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


class _InForce(NamedTuple):
    """Values that the callback has set on the optimizer."""

    planned: float  # the rate per sample, without changes by other callbacks
    momentum: float  # mu
    learning_rate: float  # Keras's rate, as read from the optimizer
    rows: int  # rows of a step


class SampleRateState(SamplesState):
    """The state that `SampleRate` saves with a checkpoint."""

    # values that the callback has set on the optimizer; None before the first
    in_force: dict[str, float] | None
    changed: float  # factor of the rate by other callbacks


class SampleRate(MomentumSchedule):
    """Give SGD a rate per sample, and momentum as a time constant, at every batch size.

    In all, each sample moves the weights by `rate` times its gradient, in a batch of 32 or of 4096,
    and at the same pace (unit gain, a time constant in samples):

        mu = exp(-rows / tau)        Keras's rate = rate * rows * (1 - mu)

    Both are set anew whenever the rows of a step change: by `BatchSizeSchedule`,
    `GrowBatchInsteadOfDecay` or `AutoBatchSize`, and, with arrays, in the short last batch of an
    epoch. (With `steps_per_execution`, gradient accumulation, datasets or asynchronous parameter
    servers, the last batch counts as a whole one, and an accumulation window that spans a change
    counts with the new size.) At a change the momentum buffers are multiplied, so that earlier
    samples count as much as without the change. CNTK does not do this, so there the last tau
    samples before a change count for more or less.

    A callback that multiplies the optimizer's rate, such as `HalveRate` or Keras's
    ReduceLROnPlateau, multiplies the rate per sample. `GrowBatchInsteadOfDecay` grows the batch and
    lowers the rate per sample by as much as its schedule falls from its first rate. `AutoBatchSize`
    leaves the rate to this callback. The rate given to `SGD` does not count.

    Args:
        rate: Factor of one sample's gradient: a number, or a list of values and `(count, value)`
            pairs; the last persists.
        time_constant: tau in samples: a number, or a list like `rate`; 0 is no momentum. Required
            if SGD has momentum.
        momentum_correction: Whether to multiply momentum buffers when the batch or `rate` changes.
        every_samples: How many samples a value of a list lasts; None for an epoch of `fit`.
        batch_size: Global batch, needed if it does not follow from `fit`'s data.

    Raises:
        ValueError: As `MomentumSchedule`; or the optimizer has its own schedule, or another
            callback sets the rate or the momentum.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=keras.optimizers.SGD(momentum=0.9), loss="mse")
        >>> sample_rate = dtk.callbacks.SampleRate(0.001, time_constant=64)
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), epochs=3, verbose=0, callbacks=[
        ...     dtk.callbacks.BatchSizeSchedule([16, 32]), sample_rate])
        >>> round(sample_rate.momentum, 4), round(float(model.optimizer.learning_rate), 6)
        (0.6065, 0.012591)

    Source: CNTK's `learning_parameter_schedule_per_sample` and `momentum_sgd`.
    """

    sets = ("learning rate", "momentum")

    def __init__(
        self,
        rate: Values,
        time_constant: Values | None = None,
        momentum_correction: bool = True,
        every_samples: int | None = None,
        batch_size: int | None = None,
    ):
        super().__init__(0 if time_constant is None else time_constant, every_samples, batch_size)
        given = [rate] if isinstance(rate, int | float) else rate
        self.rates = parse_runs(given, "rate per sample", is_rate, "a finite number above 0")
        self.momentum_correction = momentum_correction
        self._told = time_constant is not None
        self._optimizer: keras.Optimizer | None = None
        self._in_force: _InForce | None = None
        # Factors of the rate by other callbacks: by the optimizer's rate, and by `plan`.
        self._changed = self._plan = 1.0

    @property
    def rate(self) -> float:
        """The current rate per sample."""
        return self._planned() * self._changed * self._change()

    def get_state(self) -> SampleRateState:
        """Return `MomentumSchedule`'s state and the values set, for `Checkpoint`."""
        in_force = None if self._in_force is None else self._in_force._asdict()
        return {**super().get_state(), "in_force": in_force, "changed": self._changed}

    def set_state(self, state: SampleRateState) -> None:  # type: ignore[override]  # its own state, and no base's
        """Go on from a checkpoint's state; the optimizer's rate is already restored."""
        super().set_state(state)
        self._changed = state["changed"]
        values = state["in_force"]
        self._in_force = None
        if values is not None:
            self._in_force = _InForce(
                values["planned"], values["momentum"], values["learning_rate"], int(values["rows"])
            )
        if self._momentum is not None and self._in_force is not None:
            self._momentum.set(self._in_force.momentum)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        super().on_train_begin(logs)
        check_settable(self.model.optimizer, type(self).__name__)
        self._plan = 1.0
        if self._optimizer is not self.model.optimizer:
            self._optimizer, self._in_force, self._changed = self.model.optimizer, None, 1.0

    def plan(self, factor: float) -> None:
        """Multiply the given rates from now on.

        Args:
            factor: The factor, which replaces the last one.
        """
        self._plan = factor

    def use(self, rows: int) -> None:
        """Set rate and momentum of a step, if they change."""
        before, planned, momentum = self._in_force, self._planned(), self.momentum_of(rows)
        if before is not None and (planned, momentum, rows) == (
            before.planned,
            before.momentum,
            before.rows,
        ):
            return
        self._changed *= self._change()
        optimizer = self.model.optimizer
        optimizer.learning_rate = learning_rate_from_sample_rate(
            planned * self._changed, rows, momentum
        )
        if self._momentum is not None:
            if self.momentum_correction:
                nesterov = innermost(optimizer).nesterov
                carried = carried_over(self._momentum.value, momentum, nesterov)
                raised = 1.0 if before is None else planned / before.planned
                self._momentum.carry_over(carried * raised)
            self._momentum.set(momentum)
        self._in_force = _InForce(planned, momentum, rate_now(optimizer), rows)

    def _planned(self) -> float:
        return self._at_present(self.rates) * self._plan

    def _change(self) -> float:
        """Return by how much others have multiplied the optimizer's rate since it was set."""
        if self._in_force is None or not self._in_force.learning_rate:
            return 1.0
        return rate_now(self._optimizer) / self._in_force.learning_rate

    def _find_momentum(self) -> Momentum | None:
        inner, who = innermost(self.model.optimizer), type(self).__name__
        if not isinstance(inner, keras.optimizers.SGD):
            raise ValueError(
                f"{who} is for keras.optimizers.SGD, whose steps are sums of gradients times the "
                f"rate, and the optimizer is a {type(inner).__name__}"
            )
        if inner.momentum and not self._told:
            size = self.trainer.feed.batch_size() or self.batch_size or 1
            tau = time_constant_from_momentum(inner.momentum, size)
            raise ValueError(
                f"{who}: momentum={inner.momentum} means another thing at every batch size; give "
                f"time_constant={tau:.0f} for what it is at {size}, or 0 for none"
            )
        if not inner.momentum and all(not tau for _, tau in self.time_constants):
            return None
        return momentum_of(inner, who)


def sample_rate_of(trainer: DistributedTrainer) -> SampleRate | None:
    """Return the `SampleRate` callback of the running `fit`; None if there is none."""
    found = (c for c in trainer.callbacks.callbacks if isinstance(c, SampleRate))
    return next(found, None)
