"""What `dtk run` is told of a model's training: its steps, about once a second, and its epochs."""

from __future__ import annotations

import contextlib
import time

import keras
import tensorflow as tf

from dtk.cluster import recording
from dtk.communicators import determinism
from dtk.communicators.base import Communicator
from dtk.compat.keras_data import Feed
from dtk.input import slicing
from dtk.nests import Logs
from dtk.trainer.strategy import Strategy

_MOST = 40  # metrics that are told of, so that the message stays short
_COUNTED = ("bytes", "communicating", "between", "input", "samples")


class StepRecorder:
    """Tells of the steps and epochs of one model; costs nothing where no launcher wants to know."""

    def __init__(self, model: keras.Model, strategy: Strategy, feed: Feed):
        self._model, self._strategy, self._feed = model, strategy, feed
        self._recorder = recording.recorder()
        self._epoch = self._epochs = 0
        self._first = self._begun = self._ended = 0  # batches of the epoch
        self._logs: Logs | None = None
        self._base = time.time()
        self._arrived: tf.Variable | None = None
        self._rows: tf.Variable | None = None  # of the batches that have arrived
        self._is_traced = False

    def begin(self, batch: int = 0) -> None:
        """Note that a step begins, of a batch of `fit`'s or one that a script gave."""
        if self._recorder is None:
            return
        self._begun = batch
        if not self._recorder.untold:
            self._first = batch
        if self._recorder.is_paused:
            self._recorder.counted = self._counts()
        self._recorder.begin()

    def end(self, batch: int = -1, logs: Logs | None = None) -> None:
        """Note that steps have ended, the last of them that of a batch of `fit`'s."""
        if self._recorder is None:
            return
        self._ended, self._logs = batch + 1, logs
        if self._recorder.end(max(1, self._ended - self._begun)):
            self._tell()

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Note which epoch the next steps belong to."""
        self.end_steps()
        self._epoch, self._epochs = epoch + 1, epochs

    def end_steps(self) -> None:
        """Tell of the epoch's last steps: what follows is none, such as validation."""
        if self._recorder is not None:
            self._tell()
            self._recorder.is_paused = True

    def end_epoch(self, logs: Logs | None) -> None:
        """Tell of the epoch's numbers."""
        if self._recorder is not None and self._strategy.is_chief:
            numbers = {k: float(v) for k, v in (logs or {}).items() if isinstance(v, float | int)}
            metrics = dict(list(numbers.items())[:_MOST])
            where = {"epoch": self._epoch, "epochs": self._epochs}
            self._recorder.tell("epoch", **where, metrics=metrics, **self._settings())

    def saved(self, path: str, seconds: float) -> None:
        """Tell that rank 0 has written a file, or has begun to write it beside the training."""
        if self._recorder is not None and self._strategy.is_chief:
            self._recorder.tell("save", path=path, seconds=round(seconds, 3))

    def note_arrival(self, batch: slicing.Slices) -> None:
        """Add the time at which a batch is there to a sum; this is traced with the step."""
        asked = self._recorder is not None and self._recorder.tells_each
        if not asked or determinism.is_asked_for() or len(self._strategy.local_ranks()) > 1:
            return
        self._is_traced = True  # before it arrives: so the first time is no waiting
        if self._arrived is None or self._rows is None:
            with tf.init_scope():
                self._arrived = tf.Variable(0.0, dtype=tf.float64, trainable=False)
                self._rows = tf.Variable(0, dtype=tf.int64, trainable=False)
        if slicing.is_known(batch.rows):
            self._rows.assign_add(batch.rows)
        with tf.control_dependencies(tf.nest.flatten(batch.counts)):
            self._arrived.assign_add(tf.timestamp() - self._base)

    def _tell(self) -> None:
        """Tell of the steps since the last time."""
        recorder = self._recorder
        if recorder is None or not recorder.untold:
            return
        now = self._counts()
        counted = [after - before for after, before in zip(now, recorder.counted, strict=True)]
        facts: dict[str, object] = {"epoch": self._epoch}
        facts |= {name: round(value, 6) for name, value in zip(_COUNTED, counted, strict=True)}
        if self._arrived is None or self._is_traced or not self._ended or recorder.begun is None:
            del facts["input"]
        else:  # what was added up are the times at which batches arrived
            waited = counted[-1] + recorder.untold * self._base - recorder.begun
            facts["input"] = round(min(max(0.0, waited), recorder.seconds), 6)
        if not facts["samples"]:
            del facts["samples"]
        if self._ended:
            rows = self._feed.rows_between(self._first, self._ended)
            if rows is not None and rows > 0:
                facts["samples"] = rows
        if self._strategy.is_chief:
            loss = (self._logs or {}).get("loss")
            facts |= {"loss": loss if isinstance(loss, float | int) else None, **self._settings()}
        if recorder.tell_steps(facts):
            recorder.counted, self._is_traced = now, False
            recorder.tell_messages([span for group in self._groups for span in group.spans()])

    @property
    def _groups(self) -> tuple[Communicator, Communicator]:
        return self._strategy.communicator, self._strategy.model_communicator

    def _counts(self) -> list[float]:
        """Return what has been counted since the process began, in the order of `_COUNTED`."""
        groups = self._groups
        between = sum(group.eager_seconds_communicating for group in groups)
        return [
            sum(group.bytes_sent for group in groups),
            sum(group.seconds_communicating for group in groups),
            0.0 if self._model.run_eagerly else between,
            0.0 if self._arrived is None else float(self._arrived.numpy()),
            0 if self._rows is None else int(self._rows.numpy()),
        ]

    def _settings(self) -> dict[str, object]:
        """Return what of the training changes while it runs: rate, and rows of a batch."""
        settings: dict[str, object] = {}
        if (optimizer := getattr(self._model, "optimizer", None)) is not None:
            # A MultiOptimizer has none, only its members have.
            with contextlib.suppress(AttributeError, TypeError, ValueError):
                settings["rate"] = float(optimizer.learning_rate)
        if self._ended:
            settings["batch"] = self._feed.batch_size()
        return settings
