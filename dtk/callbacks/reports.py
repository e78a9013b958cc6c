"""What training costs and how far it is, in the logs and on the screen."""

from __future__ import annotations

import collections
import time
from typing import NamedTuple, TextIO

import keras
import numpy as np

from dtk.callbacks.strategy_callback import StrategyCallback
from dtk.nests import Logs


def is_due(freq: int, before: int, now: int) -> bool:
    """Return whether a line is due among minibatches `before + 1 .. now` of an epoch.

    Example:
        >>> [now for now in range(1, 20) if is_due(0, now - 1, now)]
        [1, 2, 4, 8, 16]
        >>> [now for now in range(1, 20) if is_due(5, now - 1, now)]
        [5, 10, 15]
    """
    if freq:
        return now // freq > before // freq
    return before.bit_length() < now.bit_length()


class _CountsSteps(StrategyCallback):
    """Callback that knows which steps of the epoch are done."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin to count."""
        self._first = self._end = 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Note the epoch's first step: a resumed epoch may begin in the middle."""
        if not self._end:
            self._first = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the step."""
        self._end = batch + 1


class ProgressPrinter(_CountsSteps):
    """Print loss, metrics and samples per second, at one of CNTK's three intervals.

    The numbers cover all ranks and are equal on every rank. Only rank 0 prints to the screen; with
    `log_to_file` every rank writes its own file instead.

    Args:
        freq: 0 prints after 1, 2, 4, 8, ... minibatches of each epoch; n prints after every n; None
            prints only after epochs.
        log_to_file: A path; ".rank0", ".rank1", ... is appended to it. Existing files are
            continued.

    Raises:
        ValueError: `freq` is negative.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((64, 4)), np.ones((64, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.ProgressPrinter(freq=None)])  # doctest: +ELLIPSIS
        epoch 1/1: loss ...
    """

    def __init__(self, freq: int | None = 0, log_to_file: str | None = None):
        super().__init__()
        if freq is not None and freq < 0:
            raise ValueError(f"freq must be 0 (geometric), a positive number or None, got {freq}")
        self.freq = freq
        self.log_to_file = log_to_file
        self._file: TextIO | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Open this rank's file."""
        strategy = self.strategy
        if self.log_to_file is not None:
            self._file = open(  # noqa: SIM115 - open as long as fit runs
                f"{self.log_to_file}.rank{strategy.rank}", "a", encoding="utf-8"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start counting."""
        super().on_epoch_begin(epoch)
        self._epoch, self._printed = epoch, 0
        self._epoch_began = self._since = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Print if a line is due."""
        before = self._end or self._first
        super().on_train_batch_end(batch)
        self._trained = time.perf_counter()
        if self.freq is None or not is_due(self.freq, before, self._end):
            return
        where = "/".join(map(str, filter(None, [self._end, self.params.get("steps")])))
        printed = self._printed or self._first
        speed = self._speed(printed, self._end, self._trained - self._since)
        self._print(f"epoch {self._where()}, minibatch {where}: {_numbers(logs)}{speed}")
        self._printed, self._since = self._end, time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Print the epoch's line; the speed does not include validation."""
        seconds = self._trained - self._epoch_began if self._end else 0.0
        speed = self._speed(self._first, self._end, seconds)
        self._print(f"epoch {self._where()}: {_numbers(logs)}, {seconds:.1f} s{speed}")

    def on_fit_left(self) -> None:
        """Close the file, also if `fit` fails."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _where(self) -> str:
        return f"{self._epoch + 1}/{self.params['epochs']}"

    def _speed(self, before: int, now: int, seconds: float) -> str:
        if not seconds:
            return ""
        rows = self.trainer.feed.rows_between(before, now)
        if rows is None:
            return f", {(now - before) / seconds:.4g} steps/s"
        return f", {rows / seconds:.4g} samples/s"

    def _print(self, text: str) -> None:
        if self._file is not None:
            print(text, file=self._file, flush=True)
        elif self.strategy.is_chief:
            print(text, flush=True)


def _numbers(logs: Logs | None) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items())


class CommunicationStats(_CountsSteps):
    """Put the cost of communication into each epoch's logs.

    `comm_bytes` is the number of bytes that this rank handed to the transport per step, averaged
    over the epoch: gradients, statistics and metrics (see `Communicator.bytes_sent`). `comm_share`
    is the part of the epoch's time in which a collective was under way, including time that it
    waits for slower ranks or overlaps with computing. Validation does not count. With one process
    both are 0.

    Raises:
        ValueError: At train begin, if steps run behind parameter servers.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[
        ...     dtk.callbacks.CommunicationStats()])
        >>> history.history["comm_bytes"], history.history["comm_share"]
        ([0.0], [0.0])
    """

    def __init__(self) -> None:
        super().__init__()
        self._until: tuple[float, ...] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raise for strategies that do not use the communicator."""
        if self.has_servers:
            raise ValueError(
                "CommunicationStats: workers of parameter servers speak with the servers, not with "
                "each other; use dtk.callbacks.ServerReport(), which counts what they move"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the counts at the epoch's beginning."""
        super().on_epoch_begin(epoch)
        self._since, self._until = self._counts(), None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Stop counting for this epoch: its validation begins."""
        if self._until is None:
            self._until = self._counts()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's numbers to its logs."""
        self.trainer.flush()
        until = self._until or self._counts()
        sent, seconds, wall = (b - a for a, b in zip(self._since, until, strict=True))
        if logs is not None:
            logs["comm_bytes"] = sent / max(1, self._end - self._first)
            logs["comm_share"] = seconds / wall if wall else 0.0

    def _counts(self) -> tuple[float, ...]:
        groups = (self.strategy.communicator, self.strategy.model_communicator)
        sent = sum(group.bytes_sent for group in groups)
        return sent, sum(group.seconds_communicating for group in groups), time.perf_counter()


class Summary(NamedTuple):
    """An epoch or an evaluation in three numbers.

    Attributes:
        loss: The loss.
        metric: The first metric given to `compile`; None without one.
        samples: Rows, of all ranks together; None where `fit` cannot know.
    """

    loss: float
    metric: float | None
    samples: int | None


class TrainingSummary(_CountsSteps):
    """Keep loss, metric and samples of every epoch, and of the last evaluation.

    Attributes:
        epoch_summaries: A `Summary` for each epoch of the last `fit`.
        test_summary: The `Summary` of the last `evaluate`, or of the last validation in `fit`; None
            before the first.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        >>> summary = dtk.callbacks.TrainingSummary()
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[summary])
        >>> len(summary.epoch_summaries), summary.epoch_summaries[-1].samples
        (1, 8)

    Source: `epoch_summaries` and `test_summary` of CNTK's `Function.train`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch_summaries: list[Summary] = []
        self.test_summary: Summary | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the epochs of an earlier `fit`."""
        self.epoch_summaries = []

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Keep the epoch's numbers."""
        samples = self.trainer.feed.rows_between(self._first, self._end)
        self.epoch_summaries.append(self._summary(logs, samples))

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Keep the evaluation's numbers; its loss is a mean over the rows."""
        counts = [metric.count for metric in self.model.metrics if hasattr(metric, "count")]
        samples = round(float(keras.ops.convert_to_numpy(counts[0]))) if counts else None
        self.test_summary = self._summary(logs, samples)

    def _summary(self, logs: Logs | None, samples: int | None) -> Summary:
        numbers = dict(logs or {})
        loss = numbers.pop("loss", float("nan"))
        names = [m for m in numbers if not m.startswith("val_") and m != "learning_rate"]
        return Summary(loss, numbers[names[0]] if names else None, samples)


class ServerReport(StrategyCallback):
    """Print a report of a parameter-server job after `fit`; put its traffic into the logs.

    Each epoch's logs get `pulled_bytes` and `pushed_bytes`, the mean of a worker's step. After
    training the callback prints the bytes on each server, the traffic of each worker, the results
    that were not needed and the slices computed again for lost workers, and the staleness of all
    steps as a histogram. The optimizer's slot variables are on the servers of their weights and are
    not counted.

    Attributes:
        epochs: For each epoch, staleness -> number of steps.

    Raises:
        ValueError: At train begin, if the strategy has no servers.

    Example:
        >>> import dtk
        >>> report = dtk.callbacks.ServerReport()
        >>> model.fit(x, y, callbacks=[report])  # doctest: +SKIP
        ServerReport: 2 servers hold 24.4 and 24.1 kB of weights (largest 1.01 of the mean)
        ServerReport: worker 0: 88 steps, pulled 19.2 kB and pushed 19.2 kB in each
        ServerReport: worker 1: 88 steps, pulled 19.2 kB and pushed 19.2 kB in each
        ServerReport: staleness (missing steps x times): 0 x 9, 1 x 31, 2 x 97, 3 x 39
    """

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[int, int]] = []
        self._before: list[dict[str, int]] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Note the traffic before training."""
        if not self.has_servers:
            raise ValueError(
                f"ServerReport: {type(self.strategy).__name__} has no parameter servers; leave "
                "this callback out, or use dtk.strategies.ParameterServerStrategy"
            )
        self.epochs = []
        self._start = self._before = self.strategy.traffic
        self._wasted = self._waste()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's traffic to its logs."""
        self.trainer.flush()
        moved = _moved(self._before, self.strategy.traffic)
        self._before = self.strategy.traffic
        steps = max(1, sum(worker["steps"] for worker in moved))
        if logs is not None:
            for name in ("pulled", "pushed"):
                logs[f"{name}_bytes"] = sum(worker[name] for worker in moved) / steps
        self.epochs.append(dict(self.strategy.schedule_of(self.model).statistics.histogram))

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Print the report."""
        strategy = self.strategy
        held = strategy.placement
        mean = sum(held) / len(held)
        servers = f"{len(held)} servers hold" if len(held) > 1 else "1 server holds"
        self.say(
            f"{servers} {_listed([f'{n / 1e3:.1f}' for n in held])} kB of weights (largest "
            f"{max(held) / mean if mean else 1:.2f} of the mean)"
        )
        for index, worker in enumerate(_moved(self._start, strategy.traffic)):
            steps = max(1, worker["steps"])
            self.say(
                f"worker {index}: {worker['steps']} steps, pulled "
                f"{worker['pulled'] / steps / 1e3:.1f} kB and pushed "
                f"{worker['pushed'] / steps / 1e3:.1f} kB in each"
            )
        ages = sum(map(collections.Counter, self.epochs), collections.Counter[int]())
        dropped, retried = np.subtract(self._waste(), self._wasted)
        if dropped or retried:
            self.say(
                f"{dropped} results were not needed any more, {retried} slices were computed again "
                "for a lost worker"
            )
        told = ", ".join(f"{age} x {ages[age]}" for age in sorted(ages))
        self.say(f"staleness (missing steps x times): {told or 'no step'}")

    def _waste(self) -> tuple[int, int]:
        """Return the numbers of results not needed and of lost slices handed out again, so far."""
        schedule = self.strategy.schedule_of(self.model)
        return schedule.dropped, schedule.retried


def _moved(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[dict[str, int]]:
    return [
        {name: now[name] - then[name] for name in now}
        for then, now in zip(before, after, strict=True)
    ]


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
