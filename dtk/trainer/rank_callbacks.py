"""dtk's callbacks around the user's: they check and synchronize ranks while `fit` runs.

Before the first step all ranks take rank 0's weights. After it and after every epoch they compare
every weight bit for bit. If ranks have diverged, `fit` stops and names the first variable that
differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import keras
import tensorflow as tf

from dtk.nests import Logs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.exchange_selection import ExchangeSelection
from dtk.trainer.ranks.rank_checks import check_same_run
from dtk.trainer.ranks.seeds import spread_seeds
from dtk.trainer.ranks.shared_weights import (
    check_same_weights,
    start_from,
    start_from_epoch_of_rank_0,
)


def notify(callbacks: Sequence[keras.callbacks.Callback], event: str, *args: object) -> None:
    """Call a method of the callbacks that define it."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*args)


class SynchronizeWeights(keras.callbacks.Callback):
    """Callback before the user's, so that theirs see the weights and logs of all ranks."""

    def __init__(self, trainer: DistributedTrainer):
        super().__init__()
        self.trainer = trainer

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the weights of replicas with local steps, and logged numbers that differ."""
        if not self.trainer.has_local_steps:
            return
        self.trainer.synchronize_weights()
        logs = {} if logs is None else logs
        # Callbacks may have added other objects, which perhaps cannot be sent.
        numbers = {name: value for name, value in logs.items() if isinstance(value, float | int)}
        gathered = self.trainer.strategy.world.allgather_object(numbers)
        for name in numbers:
            values = [one[name] for one in gathered]
            if isinstance(values[0], float) and len(set(values)) > 1:
                logs[name] = sum(values) / len(values)


class RankChecks(keras.callbacks.Callback):
    """Callback after the user's: if one of them stops training on one rank, all ranks stop.

    A callback that must run after all others, such as one that saves their state, defines

        on_train_agreed(logs)           every on_train_begin has run and the ranks start equal
        on_epoch_agreed(epoch, logs)    every on_epoch_end has run and the ranks agree on stopping
        on_end_agreed(logs)             every on_train_end has run: training ended without exception
        on_fit_left()                   `fit` is over, or was left by an exception
    """

    def __init__(self, trainer: DistributedTrainer, every_batch: bool = False):
        super().__init__()
        self.trainer = trainer
        self._every_batch = every_batch
        self._stepped = False
        self._steps = 0
        self._selection = ExchangeSelection(trainer)

    @property
    def _alone(self) -> bool:
        return self.trainer.strategy.world.size == 1

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare ranks, then start from rank 0's weights, optimizer state and epoch."""
        trainer = self.trainer
        trainer.strategy.meet("training begins")
        if not self._alone:
            check_same_run(trainer, self.params)
            start_from(0, trainer, trainer.agreed_variables())
            start_from_epoch_of_rank_0(trainer)
        spread_seeds(trainer)
        notify(trainer.callbacks.callbacks, "on_train_agreed", logs)
        self._selection.begin()
        self._stepped = False
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Shuffle the data anew, in the same order on every rank."""
        self.trainer.strategy.meet(f"epoch {epoch + 1} begins")
        self.trainer.feed.show_learned_steps()
        self.trainer.new_epoch(epoch)
        self.trainer.feed.shuffle(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Read the clocks after all other callbacks, to leave their time out."""
        self._selection.begin_step(batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Check after the first step that all ranks have the same weights; agree on stopping."""
        self._selection.end_step(batch, logs)
        if not self._stepped:
            self._stepped = True
            if not self.trainer.has_local_steps:
                self._check("after the first step")
        self._steps += 1
        if self._steps & (self._steps - 1) == 0 and self._steps > 1:
            self.trainer.check_same_reading("train", f"after step {self._steps}")
        if self._every_batch and not self._alone:
            self._agree_on_stopping()
        if self.model.stop_training:
            self.trainer.flush()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compare weights and batches; stop all ranks if one wants to stop."""
        self.trainer.strategy.meet(f"epoch {epoch + 1} ends")
        self.trainer.flush()
        self.trainer.check_same_reading("train", f"after epoch {epoch + 1}")
        self._check(f"after epoch {epoch + 1}")
        if not self._alone:
            self._agree_on_stopping()
        self._selection.end_epoch()
        notify(self.trainer.callbacks.callbacks, "on_epoch_agreed", epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Tell callbacks that training is over and weights no longer change."""
        notify(self.trainer.callbacks.callbacks, "on_end_agreed", logs)

    def _check(self, when: str) -> None:
        if self.trainer.takes_over:
            check_same_weights(self.trainer, when)

    def _agree_on_stopping(self) -> None:
        # This may run after every batch, so it sends one small number, not an object.
        wish = tf.constant(int(self.model.stop_training))
        self.model.stop_training = bool(self.trainer.strategy.world.allreduce(wish, "max"))


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar with the samples per second of all replicas after the step time."""

    def __init__(self, trainer: DistributedTrainer):
        super().__init__()
        self.trainer = trainer
        self._first: tuple[int, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin to count anew."""
        self._first = None
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count the step, except an epoch's first, which is traced or waits for data."""
        now, steps = time.perf_counter(), batch + 1
        if self._first is None:
            self._first = steps, now
        before, since = self._first
        first, last = (self.trainer.feed.rows_in(count) for count in (before, steps))
        if first is not None and last is not None and now > since:
            self.progbar.unit_name = f"step, {(last - first) / (now - since):,.0f} samples/s"
        super().on_train_batch_end(batch, logs)
