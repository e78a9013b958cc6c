"""A global batch size that changes within one `fit`: by a schedule, in place of decay, by trial."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from dtk.callbacks.checkpointing import checkpoint_state
from dtk.callbacks.learning_rate import check_settable, multiply_rate, rate_now
from dtk.callbacks.sample_rate import is_positive, sample_rate_of
from dtk.callbacks.strategy_callback import SavedCallback, StrategyCallback
from dtk.nests import Logs
from dtk.schedules.runs import check_count, is_count, parse_runs, value_at
from dtk.trainer.replica.step_trial import Snapshot, changed_by_training

# Sizes, or `(count, size)` pairs; rates in the same way, or a function of the epoch.
SizeSchedule = Sequence[int | tuple[int, int]]
RateSchedule = Callable[[int], float] | Sequence[float | tuple[int, float]]


def parse_schedule(schedule: SizeSchedule) -> list[int]:
    """Turn sizes and `(count, size)` pairs into one global batch size per epoch; the last persists.

    Args:
        schedule: Each item is the size of one epoch, or `(count, size)` for `count` epochs.

    Returns:
        One size for each epoch of the schedule, in rows.

    Raises:
        ValueError: The schedule is empty, or an item is not made of positive integers.

    Example:
        >>> parse_schedule([64, (2, 128), 256])
        [64, 128, 128, 256]
    """
    runs = parse_runs(schedule, "batch size", is_count, "an integer of at least 1")
    return [int(size) for count, size in runs for _ in range(count)]


class BatchSizeSchedule(StrategyCallback):
    """Change the global batch size between epochs, within one `fit`.

    "Don't decay the learning rate, increase the batch size" (Smith et al. 2018): where a schedule
    would divide the rate by a, multiply the batch by a. Sizes belong to epochs, however often `fit`
    was started: with `initial_epoch` or a resumed checkpoint, epoch 7 has epoch 7's size.

    Arrays are cut anew in the order in which Keras would have shuffled them. A `tf.data.Dataset` of
    batches is rebatched after the script's own pipeline; since its rows cannot be counted
    beforehand, the progress bar shows no total in the first epoch of a new size. With
    `steps_per_epoch` the number of steps stays the same, and a new size begins the data from the
    start.

    Args:
        schedule: A list of sizes, one per epoch, or `(count, size)` pairs; the last persists. It
            overrides `fit`'s `batch_size`.

    Raises:
        ValueError: The schedule is malformed; at train begin, if the data is a generator, a
            PyDataset or a pipeline per rank.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), epochs=3, verbose=0, callbacks=[
        ...     dtk.callbacks.BatchSizeSchedule([(2, 16), 32])])
        >>> int(model.optimizer.iterations)      # 4 + 4 + 2
        10
    """

    sets = ("batch size",)

    def __init__(self, schedule: SizeSchedule):
        super().__init__()
        self.sizes = parse_schedule(schedule)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that the data can be cut anew, before the first epoch."""
        self.trainer.feed.check_rebatch()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Cut this epoch's batches."""
        self.trainer.feed.rebatch(self.sizes[min(epoch, len(self.sizes) - 1)])


def rates_of(schedule: RateSchedule, epochs: int) -> list[float]:
    """Return the rate of each of the first epochs; a list's last rate persists.

    Example:
        >>> rates_of([(2, 0.1), 0.01], 4)
        [0.1, 0.1, 0.01, 0.01]
    """
    if not callable(schedule):
        runs = parse_runs(schedule, "learning rate", is_positive, "a finite number above 0")
        return [value_at(runs, epoch) for epoch in range(epochs)]
    rates = [float(schedule(epoch)) for epoch in range(epochs)]
    for epoch, rate in enumerate(rates):
        if not is_positive(rate):
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


class _SetsSizeAndRate(StrategyCallback):
    def sets_here(self) -> tuple[str, ...]:
        """Return `sets` for this `fit`; with `SampleRate` the batch size only."""
        return self.sets if sample_rate_of(self.trainer) is None else self.sets[:1]


class GrowBatchInsteadOfDecay(_SetsSizeAndRate):
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
        ValueError: The schedule is malformed; at train begin, if the data cannot be cut anew, the
            optimizer has its own schedule, or another callback sets the batch size or the rate.

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
        check_count("max_batch_size", max_batch_size, none="the rows of the data")
        check_count("batch_size", batch_size, none="fit's")
        self.schedule = schedule
        self.max_batch_size = max_batch_size
        self.batch_size = batch_size
        self.plan: list[tuple[int, float]] = []
        self._rates: list[float] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Plan all epochs; raise before the first if the callback cannot work."""
        self.check_sole()
        check_settable(self.model.optimizer, type(self).__name__)
        rates = self._rates = rates_of(self.schedule, self.params["epochs"])
        first = self.batch_size_or_fits(self.batch_size)
        self.plan = grow(rates, first, self._largest(first))
        self.trainer.feed.check_rebatch()

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


# The search, as SGD::AdaptiveMinibatchSizing and SearchForBestMinibatchSize of CNTK 2 do it:
#
#     lower bound                                        upper bound
#     previous / 2, and initial / sqrt(lr_now / lr_0)    2 x previous, and a maximum
#         |----- x sqrt 2 -----|----- x sqrt 2 -----| ... |
#       base                  good                 loss > base * 1.01: stop, the last good one wins


def bounds(initial: int, previous: int, rate_ratio: float, maximum: int) -> tuple[int, int]:
    """Return the smallest and the largest size to try.

    If the rate has fallen, the lower bound rises, by the square root only: the whole factor would
    be too aggressive. The lower bound may rise above the upper bound.

    Example:
        >>> bounds(256, 256, rate_ratio=1.0, maximum=2**20)
        (256, 512)
        >>> bounds(256, 1024, rate_ratio=0.25, maximum=2**20)
        (512, 2048)
    """
    lowest = int(initial / math.sqrt(min(1.0, rate_ratio)))
    return max(lowest, previous // 2), min(maximum, 2 * previous)


def trial_sizes(lower: int, upper: int, multiple: int = 64) -> list[int]:
    """Return sizes to try, each a factor of the square root of two larger, rounded to multiples.

    Example:
        >>> trial_sizes(128, 512)
        [128, 192, 256, 384, 512]
        >>> trial_sizes(4096, 512)
        [512]
    """
    wanted = [float(min(lower, upper))]
    while (larger := wanted[0] * 2.0 ** (len(wanted) / 2)) <= upper:
        wanted.append(larger)
    return list(dict.fromkeys(round_to(size, multiple) for size in wanted))


def round_to(size: float, multiple: int) -> int:
    """Return the nearest multiple, at least the first; halves are rounded up.

    Example:
        >>> round_to(95, 64), round_to(96, 64), round_to(3, 64)
        (64, 128, 64)
    """
    return multiple * max(1, int((size + multiple / 2) // multiple))


def last_good(
    sizes: Iterable[int], criterion: Callable[[int], float], margin: float
) -> tuple[int | None, dict[int, float]]:
    """Try sizes until one is worse than the first; return the last good size and all results.

    CNTK takes a NaN for a good result; here it is a bad one.

    Example:
        >>> last_good([64, 128, 192], {64: 1.0, 128: 1.005, 192: 1.02}.get, 0.01)
        (128, {64: 1.0, 128: 1.005, 192: 1.02})
    """
    best, told = None, {}
    allowed = math.inf
    for size in sizes:
        loss = told[size] = criterion(size)
        if not (math.isfinite(loss) and loss <= allowed):
            break
        if best is None:
            allowed = loss + margin * abs(loss)
        best = size
    return best, told


class AutoBatchSize(_SetsSizeAndRate, SavedCallback):
    """Search the global batch size every few epochs, by training a little with each size.

    Before an epoch, sizes from half to twice the last size are tried, each a factor of sqrt 2
    larger. A trial trains on the first rows of that epoch, on all ranks; then weights, optimizer,
    metrics and random states are restored bit for bit. The search stops when a loss is more than
    `margin` above the smallest size's loss, and the size before wins. If even the smallest size
    gives no finite loss, the size stays. The first epoch has `fit`'s size. CNTK, which the rule is
    from, does not bound its first search by twice the size, and counts epochs from 1 for the
    frequency.

    CNTK's rates are per sample: a step of twice the rows goes twice as far. Keras's rates are per
    step, so this callback multiplies the rate along with the batch (linear scaling, with momentum
    correction as in `LearningRateScaling`), unless `scale_rate` is False or `SampleRate` does it.

    The data may be anything that `BatchSizeSchedule` takes. A dataset that shuffles is opened once
    for each trial, so its order in later epochs differs from a run without trials. The state of
    `tf.random` ops inside a step cannot be restored.

    A second `fit` with the same callback goes on with the size found, and `Checkpoint` restores it.

    Args:
        frequency: Epochs from one search to the next.
        trial_batches: Length of a trial, in batches of the initial size; at most an epoch.
        margin: By how much a loss may exceed the smallest size's loss, relative to it.
        max_batch_size: The largest size to try.
        multiple: Sizes below `max_batch_size` are rounded to multiples of this number.
        batch_size: The size to begin with; None for `fit`'s. Give it for a `tf.data.Dataset` with
            batches of unknown size.
        scale_rate: Whether to multiply the rate along with the batch.

    Attributes:
        trials: Size -> loss of the last search.

    Raises:
        ValueError: An argument is out of range; at train begin, if the data cannot be cut anew,
            steps run behind parameter servers, the optimizer has its own schedule, or another
            callback sets the batch size or the rate.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer=keras.optimizers.SGD(1e-6), loss="mse")
        >>> search = dtk.callbacks.AutoBatchSize(multiple=16)
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=16, epochs=2,
        ...     verbose=0, callbacks=[search])  # doctest: +ELLIPSIS
        AutoBatchSize: epoch 2: batch size 16 -> 32 (loss ... at 16, ... at 32)
        >>> int(model.optimizer.iterations)      # 4 + 2
        6

    Source: Seide et al., "On parallelizability of stochastic gradient descent for speech DNNs",
    ICASSP 2014, and CNTK 2.
    """

    saved = ("size", "initial", "first_rate", "searched")

    def __init__(
        self,
        frequency: int = 1,
        trial_batches: int = 500,
        margin: float = 0.01,
        max_batch_size: int = 2**20,
        multiple: int = 64,
        batch_size: int | None = None,
        scale_rate: bool = True,
    ):
        super().__init__()
        counts = {"frequency": frequency, "trial_batches": trial_batches, "multiple": multiple}
        for name, count in {**counts, "max_batch_size": max_batch_size}.items():
            check_count(name, count)
        check_count("batch_size", batch_size, none="fit's")
        if not 0 <= margin < math.inf:
            raise ValueError(f"margin must be 0 or more, got {margin!r}")
        self.frequency, self.trial_batches, self.margin = frequency, trial_batches, margin
        self.max_batch_size, self.multiple = max_batch_size, multiple
        self.batch_size, self.scale_rate = batch_size, scale_rate
        self.sets = ("batch size", "learning rate") if scale_rate else ("batch size",)
        self.trials: dict[int, float] = {}
        self._size = self._initial = 0
        self._first_rate = 0.0
        self._searched: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        if self.has_servers:
            raise ValueError(
                f"{type(self).__name__} puts all state back after a trial, which it cannot behind "
                "parameter servers; use BatchSizeSchedule"
            )
        self.check_sole()
        if self.scale_rate:
            check_settable(self.model.optimizer, f"{type(self).__name__}(scale_rate=True)")
        first = self.batch_size_or_fits(self.batch_size)
        self.trainer.feed.check_rebatch()
        if not self._size:
            self._size = self._initial = first
        self._searched = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Search if it is due, and cut this epoch's batches."""
        self._first_rate = self._first_rate or self._rate_at(self._initial)
        if epoch and epoch % self.frequency == 0 and epoch != self._searched:
            self._searched = epoch
            self._search(epoch)
        self.trainer.feed.rebatch(self._size)

    def _search(self, epoch: int) -> None:
        # Shuffle the rows into the coming epoch's order; the epoch's beginning does so again.
        self.trainer.feed.shuffle(epoch)
        sample_rate = sample_rate_of(self.trainer)
        if sample_rate is not None:
            sample_rate.on_epoch_begin(epoch)  # Keras may call it only after this callback.
        now = self._rate_at(self._size)  # for one sample
        ratio = now / self._first_rate if now and self._first_rate else 1.0
        lower, upper = bounds(self._initial, self._size, ratio, self.max_batch_size)
        # Rounding may go beyond the bounds, as in CNTK; not beyond the user's.
        sizes = [min(n, self.max_batch_size) for n in trial_sizes(lower, upper, self.multiple)]
        best, self.trials = last_good(dict.fromkeys(sizes), self._trial, self.margin)
        told = ", ".join(f"{loss:.4g} at {size}" for size, loss in self.trials.items())
        size = self._size if best is None else best
        self.say(f"epoch {epoch + 1}: batch size {self._size} -> {size} (loss {told})")
        self._scale_rate(size)
        self._size = size

    def _rate_at(self, size: int) -> float:
        """Return the current rate, converted from a step of `size` rows to the initial size."""
        sample_rate = sample_rate_of(self.trainer)
        if sample_rate is not None:
            return sample_rate.rate
        rate = rate_now(self.model.optimizer)
        return rate * (self._initial / size if self.scale_rate else 1.0)

    def _scale_rate(self, size: int) -> None:
        sample_rate = sample_rate_of(self.trainer)
        if sample_rate is not None:
            sample_rate.use(size)
        elif self.scale_rate and size != self._size:
            multiply_rate(self.model.optimizer, size / self._size)

    def _trial(self, size: int) -> float:
        """Train a little with a size, restore all state, and return the loss over all ranks."""
        kept, drawn = Snapshot(changed_by_training(self.model)), checkpoint_state.of_generators()
        sample_rate = sample_rate_of(self.trainer)
        in_force = None if sample_rate is None else sample_rate.get_state()
        try:
            self._scale_rate(size)
            self.model.reset_metrics()
            return self._train(size)
        finally:
            kept.restore()
            checkpoint_state.to_generators(drawn)
            if sample_rate is not None and in_force is not None:
                sample_rate.set_state(in_force)

    def _train(self, size: int) -> float:
        model, logs = self.model, {}
        rows = self.trial_batches * self._initial
        batches, steps = self.trainer.feed.peek(size, rows)
        # A dataset that was cut anew has no known end.
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            for _ in range(0, steps, model.steps_per_execution):
                logs = model.train_function(batches)
        if "loss" not in logs:
            raise ValueError(
                f"{type(self).__name__} compares losses, and a step of model {model.name!r} tells "
                f"none (it tells: {', '.join(logs) or 'nothing'}); return it as 'loss' from "
                "train_step"
            )
        return float(logs["loss"])
