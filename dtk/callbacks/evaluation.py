"""Evaluations within and after `fit`, which do not change the running epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

from dtk.callbacks.batch_size import GrowBatchInsteadOfDecay
from dtk.callbacks.learning_rate import check_settable, multiply_rate, rate_now
from dtk.callbacks.sample_rate import sample_rate_of
from dtk.callbacks.strategy_callback import SavedCallback, StrategyCallback, count_rows
from dtk.nests import Logs, Tree
from dtk.schedules.runs import check_count
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.ranks import rank_checks
from dtk.trainer.replica.step_metrics import metric_variables
from dtk.trainer.replica.step_trial import Snapshot


class Evaluated(NamedTuple):
    """Result of an evaluation."""

    numbers: dict[str, float]  # loss and metrics by name, over all data, equal on every rank
    samples: int  # rows of the data
    minibatches: int  # batches of the data


class Evaluation:
    """Evaluates a model with `model.evaluate`, always on the same data."""

    def __init__(self, name: str, data: Tree | tf.data.Dataset, batch_size: int | None):
        check_count("batch_size", batch_size, none="fit's")
        if data is None:
            raise ValueError(f"the {name} is missing; give arrays (x, y), or a dataset")
        self._name = name
        self._data = keras.utils.unpack_x_y_sample_weight(data)
        self._batch_size = batch_size

    def check(self, trainer: DistributedTrainer) -> None:
        """Compare the data over all ranks. All ranks call it together."""
        rank_checks.check_same_call(trainer.strategy, {self._name: self._data[0]})

    def run(self, trainer: DistributedTrainer) -> Evaluated:
        """Evaluate now, and restore the epoch's metrics. All ranks call it together."""
        trainer.flush()
        model = trainer.model
        kept, counter = Snapshot(metric_variables(model)), _Counter()
        x, y, sample_weight = self._data
        samples = _rows_of(x)
        batch_size = None if samples is None else self._batch_size or trainer.feed.batch_size()
        try:
            how = {"batch_size": batch_size, "verbose": 0, "return_dict": True}
            numbers = model.evaluate(x, y, sample_weight=sample_weight, callbacks=[counter], **how)
            samples = count_rows(model) if samples is None else samples
        finally:
            kept.restore()
        numbers = {key: float(value) for key, value in numbers.items()}
        return Evaluated(numbers, samples, counter.minibatches)


class _Counter(keras.callbacks.Callback):
    """Counts batches."""

    minibatches = 0

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.minibatches = min(batch + 1, self.params.get("steps") or batch + 1)


def _rows_of(x: Tree | tf.data.Dataset) -> int | None:
    """Return the number of rows of arrays; None for data in batches."""
    first = keras.tree.flatten(x)[0]
    return int(first.shape[0]) if getattr(first, "shape", None) else None


class CrossValidation(SavedCallback):
    """Evaluate after every so many training samples, within epochs, and call a function.

    Samples are rows of all ranks together. The count goes on over epochs, uneven batches, changes
    of the batch size, and resumed runs. An evaluation follows the batch that completes a multiple
    of `every_samples`. It does not change the logs of the running epoch.

    Every rank calls the function with equal numbers, so it may set the learning rate. If it returns
    False on any rank, all ranks stop after this batch.

    Counting the rows of a dataset takes a collective of one number per step; arrays need none.

    Args:
        every_samples: Training samples from one evaluation to the next.
        callback: Called as `callback(index, average_error, samples, minibatches)`: the number of
            multiples of `every_samples` complete at the evaluation before (0, 1, 2, ... if batches
            are smaller), the error, and the numbers of samples and minibatches that it averages.
        validation_data: `(x, y)`, `(x, y, sample_weight)` or a dataset, the same on every rank.
        batch_size: Global batch of the evaluation for arrays; None for `fit`'s.
        monitor: The name of the error among `evaluate`'s numbers, or a function that computes it
            from them, such as `lambda numbers: 1 - numbers["accuracy"]`.

    Raises:
        ValueError: An argument is out of range, or `monitor` is not among the numbers; at train
            begin, if steps run behind parameter servers and `fit`'s data is not arrays.
        DisagreementError: At train begin, if ranks have different data.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x, y = np.ones((64, 4)), np.ones((64, 1))
        >>> def stop_at_the_third(index, average_error, samples, minibatches):
        ...     print(index, samples, minibatches)
        ...     return index < 2
        >>> history = model.fit(x, y, batch_size=16, epochs=5, verbose=0, callbacks=[
        ...     dtk.callbacks.CrossValidation(32, stop_at_the_third, (x[:20], y[:20]))])
        0 20 2
        1 20 2
        2 20 2
        >>> int(model.optimizer.iterations)
        6

    Source: `CrossValidationConfig` of CNTK 2.
    """

    saved: tuple[str, ...] = ("samples", "before_epoch", "evaluated_at", "epoch")

    def __init__(
        self,
        every_samples: int,
        callback: Callable[[int, float, int, int], object],
        validation_data: Tree | tf.data.Dataset,
        batch_size: int | None = None,
        monitor: str | Callable[[dict[str, float]], float] = "loss",
    ):
        super().__init__()
        check_count("every_samples", every_samples)
        if not callable(callback):
            raise ValueError(f"callback must be a function, got {callback!r}")
        self.every_samples = every_samples
        self.callback = callback
        self.monitor = monitor
        self._evaluation = Evaluation("cross-validation data", validation_data, batch_size)
        self._samples = self._before_epoch = self._evaluated_at = 0
        self._epoch: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the data over all ranks, and begin to count."""
        if self.has_servers and self.trainer.feed.rows_counted(1) is None:
            raise ValueError(
                f"{type(self).__name__} would have to wait for the workers in every step to count "
                "the rows of this data; give fit arrays, without steps_per_epoch"
            )
        self._evaluation.check(self.trainer)
        self._samples = self._before_epoch = self._evaluated_at = 0
        self._epoch = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the samples before this epoch, unless it is resumed in the middle."""
        if epoch != self._epoch:
            self._epoch, self._before_epoch = epoch, self._samples

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Evaluate if a multiple of `every_samples` is complete."""
        rows = self.trainer.feed.rows_counted(batch + 1)
        rows = count_rows(self.model) if rows is None else rows
        self._samples = self._before_epoch + rows
        index = self._evaluated_at // self.every_samples
        if self._samples // self.every_samples > index:
            self._evaluated_at = self._samples
            self._validate(index)

    def _validate(self, index: int) -> None:
        done = self._evaluation.run(self.trainer)
        go_on = self.callback(index, self._error(done.numbers), done.samples, done.minibatches)
        stop = go_on is False or bool(self.model.stop_training)
        if any(self.strategy.world.allgather_object(stop)):
            self.model.stop_training = self.trainer.stop_agreed = True

    def _error(self, numbers: dict[str, float]) -> float:
        if callable(self.monitor):
            return float(self.monitor(numbers))
        if self.monitor not in numbers:
            raise ValueError(
                f"{type(self).__name__}: monitor={self.monitor!r} is not among the numbers of "
                f"evaluate ({', '.join(sorted(numbers))})"
            )
        return numbers[self.monitor]


def gains_enough(before: float, error: float, gain: float) -> bool:
    """Return whether an error has fallen by at least a part of itself; False for NaN.

    Example:
        >>> gains_enough(0.5, 0.475, 0.05), gains_enough(0.5, 0.48, 0.05)
        (True, False)
    """
    return before - error >= gain * abs(before)


class HalveRate(CrossValidation):
    """Halve the learning rate if the cross-validation error falls too little; stop after some cuts.

    With `SampleRate` the rate per sample is halved, for any batch size.

    SGD's momentum buffer contains the rate (v = m v - lr g), so old gradients would count with the
    old rate. So the buffer is halved as well, as in `LearningRateScaling`.

    Args:
        every_samples: Training samples from one evaluation to the next.
        validation_data: `(x, y)`, `(x, y, sample_weight)` or a dataset, the same on every rank.
        gain: The part of itself by which the error must fall from one evaluation to the next.
        cuts: How often the rate is halved; training ends instead of a further cut.
        first: The error before the first evaluation, such as 1.0, the error rate of an
            untrained model (CNTK's example). None: the first evaluation only sets it.
        batch_size: Global batch of the evaluation for arrays; None for `fit`'s.
        monitor: As for `CrossValidation`.
        momentum_correction: Whether to rescale momentum buffers at cuts.

    Raises:
        ValueError: An argument is out of range; at train begin, if the optimizer has its own
            schedule, or `GrowBatchInsteadOfDecay` sets the rate (with `SampleRate` it does not).

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     dense = keras.layers.Dense(1, use_bias=False)
        ...     model = keras.Sequential([keras.Input((4,)), dense])
        ...     model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse")
        >>> x, y = np.zeros((64, 4)), np.ones((64, 1))
        >>> history = model.fit(x, y, batch_size=32, epochs=9, verbose=0, callbacks=[
        ...     dtk.callbacks.HalveRate(64, (x, y), cuts=2)])
        HalveRate: error 1 after 1, learning rate 0.5 -> 0.25 (cut 1 of 2)
        HalveRate: error 1 after 1, learning rate 0.25 -> 0.125 (cut 2 of 2)
        HalveRate: error 1 after 1, training ends after 2 cuts
    """

    saved = (*CrossValidation.saved, "before", "made")

    def __init__(
        self,
        every_samples: int,
        validation_data: Tree | tf.data.Dataset,
        gain: float = 0.05,
        cuts: int = 6,
        first: float | None = None,
        batch_size: int | None = None,
        monitor: str | Callable[[dict[str, float]], float] = "loss",
        momentum_correction: bool = True,
    ):
        super().__init__(every_samples, self._judge, validation_data, batch_size, monitor)
        if not 0 <= gain < 1:
            raise ValueError(f"gain must be 0 or more and less than 1, got {gain!r}")
        if not isinstance(cuts, int) or cuts < 0:
            raise ValueError(f"cuts must be an integer of at least 0, got {cuts!r}")
        self.gain, self.cuts, self.first = gain, cuts, first
        self.momentum_correction = momentum_correction
        self._before, self._made = first, 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise before the first epoch if the callback cannot work."""
        super().on_train_begin(logs)
        check_settable(self.model.optimizer, type(self).__name__)
        for other in self.beside(GrowBatchInsteadOfDecay):
            if "learning rate" in other.sets_here():
                raise ValueError(
                    f"{type(self).__name__} would halve a rate that {type(other).__name__} sets "
                    "anew in every epoch; add SampleRate(rate per sample), which takes both into "
                    "account, or use BatchSizeSchedule"
                )
        self._before, self._made = self.first, 0

    def _judge(self, index: int, average_error: float, samples: int, minibatches: int) -> bool:
        del index, samples, minibatches
        before, self._before = self._before, average_error
        if before is None or gains_enough(before, average_error, self.gain):
            return True
        message = f"error {average_error:.4g} after {before:.4g}"
        if self._made == self.cuts:
            self.say(f"{message}, training ends after {self.cuts} cuts")
            return False
        self._made += 1
        optimizer, sample_rate = self.model.optimizer, sample_rate_of(self.trainer)
        name = "learning rate" if sample_rate is None else "rate per sample"
        rate = rate_now(optimizer) if sample_rate is None else sample_rate.rate
        multiply_rate(optimizer, 0.5, self.momentum_correction)
        self.say(
            f"{message}, {name} {rate:.4g} -> {rate / 2:.4g} (cut {self._made} of {self.cuts})"
        )
        return True


class FinalTest(StrategyCallback):
    """Evaluate once, after `fit` succeeds, with the last weights or the ones a callback restored.

    The numbers cover all data and are equal on every rank. Rank 0 prints them, and History gets
    them as `test_loss` and so on, each a list of one. There is no test if an exception (also from
    SIGTERM) ends `fit`, but there is one if a callback stops it early.

    Args:
        x: Arrays, or a dataset of batches `(x, y)`; the same on every rank.
        y: Targets, for arrays.
        batch_size: Global batch for arrays; None for `fit`'s.

    Attributes:
        result: Loss and metrics by name; None before the test.

    Raises:
        DisagreementError: At train begin, if ranks have different data.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x, y = np.zeros((64, 4)), np.zeros((64, 1))
        >>> test = dtk.callbacks.FinalTest(x, y)
        >>> history = model.fit(x, y, verbose=0, callbacks=[test])
        FinalTest: loss 0
        >>> test.result, history.history["test_loss"]
        ({'loss': 0.0}, [0.0])

    Source: `TestConfig` of CNTK 2.
    """

    def __init__(self, x: Tree | tf.data.Dataset, y: Tree = None, batch_size: int | None = None):
        super().__init__()
        self._evaluation = Evaluation("test data", x if y is None else (x, y), batch_size)
        self.result: dict[str, float] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the data over all ranks."""
        self._evaluation.check(self.trainer)
        self.result = None

    def on_end_agreed(self, logs: Logs | None = None) -> None:
        """Test: no callback changes the weights after this point."""
        self.result = self._evaluation.run(self.trainer).numbers
        for name, value in self.result.items():
            self.model.history.history[f"test_{name}"] = [value]
        self.say(", ".join(f"{name} {value:.4g}" for name, value in self.result.items()))
