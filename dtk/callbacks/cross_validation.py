"""Cross-validation every so many samples; a function may then change or stop training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import tensorflow as tf

from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.evaluation import Evaluation, count_rows
from dtk.nests import Logs, Nest
from dtk.strategies import ParameterServerStrategy


class CrossValidationState(TypedDict):
    """The state that `CrossValidation` saves with a checkpoint."""

    samples: int  # samples seen
    before_epoch: int  # samples seen when the epoch began
    evaluated_at: int  # samples at the last evaluation
    epoch: int | None  # number of the epoch; None before the first


class CrossValidation(StrategyCallback):
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

    def __init__(
        self,
        every_samples: int,
        callback: Callable[[int, float, int, int], object],
        validation_data: Nest | tf.data.Dataset,
        batch_size: int | None = None,
        monitor: str | Callable[[dict[str, float]], float] = "loss",
    ):
        super().__init__()
        if not isinstance(every_samples, int) or every_samples < 1:
            raise ValueError(f"every_samples must be an integer above 0, got {every_samples!r}")
        if not callable(callback):
            raise ValueError(f"callback must be a function, got {callback!r}")
        self.every_samples = every_samples
        self.callback = callback
        self.monitor = monitor
        self._evaluation = Evaluation("cross-validation data", validation_data, batch_size)
        self._samples = self._before_epoch = self._evaluated_at = 0
        self._epoch: int | None = None

    def get_state(self) -> CrossValidationState:
        """Return the counts of samples and the epoch, for `Checkpoint`."""
        return {
            "samples": self._samples,
            "before_epoch": self._before_epoch,
            "evaluated_at": self._evaluated_at,
            "epoch": self._epoch,
        }

    def set_state(self, state: CrossValidationState) -> None:
        """Go on from a checkpoint's state.

        Args:
            state: The result of `get_state`.
        """
        self._samples, self._before_epoch = state["samples"], state["before_epoch"]
        self._evaluated_at, self._epoch = state["evaluated_at"], state["epoch"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare the data over all ranks, and begin to count."""
        served = isinstance(self.strategy, ParameterServerStrategy)
        if served and self.trainer.feed.rows_counted(1) is None:
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
        stops = self.strategy.world.allgather_object(go_on is False)
        if any(stops):
            self.model.stop_training = True

    def _error(self, numbers: dict[str, float]) -> float:
        if callable(self.monitor):
            return float(self.monitor(numbers))
        if self.monitor not in numbers:
            raise ValueError(
                f"{type(self).__name__}: monitor={self.monitor!r} is not among the numbers of "
                f"evaluate ({', '.join(sorted(numbers))})"
            )
        return numbers[self.monitor]
