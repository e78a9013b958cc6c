"""A larger batch where a schedule would have a smaller rate (Smith et al. 2018)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.batch_size_schedule import check_sizes
from dtk.callbacks.hyperparameters.rate import check_settable
from dtk.callbacks.sample_rate import is_rate, sample_rate_of
from dtk.nests import Logs
from dtk.schedules.runs import parse_runs

RateSchedule = Callable[[int], float] | Sequence[float | tuple[int, float]]


def rates_of(schedule: RateSchedule, epochs: int) -> list[float]:
    """Return the rate of each of the first epochs; a list's last rate persists.

    Example:
        >>> rates_of([(2, 0.1), 0.01], 4)
        [0.1, 0.1, 0.01, 0.01]
    """
    if not callable(schedule):
        runs = parse_runs(schedule, "learning rate", is_rate, "a number above 0")
        rates = [rate for count, rate in runs for _ in range(count)]
        return [rates[min(epoch, len(rates) - 1)] for epoch in range(epochs)]
    rates = [float(schedule(epoch)) for epoch in range(epochs)]
    for epoch, rate in enumerate(rates):
        if not is_rate(rate):
            raise ValueError(f"the learning rate of epoch {epoch} must be above 0, got {rate!r}")
    return rates


def grow(
    rates: Iterable[float], batch_size: int, max_batch_size: int | None = None
) -> list[tuple[int, float]]:
    """Return batch size and rate of each epoch, from the rates for a constant `batch_size`.

    A rate below the highest so far is a decay: the batch grows by as much as the rate would have
    fallen. So the noise of SGD, proportional to rate / batch size, is the same as with the
    schedule. The rate makes up for rounding and for the largest batch.

    Example:
        >>> grow([0.5, 0.25, 0.0625], 64)
        [(64, 0.5), (128, 0.5), (512, 0.5)]
        >>> grow([0.5, 0.25, 0.0625], 64, max_batch_size=256)
        [(64, 0.5), (128, 0.5), (256, 0.25)]
        >>> grow([0.25, 0.5, 0.25], 64)  # warming up is no decay
        [(64, 0.25), (64, 0.5), (128, 0.5)]
    """
    plan, highest = [], 0.0
    for rate in rates:
        highest = max(highest, rate)
        wanted = batch_size * (highest / rate)
        size = round(wanted if max_batch_size is None else min(wanted, max_batch_size))
        plan.append((size, rate * size / batch_size))
    return plan


class GrowBatchInsteadOfDecay(StrategyCallback):
    """Multiply the global batch by a where a schedule would multiply the rate by 1/a.

    Give the schedule for `fit`'s batch size. This callback also sets the rate at the beginning of
    every epoch, so the optimizer's own rate does not count. Sizes and rates belong to epochs, as in
    `BatchSizeSchedule`, which takes the same kinds of data.

    With `SampleRate` the schedule counts relative to its first rate: by as much as it falls, the
    batch grows and the rate per sample falls, and `SampleRate` sets the optimizer's rate.

    Args:
        schedule: A function epoch -> rate, or a list of rates, one per epoch, or `(count, rate)`
            pairs; the last persists.
        max_batch_size: The largest batch; from there on the rate falls. None: the number of rows of
            the data if it is known, else no limit.
        batch_size: The batch size for which the schedule was made; None for `fit`'s. Give it for a
            `tf.data.Dataset` with batches of unknown size.

    Raises:
        ValueError: The schedule is malformed; at train begin, if a size is smaller than the number
            of workers, the data cannot be cut anew, the optimizer has its own schedule, or another
            callback sets the batch size or the rate.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=16, epochs=3,
        ...     verbose=0, callbacks=[dtk.callbacks.GrowBatchInsteadOfDecay([(2, 0.1), 0.05])])
        >>> int(model.optimizer.iterations)      # 4 + 4 + 2
        10

    Source: Smith et al., "Don't decay the learning rate, increase the batch size", ICLR 2018,
    arXiv:1711.00489.
    """

    sets = ("batch size", "learning rate")

    def __init__(
        self,
        schedule: RateSchedule,
        max_batch_size: int | None = None,
        batch_size: int | None = None,
    ):
        super().__init__()
        if not callable(schedule):
            rates_of(schedule, 1)
        for name, size in (("max_batch_size", max_batch_size), ("batch_size", batch_size)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, or None, got {size}")
        self.schedule = schedule
        self.max_batch_size = max_batch_size
        self.batch_size = batch_size
        self.plan: list[tuple[int, float]] = []
        self._rates: list[float] = []

    def sets_here(self) -> tuple[str, ...]:
        """Return `sets` for this `fit`; with `SampleRate` the batch size only."""
        return self.sets if sample_rate_of(self.trainer) is None else self.sets[:1]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Plan all epochs; raise before the first if the callback cannot work."""
        self.check_sole()
        check_settable(self.model.optimizer, type(self).__name__)
        rates = self._rates = rates_of(self.schedule, self.params["epochs"])
        first = self.batch_size_or_fits(self.batch_size)
        self.plan = grow(rates, first, self._largest(first))
        check_sizes([size for size, _ in self.plan], self.trainer)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Cut this epoch's batches, and set its rate."""
        size, rate = self.plan[epoch]
        self.trainer.feed.rebatch(size)
        sample_rate = sample_rate_of(self.trainer)
        if sample_rate is None:
            self.model.optimizer.learning_rate = rate
        else:
            sample_rate.plan(self._rates[epoch] / self._rates[0])

    def _largest(self, first: int) -> int | None:
        if self.max_batch_size is None:
            feed = self.trainer.feed
            rows = feed.rows_counted(feed.iterator.num_batches or 0)
            return None if rows is None else max(first, rows)
        if self.max_batch_size < first:
            raise ValueError(
                f"{type(self).__name__}: max_batch_size={self.max_batch_size} is smaller than the "
                f"batch to begin with, {first}; give that or more"
            )
        return self.max_batch_size
