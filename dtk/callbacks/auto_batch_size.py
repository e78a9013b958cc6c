"""The largest global batch that trains equally well, found by trial: CNTK's automatic scaling."""

from __future__ import annotations

import contextlib
import math
from typing import TypedDict

import tensorflow as tf

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.batch_size_schedule import check_sizes
from dtk.callbacks.checkpointing import state as states
from dtk.callbacks.hyperparameters.batch_size_search import bounds, last_good, trial_sizes
from dtk.callbacks.hyperparameters.rate import check_settable, multiply_rate, rate_now
from dtk.callbacks.sample_rate import sample_rate_of
from dtk.nests import Logs
from dtk.strategies import ParameterServerStrategy
from dtk.trainer.replica.snapshot import Snapshot, changed_by_training


class SearchState(TypedDict):
    """The state that `AutoBatchSize` saves with a checkpoint."""

    size: int  # rows of a global batch now
    initial: int  # rows of a global batch in the first epoch
    first_rate: float  # learning rate of the first epoch; 0.0 before
    searched: int | None  # epoch of the last search; None before


class AutoBatchSize(StrategyCallback):
    """Search the global batch size every few epochs, by training a little with each size.

    Before an epoch, sizes from half to twice the last size are tried, each a factor of sqrt 2
    larger (see `dtk.callbacks.hyperparameters.batch_size_search`). A trial trains on the first rows
    of that epoch, on all ranks; then weights, optimizer, metrics and random states are restored bit
    for bit. The search stops when a loss is more than `margin` above the smallest size's loss, and
    the size before wins. If even the smallest size gives no finite loss, the size stays. The first
    epoch has `fit`'s size.

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
        multiple: Sizes are rounded to multiples of this number.
        batch_size: The size to begin with; None for `fit`'s. Give it for a `tf.data.Dataset` with
            batches of unknown size.
        scale_rate: Whether to multiply the rate along with the batch.

    Attributes:
        trials: Size -> loss of the last search.

    Raises:
        ValueError: An argument is out of range; at train begin, if `multiple` is smaller than the
            number of workers, the data cannot be cut anew, steps run behind parameter servers, the
            optimizer has its own schedule, or another callback sets the batch size or the rate.

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
        counts = {
            "frequency": frequency,
            "trial_batches": trial_batches,
            "max_batch_size": max_batch_size,
            "multiple": multiple,
            "batch_size": batch_size or 1,
        }
        for name, count in counts.items():
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
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

    def sets_here(self) -> tuple[str, ...]:
        """Return `sets` for this `fit`; with `SampleRate` the batch size only."""
        return self.sets if sample_rate_of(self.trainer) is None else self.sets[:1]

    def get_state(self) -> SearchState:
        """Return the sizes, the first rate, and the last search, for `Checkpoint`."""
        return {
            "size": self._size,
            "initial": self._initial,
            "first_rate": self._first_rate,
            "searched": self._searched,
        }

    def set_state(self, state: SearchState) -> None:
        """Go on from a checkpoint's state; the optimizer's rate is already restored.

        Args:
            state: The result of `get_state`.
        """
        self._size, self._initial = state["size"], state["initial"]
        self._first_rate, self._searched = state["first_rate"], state["searched"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        if isinstance(self.strategy, ParameterServerStrategy):
            raise ValueError(
                f"{type(self).__name__} puts all state back after a trial, which it cannot behind "
                "parameter servers; use BatchSizeSchedule"
            )
        self.check_sole()
        if self.scale_rate:
            check_settable(self.model.optimizer, f"{type(self).__name__}(scale_rate=True)")
        first = self.batch_size_or_fits(self.batch_size)
        check_sizes([first, self.multiple], self.trainer)
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
        lower, upper = bounds(self._initial, self._size, self._rate_ratio(), self.max_batch_size)
        sizes = trial_sizes(lower, upper, self.multiple)
        found, self.trials = last_good(sizes, self._trial, self.margin)
        told = ", ".join(f"{loss:.4g} at {size}" for size, loss in self.trials.items())
        size = self._size if found is None else found
        self.say(f"epoch {epoch + 1}: batch size {self._size} -> {size} (loss {told})")
        self._scale_rate(size)
        self._size = size

    def _rate_ratio(self) -> float:
        """Return the rate for one sample, relative to the beginning."""
        now = self._rate_at(self._size)
        if not now or not self._first_rate:
            return 1.0
        return now / self._first_rate

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
        kept, drawn = Snapshot(changed_by_training(self.model)), states.of_generators()
        sample_rate = sample_rate_of(self.trainer)
        in_force = None if sample_rate is None else sample_rate.get_state()
        try:
            self._scale_rate(size)
            self.model.reset_metrics()
            return self._train(size)
        finally:
            kept.restore()
            states.to_generators(drawn)
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
