"""Momentum as time constants that change during training, as in CNTK."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.hyperparameters.momentum import Momentum, innermost, momentum_of
from dtk.exchange import Delayed, WarmStart
from dtk.nests import Logs
from dtk.schedules import momentum_from_time_constant
from dtk.schedules.runs import Runs, is_count, parse_runs, value_at
from dtk.strategies import ParameterServerStrategy

# A number, or a list of values and (count, value) pairs.
Values = float | Sequence[float | tuple[int, float]]


def _is_time_constant(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def parse_time_constants(values: Values) -> Runs:
    """Turn time constants in samples into runs; a number alone lasts for ever.

    Example:
        >>> parse_time_constants([0] * 2 + [1024]), parse_time_constants(700)
        ([(1, 0), (1, 0), (1, 1024)], [(1, 700)])
    """
    given = [values] if isinstance(values, int | float) else values
    return parse_runs(given, "time constant", _is_time_constant, "a finite number, 0 or more")


class SamplesState(TypedDict):
    """The state that `MomentumSchedule` saves with a checkpoint."""

    seen: int  # samples seen
    before_epoch: int  # samples seen when the epoch began
    epoch: int | None  # number of the epoch; None before the first


class MomentumSchedule(StrategyCallback):
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

    def __init__(
        self,
        time_constants: Values,
        every_samples: int | None = None,
        batch_size: int | None = None,
    ):
        super().__init__()
        for name, count in (("every_samples", every_samples), ("batch_size", batch_size)):
            if count is not None and not is_count(count):
                raise ValueError(f"{name} must be an integer of at least 1, or None, got {count!r}")
        self.time_constants = parse_time_constants(time_constants)
        self.every_samples, self.batch_size = every_samples, batch_size
        self._momentum: Momentum | None = None
        self._by_batch = False
        self._epoch: int | None = None
        self._seen = self._before_epoch = 0

    @property
    def momentum(self) -> float:
        """mu of the last step, or of the next step if it is already set."""
        return 0.0 if self._momentum is None else self._momentum.value

    def get_state(self) -> SamplesState:
        """Return the samples seen, in all and before the epoch, for `Checkpoint`."""
        return {"seen": self._seen, "before_epoch": self._before_epoch, "epoch": self._epoch}

    def set_state(self, state: SamplesState) -> None:
        """Go on from a checkpoint's state.

        Args:
            state: The result of `get_state`.
        """
        self._seen, self._before_epoch = state["seen"], state["before_epoch"]
        self._epoch = state["epoch"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise if the callback cannot work; let steps read the momentum from a variable."""
        self.check_sole()
        self._check_exchange()
        self._momentum = self._find_momentum()
        if self._momentum is not None and self._momentum.retrace:
            self.model.make_train_function(force=True)
            self._momentum.retrace = False
        # Set it for each batch only if a call is one step, which begins after the step before.
        late = isinstance(self.strategy, ParameterServerStrategy) and self.strategy.consistency.tau
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
