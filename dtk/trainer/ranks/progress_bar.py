"""Keras's progress bar, with what all ranks do in a second."""

from __future__ import annotations

import time

import keras

from dtk.nests import Logs
from dtk.trainer.contract import Trainer


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's bar, which says samples per second of all replicas behind the time of a step."""

    def __init__(self, trainer: Trainer):
        super().__init__()
        self.trainer = trainer
        self._first: tuple[int, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin to count anew."""
        self._first = None
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the step; the first one of an epoch is traced, or waits for data."""
        now, steps = time.perf_counter(), batch + 1
        if self._first is None:
            self._first = steps, now
        before, since = self._first
        first, last = (self.trainer.feed.rows_in(count) for count in (before, steps))
        if first is not None and last is not None and now > since:
            self.progbar.unit_name = f"step, {(last - first) / (now - since):,.0f} samples/s"
        super().on_train_batch_end(batch, logs)
