"""Progress as lines of text, of one process or of all, for logs rather than terminals."""

from __future__ import annotations

import time
from typing import TextIO

from dtk.callbacks.base import StrategyCallback
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


class ProgressPrinter(StrategyCallback):
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
        self._epoch = epoch
        self._seen = self._printed = self._began_at = 0
        self._epoch_began = self._since = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Note where a resumed epoch starts."""
        if self._seen == 0 and batch:
            self._seen = self._printed = self._began_at = batch

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Print if a line is due."""
        before, self._seen = self._seen, batch + 1
        self._trained = time.perf_counter()
        if self.freq is None or not is_due(self.freq, before, self._seen):
            return
        steps = self.params.get("steps")
        where = f"minibatch {self._seen}" + (f"/{steps}" if steps else "")
        speed = self._speed(self._printed, self._seen, self._trained - self._since)
        self._print(f"epoch {self._where()}, {where}: {_numbers(logs)}{speed}")
        self._printed, self._since = self._seen, time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Print the epoch's line; the speed does not include validation."""
        seconds = self._trained - self._epoch_began if self._seen > self._began_at else 0.0
        speed = self._speed(self._began_at, self._seen, seconds)
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
        first, last = (self.trainer.feed.rows_in(steps) for steps in (before, now))
        if first is None or last is None:
            return f", {(now - before) / seconds:.4g} steps/s"
        return f", {(last - first) / seconds:.4g} samples/s"

    def _print(self, text: str) -> None:
        if self._file is not None:
            print(text, file=self._file, flush=True)
        elif self.strategy.is_chief:
            print(text, flush=True)


def _numbers(logs: Logs | None) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items())
