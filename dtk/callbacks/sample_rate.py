"""Momentum in samples and a rate per sample, for any batch size: CNTK's SGD, by Keras's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import keras
import tensorflow as tf

from dtk.callbacks.learning_rate import check_settable, innermost, multiply_momentum, rate_now
from dtk.callbacks.strategy_callback import SavedCallback
from dtk.exchange import Delayed, WarmStart
from dtk.nests import Logs
from dtk.patches import patch
from dtk.schedules import (
    learning_rate_from_sample_rate,
    momentum_from_time_constant,
    time_constant_from_momentum,
)
from dtk.schedules.runs import Runs, check_count, is_rate, parse_runs, value_at
from dtk.trainer.distributed_trainer import DistributedTrainer

# The attribute of an optimizer that holds its `Momentum`.
_MARK = "_dtk_momentum"
# The momentum of a step of 27 time constants. The square of a smaller one does not fit in float32.
_NONE = 1e-12

# A number, or a list of values and (count, value) pairs.
Values = float | Sequence[float | tuple[int, float]]


class Momentum:
    """Momentum of a `keras.optimizers.SGD`, which may change from step to step.

    Keras keeps the momentum as a float, which becomes a constant of a traced step. While the
    optimizer updates a weight, a variable replaces the float, so a new value costs one assignment
    and no new trace. `optimizer.momentum`, and the value saved with a model, stay the script's.
    After training the optimizer keeps the last value.
    """

    retrace = True

    def __init__(self, optimizer: keras.Optimizer):
        self._variable = tf.Variable(
            optimizer.momentum, trainable=False, dtype=tf.float32, name="momentum"
        )
        self.value = float(optimizer.momentum)  # of the next step
        update, held = optimizer.update_step, _Held(self._variable)

        @tf.autograph.experimental.do_not_convert
        def update_step(
            gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor
        ) -> None:
            with patch(optimizer, momentum=held):
                update(gradient, variable, learning_rate)

        optimizer.update_step = update_step

    def set(self, value: float) -> None:
        """Set the momentum of the following steps."""
        if value != self.value:
            self._variable.assign(value)
            self.value = value


class _Held:
    """Momentum as Keras's SGD uses it: never equal to 0, and converted to a tensor."""

    def __init__(self, variable: tf.Variable):
        self._variable = variable

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._variable, dtype, name=name)


def momentum_of(optimizer: keras.Optimizer, who: str) -> Momentum:
    """Return an optimizer's momentum; the same object each time."""
    inner = innermost(optimizer)
    if not isinstance(inner, keras.optimizers.SGD):
        raise ValueError(
            f"{who} sets the momentum of keras.optimizers.SGD, and the optimizer is a "
            f"{type(inner).__name__}; use SGD(rate, momentum=0.9), or leave the callback out"
        )
    if not inner.momentum:
        raise ValueError(
            f"{who} sets the momentum, and the optimizer was made without: its buffers are made "
            "when it is built; give SGD any momentum above 0, such as momentum=0.9"
        )
    if not hasattr(inner, _MARK):
        setattr(inner, _MARK, Momentum(inner))
    return getattr(inner, _MARK)


def carried_over(before: float, after: float, nesterov: bool = False) -> float:
    """Return the factor of momentum buffers when the momentum changes.

    The factor keeps the total weight of each gradient: (1 - mu) (1 + mu + mu^2 + ...) = 1 (unit
    gain). When mu changes, a buffer will still add mu^p / (1 - mu) times its content to the
    weights, with p = 1, or p = 2 for Nesterov's momentum, which is a step ahead.

    Example:
        >>> round(carried_over(0.9, 0.81), 4)     # twice the batch
        2.1111
        >>> round(2.1111 * 0.81 / (1 - 0.81), 3), round(0.9 / (1 - 0.9), 3)
        (9.0, 9.0)
    """
    if before == after or after < _NONE:
        return 1.0
    return (before / after) ** (2 if nesterov else 1) * (1.0 - after) / (1.0 - before)


def is_positive(rate: object) -> bool:
    return is_rate(rate) and bool(rate)


class MomentumSchedule(SavedCallback):
    """Set SGD's momentum by time constants in samples: mu = exp(-rows / tau) for a step of `rows`.

    After tau samples a gradient's weight has fallen to 1/e, for any batch size: the batch may
    change during training, and the short last batch of an epoch of arrays has its own momentum. The
    learning rate does not change. With Keras's momentum (v = mu v - rate * g) a gradient counts
    rate / (1 - mu) in all, so a larger momentum makes longer steps. CNTK's unit gain avoids this:
    use `SampleRate`, which also sets the rate.

    A change of the momentum costs an assignment; steps are traced once.

    Args:
        time_constants: tau: a number, or a list of values and `(count, value)` pairs such as
            `[0] * 5 + [1024]`; the last persists. 0 is no momentum.
        every_samples: How many samples a value (or a count of 1) lasts; None for an epoch of `fit`.
            Values change between batches.
        batch_size: Global batch, needed if it does not follow from `fit`'s data.

    Raises:
        ValueError: An argument is out of range; at train begin, if the optimizer is not
            `keras.optimizers.SGD` or was made without momentum (the value does not matter, but
            without one SGD has no buffers), if workers take separate steps (block momentum and the
            like) or late gradients, or if another callback sets the momentum.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
        >>> schedule = dtk.callbacks.MomentumSchedule([0] * 2 + [64])
        >>> history = model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=16, epochs=3,
        ...     verbose=0, callbacks=[schedule])
        >>> round(schedule.momentum, 4)      # exp(-16 / 64)
        0.7788

    Source: CNTK's `momentum_as_time_constant_schedule`.
    """

    sets: tuple[str, ...] = ("momentum",)
    saved: tuple[str, ...] = ("seen", "before_epoch", "epoch")

    def __init__(
        self,
        time_constants: Values,
        every_samples: int | None = None,
        batch_size: int | None = None,
    ):
        super().__init__()
        check_count("every_samples", every_samples, none="an epoch of fit")
        check_count("batch_size", batch_size, none="fit's")
        runs = [time_constants] if isinstance(time_constants, int | float) else time_constants
        self.time_constants = parse_runs(
            runs, "time constant", is_rate, "a finite number, 0 or more"
        )
        self.every_samples, self.batch_size = every_samples, batch_size
        self._momentum: Momentum | None = None
        self._by_batch = False
        self._epoch: int | None = None
        self._seen = self._before_epoch = 0

    @property
    def momentum(self) -> float:
        """mu of the last step, or of the next step if it is already set."""
        return 0.0 if self._momentum is None else self._momentum.value

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise if the callback cannot work; let steps read the momentum from a variable."""
        self.check_sole()
        self._check_exchange()
        self._momentum = self._find_momentum()
        if self._momentum is not None and self._momentum.retrace:
            self.model.make_train_function(force=True)
            self._momentum.retrace = False
        # Set it for each batch only if a call is one step, which begins after the step before.
        late = self.has_servers and self.strategy.consistency.tau
        self._by_batch = not late and self.model.steps_per_execution == self._window() == 1
        self._seen = self._before_epoch = 0
        self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the samples before this epoch, unless it is resumed in the middle."""
        if epoch != self._epoch:
            self._epoch, self._before_epoch = epoch, self._seen

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the step's momentum: other callbacks have chosen the batch size by now."""
        self._seen = self._before_epoch + self._rows_before(batch)
        self.use(self._rows_of(batch))

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the rows of the batch."""
        self._seen = self._before_epoch + self._rows_before(batch + 1)

    def use(self, rows: int) -> None:
        """Set the momentum of a step.

        Args:
            rows: Rows of the step's global batch.
        """
        assert self._momentum is not None
        self._momentum.set(self.momentum_of(rows))

    def momentum_of(self, rows: int) -> float:
        """Return mu of a step, now.

        Args:
            rows: Rows of the step's global batch.

        Returns:
            exp(-rows / tau), or 0.0 if tau is 0.
        """
        return momentum_from_time_constant(self._at_present(self.time_constants), rows)

    def _at_present(self, runs: Runs) -> float:
        if self.every_samples is None:
            return value_at(runs, self._epoch or 0)
        return value_at(runs, self._seen // self.every_samples)

    def _find_momentum(self) -> Momentum | None:
        return momentum_of(self.model.optimizer, type(self).__name__)

    def _window(self) -> int:
        return innermost(self.model.optimizer).gradient_accumulation_steps or 1

    def _size(self) -> int:
        # First ask `fit`: callbacks that choose batch sizes have set it in `on_epoch_begin`.
        return self.trainer.feed.batch_size() or self.batch_size_or_fits(self.batch_size)

    def _rows_before(self, batch: int) -> int:
        counted = self.trainer.feed.rows_counted(batch)
        return batch * self._size() if counted is None else counted

    def _rows_of(self, batch: int) -> int:
        if self._by_batch:
            return self._rows_before(batch + 1) - self._rows_before(batch)
        return self._size() * self._window()

    def _check_exchange(self) -> None:
        exchange = getattr(self.strategy, "exchange", None)
        exchange = exchange.exchange if isinstance(exchange, WarmStart) else exchange
        own = getattr(exchange, "local", False) or getattr(exchange, "push_every", 1) > 1
        if own or isinstance(exchange, Delayed):
            why = "workers take steps of their own" if own else "gradients are applied a step late"
            raise ValueError(
                f"{type(self).__name__} sets what a step of the global batch has, and with "
                f"exchange={exchange!r} {why}; use another exchange, or give SGD numbers made by "
                "dtk.schedules.momentum_from_time_constant and learning_rate_from_sample_rate"
            )


class _InForce(NamedTuple):
    """Values that the callback has set on the optimizer."""

    planned: float  # the rate per sample, without changes by other callbacks
    momentum: float  # mu
    learning_rate: float  # Keras's rate, as read from the optimizer
    rows: int  # rows of a step


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
    saved = (*MomentumSchedule.saved, "changed")

    def __init__(
        self,
        rate: Values,
        time_constant: Values | None = None,
        momentum_correction: bool = True,
        every_samples: int | None = None,
        batch_size: int | None = None,
    ):
        super().__init__(0 if time_constant is None else time_constant, every_samples, batch_size)
        runs = [rate] if isinstance(rate, int | float) else rate
        self.rates = parse_runs(runs, "rate per sample", is_positive, "a finite number above 0")
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

    def get_state(self) -> dict[str, object]:
        """Return `MomentumSchedule`'s state and the values set, for `Checkpoint`."""
        in_force = None if self._in_force is None else self._in_force._asdict()
        return {**super().get_state(), "in_force": in_force}

    def set_state(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored."""
        super().set_state(state)
        values = cast("dict[str, int] | None", state["in_force"])
        self._in_force = None if values is None else _InForce(**values)
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
        if before is not None and before == (planned, momentum, before.learning_rate, rows):
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
                multiply_momentum(optimizer, carried * raised)
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
    return next((c for c in trainer.callbacks.callbacks if isinstance(c, SampleRate)), None)
