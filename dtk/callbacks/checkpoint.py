"""Checkpoints that any number of workers can resume from."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

import keras

from dtk.callbacks.checkpointing import checkpoint_state as states
from dtk.callbacks.checkpointing import contents
from dtk.callbacks.checkpointing.checkpoint_files import CheckpointFiles
from dtk.callbacks.checkpointing.contents import Background, TrainingProgress, on_chief
from dtk.callbacks.checkpointing.directory_lock import DirectoryLock
from dtk.callbacks.checkpointing.termination import EXIT_CODE, Termination
from dtk.callbacks.strategy_callback import StrategyCallback, count_rows
from dtk.compat import keras_models
from dtk.compat.keras_data import Feed
from dtk.errors import CheckpointSaveError
from dtk.nests import Array, Logs
from dtk.parameter_server.evaluator import SavedProgress
from dtk.schedules.runs import check_count, is_count
from dtk.trainer.fit import is_writer
from dtk.trainer.ranks import shared_weights
from dtk.trainer.replica.step_metrics import metric_variables


class Checkpoint(StrategyCallback):
    """Save training, and go on from where it was: rank 0 reads and writes, all ranks agree.

    Restored are weights, the optimizer's state and its rate, the epoch and the step within it, what
    Keras's EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and History have learned, any callback
    that has `get_state()` and `set_state(state)`, dropout seeds, and the random state of Python,
    numpy and TensorFlow's seed. Values travel by broadcast, so only rank 0 needs to see the
    directory. A checkpoint says nothing about how many workers wrote it: any number can resume.

    A resumed run ends with the weights of an uninterrupted one when its data is arrays, a
    `PyDataset`, or a `tf.data` pipeline whose order depends on seeds and on how often it was
    iterated, and `keras.utils.set_random_seed` was called. What cannot be restored: the position of
    generators; what a `PyDataset` draws or shuffles itself, and its order under `steps_per_epoch`
    with `workers` above 1; the state of `tf.random` ops inside a step or a pipeline. A step within
    an epoch is resumed by passing over the batches before it.

    Files never lie half written (see `dtk.callbacks.checkpointing.checkpoint_files`). On SIGTERM
    all ranks save at the same step, within about a second, and exit with code 143, so that a
    scheduler can start the job again. During `fit`'s validation they save what training has
    reached; resuming begins that validation anew. Nothing is saved, and that is said, when a single
    step, or what another callback does between two, takes more than `DTK_SAVE_GRACE` seconds (60);
    `dtk run` sets it by `--save-grace`, and waits as long.

    During `fit` no other job can save to the directory (see
    `dtk.callbacks.checkpointing.directory_lock`).

    A `fit` that is called again with the same callback goes on with the model in memory, or from
    the checkpoint, if that is of a later epoch than the `fit` before had. So give a second `fit`
    that must be resumable its `initial_epoch`, or a directory of its own.

    Args:
        directory: Where checkpoints lie.
        save_freq: "epoch", or a number of steps (checked once per execution when
            `steps_per_execution` is larger than 1).
        max_to_keep: How many to keep, older ones are removed; None keeps all.
        monitor: A number in the epoch's logs, such as "val_loss"; the best epoch's weights are
            copied to `best.weights.h5` in the directory, for `model.load_weights`. The best epoch
            so far is saved whatever `save_freq` says.
        mode: "min" or "max"; "auto" decides by the name.
        resume: Whether to go on from the newest checkpoint; an empty directory starts afresh.
        save_on_sigterm: Whether to catch SIGTERM during `fit`. In a thread it is caught under
            `dtk run`, when that is ended, and on Ray.
        save_every_samples: Samples of all ranks from one checkpoint to the next, in place of
            `save_freq`: as often whatever the batch, and while it grows. Saved is after the step
            that completes so many. Rows of data that is not arrays are looked up, by a collective,
            a few times between two checkpoints; the last steps of an epoch count by those before.
        on_save_error: What to do when a checkpoint cannot be written, as on a full disk. "warn"
            prints it on rank 0 and trains on: nothing that was learned is thrown away, the last
            good checkpoint stays, and the next save tries anew. "raise" ends `fit` on all ranks.
        background: Whether to train on while rank 0 writes. It holds a copy of weights and
            optimizer state until that is done, one at most: the next save waits for it, and so
            do the end of `fit` and SIGTERM. What could not be written shows at the next step, or
            with several ranks and "raise" at the next save or end of an epoch.

    Attributes:
        directory: Directory of the checkpoints.
        larger_is_better: Whether a larger value of `monitor` is a better one.
        best: Best value of `monitor` so far; None before the first.

    Raises:
        ValueError: An argument is out of range; at train begin, when the checkpoint belongs to
            another model, or none in the directory can be read.
        CheckpointInUseError: At train begin, when another job saves to the directory.
        CheckpointSaveError: While training, as `on_save_error` says.

    Example:
        >>> import dtk, keras, numpy as np, tempfile
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> def train(epochs, directory):
        ...     with strategy.scope():
        ...         model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...         model.compile(optimizer="adam", loss="mse")
        ...     return model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=epochs, verbose=0,
        ...                      callbacks=[dtk.callbacks.Checkpoint(directory)])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     first = train(2, directory)
        ...     second = train(3, directory)  # doctest: +ELLIPSIS
        Checkpoint: resuming at epoch 3/3 from .../checkpoint-00000002
        >>> second.epoch
        [0, 1, 2]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        max_to_keep: int | None = 5,
        monitor: str | None = None,
        mode: str = "auto",
        resume: bool = True,
        save_on_sigterm: bool = True,
        save_every_samples: int | None = None,
        on_save_error: str = "warn",
        background: bool = False,
    ):
        super().__init__()
        self._frequency = Frequency(save_freq, save_every_samples)
        check_count("max_to_keep", max_to_keep, none="all")
        if on_save_error not in ("warn", "raise"):
            raise ValueError(f"on_save_error must be 'warn' or 'raise', got {on_save_error!r}")
        self.files = CheckpointFiles(directory)
        self.directory = self.files.directory
        self.save_freq, self.save_every_samples = save_freq, save_every_samples
        self.max_to_keep, self.on_save_error = max_to_keep, on_save_error
        self.resume, self.save_on_sigterm = resume, save_on_sigterm
        self.monitor, self.larger_is_better = monitor, better_when_larger(monitor, mode)
        self.best: float | None = None
        self._best_before: float | None = None
        self._saves_in_background, self._background = background, Background(self.say)
        self._lock = DirectoryLock(self.directory)
        self._begun = self._fitting = False
        self._saves: keras.Model | None = None
        self._termination: Termination | None = None
        self._metrics: list[Array] | None = None
        self._rates: list[tuple[keras.Variable, Array]] = []
        self._resumed_state: states.CheckpointState | None = None  # of an epoch that has begun
        self._learned: states.Learned = {}  # by callbacks, before the validation that goes on
        self._trained: Logs | None = None
        self._initial_epoch: int | None = None

    # Resuming.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Catch SIGTERM."""
        self._fitting, self._initial_epoch = True, keras_models.initial_epoch(self.model)
        self._epoch = self._resumed_step = 0
        self._frequency.saved()
        self._trained = None
        if self._saves not in (None, self.model):
            raise ValueError(
                f"{self.directory} has the checkpoints of another model that was trained with this "
                "callback; give each model a Checkpoint with a directory of its own"
            )
        self._saves = self.model
        for other in self.beside(Checkpoint):
            same = other.directory.resolve() == self.directory.resolve()
            if other is not self and same:
                raise ValueError(
                    f"two Checkpoint callbacks write to {self.directory}; give each a "
                    "directory of its own, or keep one"
                )
        if self.save_on_sigterm and self is self._asked_by_sigterm()[-1]:
            self._termination = Termination(self.strategy.world)
            if not self._termination.install():
                self.say(
                    "SIGTERM will save nothing, since fit runs in a thread, where Python catches "
                    "no signal: call it in the main thread, or start with `dtk run`; save_freq= "
                    "decides how much is lost"
                )

    def on_train_agreed(self, logs: Logs | None = None) -> None:
        """Resume, now that the other callbacks have begun: that resets what they learned.

        Raises:
            ValueError: The checkpoint belongs to another model, or none in the directory can be
                read.
            OSError: Nothing can be written to the directory.
            CheckpointInUseError: Another job saves to the directory; nothing of it was touched.
        """

        def open_directory() -> None:
            self.files.check_writable()
            self._lock.take()

        on_chief(self.strategy, open_directory)
        if self._begun:
            return
        self._begun = True
        trainer, epochs = self.trainer, self.params["epochs"]
        parts = contents.parts_of(trainer)
        loaded = on_chief(
            self.strategy, lambda: contents.load_newest(self.files, trainer, self.resume, parts)
        )
        if loaded is not None:
            name, state = loaded
            contents.restore(state, trainer, epochs, parts)
            self._metrics, self._resumed_step = state["metrics"], state["step"]
            self.best, self._trained = state["best"], state["trained"]
            begun = state["data"].get("begun", self._resumed_step > 0)
            # Of a later `fit` with this callback, which goes on from it; this one trains nothing.
            self._begun = (state["epoch"], begun) <= (epochs, False)
            if begun or self._trained is not None:
                self._rates = [(v, v.numpy()) for v in contents.learning_rates(self.model)]
                self._resumed_state = state
            self.say(contents.resume_message(state, epochs, self.directory / name))

    # Saving. Between steps means before the beginning of a batch: the step before it is complete on
    # every rank, Keras need not wait for a step's logs, and no callback has counted the next step.

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Put back the metrics of an epoch that is resumed in its middle."""
        done, self._epoch, self._resumed_step = self._resumed_step, epoch, 0
        if self._metrics:
            for variable, value in zip(metric_variables(self.model), self._metrics, strict=True):
                self.trainer.strategy.set_sum(variable, value)
        self._metrics = None
        self._frequency.begin_epoch(done, self.trainer.feed, self.model)

    def on_epoch_started(self, epoch: int) -> None:
        """Put back what callbacks have changed again, of an epoch that is resumed in its middle.

        LearningRateScheduler multiplies the rate where an epoch begins, and has done so for this.
        dtk's own callbacks know that an epoch may begin twice.
        """
        for variable, rate in self._rates:
            variable.assign(rate)
        if self._resumed_state is not None:
            every = self.beside(keras.callbacks.Callback)
            others = [one for one in every if not isinstance(one, StrategyCallback)]
            states.to_callbacks(self._resumed_state["callbacks"], others)
            states.to_generators(self._resumed_state["random"])
        self._rates, self._resumed_state = [], None

    def on_before_train_batch(self, batch: int) -> None:
        """Save between two steps."""
        self._frequency.count(batch, self.trainer.feed, self.model)
        self._notice_failure()
        progress = TrainingProgress(self._epoch, batch, in_epoch=True)
        if self._termination is not None and self._termination.wanted_after_step():
            self._exit(progress)
        if self._frequency.due and batch:
            self.save(progress)

    def on_before_test(self) -> None:
        """Keep what validation is about to change: training metrics, and callbacks that learn."""
        if self._termination is not None:
            on_chief(self.strategy, self._keep_learned)
            self._termination.find_pace()
            if self._trained is None:
                self._trained = self._results()

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Save during validation, which changes nothing of what is saved."""
        if self._termination is not None and self._termination.wanted_after_step():
            # A callback that validates other weights takes them out of the model again. One that
            # writes would write these numbers beside those of the whole validation.
            results = self._results()
            for one in self.trainer.callbacks.callbacks:
                if not is_writer(one):
                    one.on_test_end(results)
            steps = self.trainer.feed.iterator.num_batches or 0
            progress = TrainingProgress(self._epoch, steps, in_epoch=False, trained=self._trained)
            self._exit(progress._replace(learned=self._learned))

    def on_epoch_agreed(self, epoch: int, logs: Logs | None = None) -> None:
        """Save after an epoch, when all callbacks have seen it."""
        steps = self.trainer.feed.iterator.num_batches
        self._frequency.count(steps or 0, self.trainer.feed)
        ending = self._termination is not None and self._termination.wanted()
        if self._termination is not None and self._trained is not None:
            self._termination.find_pace()
        self._trained = None
        last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
        progress = TrainingProgress(epoch + 1, 0, in_epoch=False, logs=logs)
        if ending:
            self._exit(progress)
        unseen = self.monitor is not None and self.monitor not in (logs or {})
        if last and unseen and self.best is None:
            self.say(f"monitor={self.monitor!r} was in no epoch's logs: no best weights are kept")
        better = improvement(self.monitor, self.larger_is_better, self.best, logs) is not None
        if last or better or self._frequency.each_epoch or self._frequency.due:
            self.save(progress)
        else:
            self.finish(wait=False)

    def on_end_agreed(self, logs: Logs | None = None) -> None:
        """Wait for the last checkpoint."""
        self.finish()

    def on_fit_left(self) -> None:
        """Restore the handler of SIGTERM, and let a later `fit` start where it is told to."""
        if self._termination is not None:
            self._termination.remove()
            self._termination = None
        if (failure := self._background.left()) is not None:
            self.say(str(failure))  # fit was left by another exception
        self._lock.release()
        if self._fitting:
            self._fitting = False
            keras_models.set_initial_epoch(self.model, self._initial_epoch)

    def save(self, progress: TrainingProgress) -> Path | None:
        """Save now; every rank calls it.

        Args:
            progress: How far training is.

        Returns:
            Path of the checkpoint; None where weights are not finite, or it could not be written,
            which is said.

        Raises:
            CheckpointSaveError: It could not be written, and `on_save_error` is "raise".
        """
        self._frequency.saved()
        self.finish()
        note: dict[str, object] | None = None
        self._best_before = self.best
        better = improvement(self.monitor, self.larger_is_better, self.best, progress.logs)
        if better is not None:
            self.best = better
            note = {"epoch": progress.epoch, "monitor": self.monitor, "value": better}
        try:
            keep = self.max_to_keep
            background = self._background if self._saves_in_background else None
            began = time.monotonic()
            with shared_weights.whole_windows(self.trainer):
                name = contents.save(
                    self.trainer, self.files, progress, keep, self.best, note, background
                )
            path = self.directory / name
            self.trainer.recorder.saved(str(path), time.monotonic() - began)
            return path
        except contents.NotFiniteError as error:
            self.best = self._best_before
            newest = self.files.newest()
            kept = f"the newest one stays {self.directory / newest}" if newest else "none is kept"
            self.say(
                f"epoch {progress.epoch}, step {progress.step}: not saved, as {error}; {kept}. "
                "Try a smaller learning rate or clipnorm="
            )
        except CheckpointSaveError as error:
            self._fail(error)
        return None

    def finish(self, wait: bool = True) -> bool:
        """Return whether no saving in the background has failed; every rank calls it.

        Args:
            wait: Whether to wait for what is under way.
        """
        if not self._saves_in_background:
            return True
        try:
            on_chief(self.strategy, lambda: self._background.finish(wait))
        except CheckpointSaveError as error:
            self._fail(error)
            return False
        return True

    def _notice_failure(self) -> None:
        """Raise a failure of the background between two steps, where one rank may raise alone."""
        failure = self._background.failure
        if not isinstance(failure, CheckpointSaveError):
            return  # others than rank 0 have none
        if self.on_save_error == "warn" or self.strategy.world.size == 1:
            self._background.left()
            self._fail(failure)

    def _fail(self, error: CheckpointSaveError) -> None:
        self.best = self._best_before
        if self.on_save_error == "raise":
            raise error
        self.say(f"{error}; training goes on")

    # Evaluating beside the training; see `dtk.parameter_server.evaluator`.

    def appeared(self, seen: Collection[str]) -> list[str]:
        """Return the checkpoints that are not in `seen`, for the evaluator.

        Args:
            seen: Names of checkpoints.

        Returns:
            Names, oldest first.
        """
        return [name for name in reversed(self.files.names()) if name not in seen]

    def load_weights(self, model: keras.Model, name: str) -> SavedProgress | None:
        """Load the weights of a checkpoint into a model that will not be trained.

        Args:
            model: The model, compiled under a dtk strategy.
            name: The checkpoint's name, as `appeared` returns it.

        Returns:
            How far training was; None when the checkpoint has been removed.

        Raises:
            CorruptCheckpointError: It is not what was written.
            ValueError: It belongs to another model.
        """
        return contents.load_weights(self.files, model, name)

    def _keep_learned(self) -> None:
        """Copy what callbacks have learned: a validation that is cut short is begun anew."""
        self._learned = states.copies_of_callbacks(self.beside(keras.callbacks.Callback))

    def _results(self) -> Logs:
        results = self.model.get_metrics_result()
        return {name: contents.value_of(value) for name, value in results.items()}

    def _asked_by_sigterm(self) -> list[Checkpoint]:
        """Return the callbacks that save on SIGTERM; the last one acts, after all saw the step."""
        return [one for one in self.beside(Checkpoint) if one.save_on_sigterm]

    def _exit(self, progress: TrainingProgress) -> NoReturn:
        asked = [(one, one.save(progress)) for one in self._asked_by_sigterm()]
        saved = [str(path) for one, path in asked if one.finish() and path]
        self.say(f"SIGTERM: saved {' and '.join(saved) or 'nothing'}; start again to resume")
        raise SystemExit(EXIT_CODE)


_BETTER_WHEN_LARGER = ("acc", "auc", "precision", "recall", "f1", "fbeta", "iou", "r2", "cosine")
_BETTER_WHEN_SMALLER = ("loss", "error", "mae", "mse", "mape", "msle", "crossentropy", "poisson")


class Frequency:
    """Counts steps and samples since the last checkpoint, alike on all ranks.

    Example:
        >>> Frequency(save_freq=500).each_epoch, Frequency().each_epoch
        (False, True)
    """

    def __init__(self, save_freq: str | int = "epoch", save_every_samples: int | None = None):
        if save_freq != "epoch" and not is_count(save_freq):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of steps (1 or more), got {save_freq!r}"
            )
        check_count("save_every_samples", save_every_samples, none="save_freq")
        if save_every_samples is not None and save_freq != "epoch":
            raise ValueError(
                f"save_freq={save_freq!r} and save_every_samples={save_every_samples!r} were both "
                "given; keep one"
            )
        self._save_freq = save_freq
        self._every_samples = save_every_samples
        self.steps = self.samples = 0
        self._last_step = 0
        # Rows since the last checkpoint, and in this epoch, when they were last looked at; steps
        # since then; rows of a step.
        self._looked = self._total = self._unseen = 0
        self._rate = 0.0

    @property
    def each_epoch(self) -> bool:
        """Whether one is due after every epoch."""
        return self._save_freq == "epoch" and self._every_samples is None

    @property
    def due(self) -> bool:
        """Whether one is due now, by what was counted."""
        if self._every_samples is not None:
            return self.samples >= self._every_samples
        return isinstance(self._save_freq, int) and self.steps >= self._save_freq

    def begin_epoch(self, done: int, feed: Feed, model: keras.Model) -> None:
        """Begin to count the steps of an epoch, of which some may be done."""
        self._last_step = done
        self._looked += round(self._unseen * self._rate)
        self._unseen = 0
        seen = done and self._every_samples is not None and feed.rows_counted(done) is None
        self._total = count_rows(model) if seen else 0

    def count(self, done: int, feed: Feed, model: keras.Model | None = None) -> None:
        """Count what the epoch has done since the last call."""
        steps = max(0, done - self._last_step)
        self.steps += steps
        if self._every_samples is not None and steps:
            before, after = feed.rows_counted(self._last_step), feed.rows_counted(done)
            if before is None or after is None:
                self._estimate(steps, model)
            else:
                self.samples += after - before
        self._last_step = max(done, self._last_step)

    def _estimate(self, steps: int, model: keras.Model | None) -> None:
        """Count rows by those of the steps before, and look where enough may have come.

        To look takes a collective. It is done whenever half of what was left at the last look may
        be there, or steps since the last checkpoint are twice as many: batches may have grown.
        """
        assert self._every_samples is not None
        self._unseen += steps
        left = self._every_samples - self._looked
        enough = self._unseen * self._rate >= left / 2 or 2 * self._unseen >= self.steps
        if model is not None and enough:
            total = count_rows(model)
            self._rate = (total - self._total) / self._unseen
            self._looked += total - self._total
            self._total, self._unseen = total, 0
        self.samples = self._looked + round(self._unseen * self._rate)

    def saved(self) -> None:
        """Note that there is a checkpoint."""
        self.steps = self.samples = 0
        self._looked = -round(self._unseen * self._rate)


def better_when_larger(monitor: str | None, mode: str) -> bool:
    """Return whether larger values of a monitored number are better.

    Example:
        >>> better_when_larger("val_accuracy", "auto"), better_when_larger("val_loss", "auto")
        (True, False)
    """
    if monitor is None:
        return False
    if not isinstance(monitor, str) or not monitor:
        raise ValueError(
            f"monitor={monitor!r}; expected the name of a number of the logs, such as 'val_loss', "
            "or None"
        )
    if mode not in ("auto", "min", "max"):
        raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
    if mode != "auto":
        return mode == "max"
    name = monitor.lower()
    if any(word in name for word in _BETTER_WHEN_SMALLER):
        return False
    if any(word in name for word in _BETTER_WHEN_LARGER):
        return True
    raise ValueError(f"the name {monitor!r} does not tell whether more is better; give mode")


def improvement(
    monitor: str | None, larger_is_better: bool, best: float | None, logs: Logs | None
) -> float | None:
    """Return an epoch's value of the monitored number if it is better than the best, else None.

    Example:
        >>> improvement("val_loss", False, None, {"val_loss": 0.5})
        0.5
        >>> improvement("val_loss", False, 0.5, {"val_loss": 0.6}) is None
        True
    """
    if monitor is None or logs is None:
        return None
    validated = any(name.startswith("val_") for name in logs)
    if monitor.startswith("val_") and not validated:
        return None  # an epoch that `validation_freq` leaves out
    if monitor not in logs:
        raise ValueError(
            f"Checkpoint: monitor={monitor!r} is not among this epoch's logs "
            f"({', '.join(sorted(logs))})"
        )
    value = float(logs[monitor])
    if best is None:
        return None if math.isnan(value) else value
    return value if (value > best if larger_is_better else value < best) else None
