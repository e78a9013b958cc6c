"""The checks around `fit`, `evaluate` and `predict` on every rank. Public Keras names only.

Ranks compare the data and callbacks they were given; the progress bar and callbacks that write
files run on rank 0 only, but for those that save an optimizer of which each rank has a part, and
those that a script has extended. dtk's callbacks run around the script's: before the first step all
ranks take rank 0's weights; after it and after every epoch they compare every weight bit for bit.
If ranks have diverged, `fit` stops and names the first variable that differs.
"""

from __future__ import annotations

import inspect
import operator
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, cast

import keras
import tensorflow as tf

from dtk.compat import keras_models, tf_replicas
from dtk.errors import at_rank, check_number
from dtk.even_division import even_sizes
from dtk.nests import Args, Function, Kwargs, Logs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.exchange_selection import ExchangeSelection
from dtk.trainer.ranks import rank_checks, shared_weights
from dtk.trainer.strategy import Strategy, tell

# Keras's own callbacks that write files or talk to a server: once per job, not once per rank.
WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# Callbacks of other packages, by package and class: each rank would begin a run, or a bar, anew.
TRACKERS = {
    ("mlflow", "MlflowCallback"),
    ("tqdm", "TqdmCallback"),
    ("wandb", "WandbMetricsLogger"),
}


# The expected value in words, the least value, and the arguments that it is expected of.
_COUNTS = (
    ("rows of all ranks, 1 or more", 1, ("batch_size", "validation_batch_size")),
    ("a number of steps, 1 or more", 1, ("steps_per_epoch", "validation_steps", "steps")),
    ("a number of epochs, 0 or more", 0, ("epochs", "initial_epoch")),
)


def call(
    trainer: DistributedTrainer, name: str, method: Function[object], args: Args, kwargs: Kwargs
) -> object:
    """Call one of Keras's own methods with the checks between ranks around it."""
    trainer.strategy.world.keep_to_thread()
    if trainer.is_local_call(name):
        with tf_replicas.as_only_replica():
            return method(*args, **kwargs)
    if name not in ("fit", "evaluate", "predict"):
        if name == "predict_on_batch" and trainer.takes_over:
            method = trainer.predict_on_batch
        return _on_batch(method, name, trainer, args, kwargs)
    bound, strategy = inspect.signature(method).bind(*args, **kwargs), trainer.strategy
    if name == "fit" and trainer.callbacks is not None:
        message = (
            f"fit of model {trainer.model.name!r} was called in a callback of a fit of the same "
            "model, whose data and counts it would take; call model.train_on_batch(x, y) there, "
            "or fit once the other is over"
        )
        raise RuntimeError(at_rank(strategy.rank, message))
    _check_numbers(name, bound.arguments, strategy)
    _check_callbacks(name, bound.arguments.get("callbacks"), strategy)
    _tell_of_idle(bound.arguments.get("batch_size"), strategy)
    strategy.meet(f"{name} begins")
    if name != "fit":
        return _evaluate_or_predict(method, name, trainer, bound)
    return _fit(method, trainer, bound)


def _tell_of_idle(rows: object, strategy: Strategy) -> None:
    """Print once that a batch has fewer rows than there are replicas."""
    whole, replicas = _whole(rows), strategy.num_replicas_in_sync
    idle = even_sizes(whole or replicas, replicas).count(0)
    if idle:
        text = f"batch_size={whole} leaves {idle} of {replicas} workers without rows in every step"
        tell(strategy, f"{text}; use {replicas} or more", once=True)


def _check_numbers(name: str, asked: dict[str, object], strategy: Strategy) -> None:
    """Refuse numbers that would make Keras fail later, or train nothing; make others Python's."""
    for expected, least, arguments in _COUNTS:
        for argument in arguments:
            value = asked.get(argument)
            if argument not in asked or (value is None and argument != "epochs"):
                continue
            whole = _whole(value)
            if whole is None or whole < least:
                told = f"{name} got {argument}={value!r}; expected {expected}"
                raise ValueError(at_rank(strategy.rank, told))
            asked[argument] = whole  # JSON, in which ranks report their steps, has no others
    if asked.get("validation_split"):
        expected = "a part of the rows, 0.0 up to but below 1.0"
        told = at_rank(strategy.rank, f"{name} got validation_split")
        check_number(told, asked["validation_split"], expected, lambda part: 0.0 <= part < 1.0)


def _check_callbacks(name: str, callbacks: object, strategy: Strategy) -> None:
    """Refuse objects that are not callbacks, such as a class in place of an instance."""
    for one in keras.tree.flatten(callbacks or []):
        if not hasattr(type(one), "set_model"):
            cure = f"; write {one.__name__}(...)" if isinstance(one, type) else ""
            message = (
                f"{name} got {one!r} in callbacks; expected instances of keras.callbacks.Callback"
            )
            raise ValueError(at_rank(strategy.rank, message + cure))


def _whole(value: object) -> int | None:
    """Return a whole number (Python's, NumPy's or a tensor) as an int; None for all else."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(SupportsIndex, value))
    except (TypeError, AttributeError):  # AttributeError: tensors of other types
        return None


def _fit(
    method: Function[object], trainer: DistributedTrainer, bound: inspect.BoundArguments
) -> object:
    """Call Keras's `fit` with the checks between ranks around it."""
    bound.apply_defaults()
    asked, strategy = bound.arguments, trainer.strategy
    trainer.before_fit(asked)
    if trainer.leaves_validation(asked):
        asked["validation_data"] = None
    callbacks = asked["callbacks"]
    listed = isinstance(callbacks, keras.callbacks.CallbackList)
    flat = list(callbacks.callbacks) if listed else keras.tree.flatten(callbacks or [])
    data = {"training data": data_of(asked), "validation data": asked["validation_data"]}
    every_batch = rank_checks.check_same_call(
        strategy,
        data if trainer.same_data else {},
        [one for one in flat if not _is_tracker(one)],  # which only log
    )
    trainer.synchronize_weights()
    strategy.shuffle_seed.begin_fit()
    first, last = BeforeCallbacks(trainer), RankChecks(trainer, every_batch, asked["initial_epoch"])
    mine = _on_this_rank(flat, strategy)
    if listed:  # built by the script
        mine = [one for one in mine if not isinstance(one, RankChecks | BeforeCallbacks)]
        for callback in (first, last):
            callback.set_model(trainer.model)
        callbacks.callbacks[:] = [first, *mine, last]
        params = {"epochs": asked["epochs"], "verbose": 0, **(callbacks.params or {})}
    else:
        shown = asked["verbose"] = asked["verbose"] if strategy.is_chief else 0
        if not _has(mine, keras.callbacks.History):
            mine = [*mine, keras.callbacks.History()]  # it runs before `last`
        # Where Keras would add its progress bar, and several replicas train, dtk's takes its place.
        several = strategy.num_replicas_in_sync > 1
        own_bar = shown != 0 and several and not _has(flat, keras.callbacks.ProgbarLogger)
        callbacks = keras.callbacks.CallbackList(
            [first, *mine, last, *([ProgressBar(trainer)] if own_bar else [])],
            add_history=True,
            add_progbar=shown != 0,
            model=trainer.model,
        )
        params = {"verbose": shown, "epochs": asked["epochs"]}
    callbacks.params = params  # which the feed tells them once it knows the steps, as Keras does
    asked["callbacks"] = trainer.callbacks = callbacks
    # Where each rank has a part of an optimizer, all ranks save.
    learn = [] if strategy.is_chief or strategy.shard_optimizer else mine
    try:
        with keras_models.saving_nothing(learn):
            history = method(*bound.args, **bound.kwargs)
        _share_best(flat, strategy)
        return history
    finally:
        notify(callbacks.callbacks, "on_fit_left")
        trainer.callbacks = None
        trainer.feed.end()
        trainer.end_call()


def _share_best(callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy) -> None:
    """Give every rank what rank 0's ModelCheckpoints have found, where its logs were others."""
    mine = [one for one in callbacks if isinstance(one, keras.callbacks.ModelCheckpoint)]
    of_chief = strategy.world.broadcast_object([one.best for one in mine])
    if len(of_chief) == len(mine):  # or this rank was given others
        for one, best in zip(mine, of_chief, strict=True):
            one.best = best


def _has(callbacks: Sequence[keras.callbacks.Callback], kind: type) -> bool:
    return any(isinstance(one, kind) for one in callbacks)


def data_of(asked: Mapping[str, object]) -> object:
    """Return the data that a call was given."""
    x = asked.get("x")
    others = [asked.get("y"), asked.get("sample_weight")]
    return x if all(other is None for other in others) else [x, *others]


def _evaluate_or_predict(
    method: Function[object],
    name: str,
    trainer: DistributedTrainer,
    bound: inspect.BoundArguments,
) -> object:
    """Call `evaluate` or `predict` with the checks between ranks around it."""
    asked, strategy = bound.arguments, trainer.strategy
    if not strategy.is_chief:
        asked["verbose"] = 0
    callbacks = asked.get("callbacks")
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        asked["callbacks"] = _on_this_rank(keras.tree.flatten(callbacks or []), strategy)
    trainer.synchronize_weights()
    # `fit` has compared the validation data, and compares the weights in every epoch.
    if trainer.callbacks is None:
        rank_checks.check_same_call(strategy, {"data": data_of(asked)})
        if trainer.model.built:
            shared_weights.agree_on_weights(trainer)
    try:
        with trainer.reading_of(name):
            return method(*bound.args, **bound.kwargs)
    finally:
        trainer.end_call()


def _on_batch(
    method: Function[object], name: str, trainer: DistributedTrainer, args: Args, kwargs: Kwargs
) -> object:
    """Take a single step: compare ranks before the first, and after steps 1, 2, 4, 8, ..."""
    trains = name == "train_on_batch"
    calls = trainer.calls[name] + 1
    looks = calls & (calls - 1) == 0
    if looks and trainer.takes_over:
        batch = {f"batch of {name}": [*args, *kwargs.values()]}
        rank_checks.check_same_call(trainer.strategy, batch if trainer.same_data else {})
    if calls == 1 or not trains:
        trainer.synchronize_weights()
    if calls == 1 and trainer.model.built:
        shared_weights.agree_on_weights(trainer)
    if trains:
        shared_weights.divide_windows(trainer)
        trainer.recorder.begin()
    try:
        result = method(*args, **kwargs)
    finally:
        trainer.end_call()
    if trains:
        trainer.recorder.end()
    trainer.calls[name] = calls
    if looks and trainer.strategy.num_replicas_in_sync > 1 and not trainer.has_local_steps:
        shared_weights.check_same_weights(trainer, f"after call {calls} of {name}")
    return result


def _on_this_rank(
    callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy
) -> list[keras.callbacks.Callback]:
    """Select the callbacks of this rank: all on rank 0; elsewhere none that write or print.

    Those that save are kept where each rank has a part of what is saved: all ranks gather it.
    Others may read the `best` of a ModelCheckpoint, which learns it on every rank.
    """
    if strategy.processes > 1 and any(type(one).__name__ == "OrbaxCheckpoint" for one in callbacks):
        message = (
            f"OrbaxCheckpoint on {strategy.processes} processes: each would write the same files; "
            "use dtk.callbacks.Checkpoint, or Keras's ModelCheckpoint or BackupAndRestore, whose "
            "files rank 0 writes"
        )
        raise ValueError(at_rank(strategy.rank, message))
    swaps = any(isinstance(one, keras.callbacks.SwapEMAWeights) for one in callbacks)
    if swaps and strategy.shard_optimizer:
        message = (
            "SwapEMAWeights exchanges a model's weights and their averages, and with "
            "shard_optimizer=True each rank has a part of these: leave the callback out, which "
            "leaves the averages to the end of fit, or make the strategy without shard_optimizer"
        )
        raise ValueError(at_rank(strategy.rank, message))
    if strategy.is_chief:
        return list(callbacks)
    kept = rank_checks.SAVERS if strategy.shard_optimizer else keras.callbacks.ModelCheckpoint
    mine = [
        one
        for one in callbacks
        if isinstance(one, kept)
        or _is_extended(one)
        or not (is_writer(one) or isinstance(one, keras.callbacks.ProgbarLogger))
    ]
    for one in mine:
        if isinstance(one, keras.callbacks.ModelCheckpoint):
            one.verbose = 0
        if isinstance(one, keras.callbacks.CSVLogger):
            one.filename = os.devnull
        if isinstance(one, keras.callbacks.TensorBoard):  # what it writes here nobody reads
            one.log_dir = tempfile.mkdtemp(prefix="dtk-tensorboard-")
            weakref.finalize(one, shutil.rmtree, one.log_dir, ignore_errors=True)
    return mine


def _is_extended(callback: keras.callbacks.Callback) -> bool:
    """Return whether a script has extended a callback that writes: it may call `predict`, too."""
    return isinstance(callback, WRITERS) and type(callback) not in WRITERS


def is_writer(callback: keras.callbacks.Callback) -> bool:
    """Return whether a callback writes what it is told, and changes nothing of the training."""
    return isinstance(callback, WRITERS) or _is_tracker(callback)


def _is_tracker(callback: keras.callbacks.Callback) -> bool:
    kind = type(callback)  # an extended one may change the training
    return (kind.__module__.partition(".")[0], kind.__name__) in TRACKERS


# Callbacks around the script's.


def notify(callbacks: Sequence[keras.callbacks.Callback], event: str, *args: object) -> None:
    """Call a method of the callbacks that define it."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(*args)


class BeforeCallbacks(keras.callbacks.Callback):
    """Callback before the user's, so that theirs see the weights and logs of all ranks."""

    def __init__(self, trainer: DistributedTrainer):
        super().__init__()
        self.trainer = trainer

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Tell callbacks that a step is next, which none of them has begun."""
        notify(self.trainer.callbacks.callbacks, "on_before_train_batch", batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Note that a step has ended, before other callbacks take their time."""
        self.trainer.recorder.end(batch, logs)
        if batch + 1 == self.params.get("steps"):
            self.trainer.recorder.end_steps()

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Note that validation begins, and tell callbacks, none of which has begun it."""
        self.trainer.recorder.end_steps()
        notify(self.trainer.callbacks.callbacks, "on_before_test")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Average the weights of replicas with local steps, and logged numbers that differ."""
        self.trainer.recorder.end_steps()
        shared_weights.join_windows(self.trainer)
        if not self.trainer.has_local_steps and self.trainer.same_data:
            return
        self.trainer.synchronize_weights()
        logs = {} if logs is None else logs
        # Callbacks may have added other objects, which perhaps cannot be sent.
        numbers = {name: value for name, value in logs.items() if isinstance(value, float | int)}
        gathered = self.trainer.strategy.world.allgather_object(numbers)
        for name in {name: None for one in gathered for name in one}:
            values = [one[name] for one in gathered if name in one]
            if isinstance(values[0], float):
                logs[name] = values[0] if len(set(values)) == 1 else sum(values) / len(values)


class RankChecks(keras.callbacks.Callback):
    """Callback after the user's: if one of them stops training on one rank, all ranks stop.

    A callback that must run after or before all others, such as one that saves their state, defines

        on_epoch_started(epoch)         every on_epoch_begin has run
        on_before_train_batch(batch)    the step before is over, and no on_train_batch_begin has run
        on_before_test()                no on_test_begin of this validation has run
        on_train_agreed(logs)           every on_train_begin has run and the ranks start equal
        on_epoch_agreed(epoch, logs)    every on_epoch_end has run and the ranks agree on stopping
        on_end_agreed(logs)             every on_train_end has run: training ended without exception
        on_fit_left()                   `fit` is over, or was left by an exception
    """

    def __init__(self, trainer: DistributedTrainer, every_batch: bool, initial_epoch: object):
        super().__init__()
        self.trainer = trainer
        self._initial_epoch = initial_epoch
        self._every_batch = every_batch
        self._wishes_to_stop = False
        self._steps = self._asks_at = 0
        self._pause, self._asked = 1, (0, 0.0)  # steps until ranks ask again; when they last did
        self._selection = ExchangeSelection(trainer)

    @property
    def _alone(self) -> bool:
        return self.trainer.strategy.world.size == 1

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Compare ranks, then start from rank 0's weights, optimizer state and epoch."""
        trainer = self.trainer
        trainer.strategy.meet("training begins")
        if not self._alone:
            told = {**self.params, "initial_epoch": self._initial_epoch}
            rank_checks.check_same_run(trainer, told)
            shared_weights.start_from(0, trainer, trainer.agreed_variables())
            model = trainer.model
            epoch = trainer.strategy.world.broadcast_object(keras_models.initial_epoch(model))
            keras_models.set_initial_epoch(model, epoch)
        notify(trainer.callbacks.callbacks, "on_train_agreed", logs)
        self._selection.begin()
        self._wishes_to_stop = False
        self._steps = self._asks_at = 0
        self._pause, self._asked = 1, (0, time.monotonic())

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Shuffle the data anew, in the same order on every rank; agree on stopping."""
        notify(self.trainer.callbacks.callbacks, "on_epoch_started", epoch)
        self.trainer.strategy.meet(f"epoch {epoch + 1} begins")
        self._agree_on_stopping()
        shared_weights.divide_windows(self.trainer)
        self.trainer.feed.show_learned_steps()
        self.trainer.new_epoch(epoch)
        self.trainer.feed.shuffle(epoch)
        self.trainer.check_same_reads(f"before epoch {epoch + 1}")
        self.trainer.recorder.begin_epoch(epoch, self.params["epochs"])

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Read the clocks after all other callbacks, to leave their time out."""
        self._selection.begin_step(batch)
        self.trainer.recorder.begin(batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Check after the first step that all ranks have the same weights; agree on stopping."""
        self._selection.end_step(batch, logs)
        if not self._steps and not self.trainer.has_local_steps:
            self._check("after the first step")
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self.trainer.check_same_reads(f"after step {self._steps}")
            if self._steps > 1:
                self.trainer.check_same_reading("train", f"after step {self._steps}")
        if self._every_batch or self._steps >= self._asks_at:
            self._agree_on_stopping()
        elif not (self._alone or self.trainer.stop_agreed):
            # Keras would stop here, and the other ranks do not know of it.
            self._take_wish()
        if self.model.stop_training:
            self.trainer.flush()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compare weights and batches; stop all ranks if one wants to stop."""
        self.trainer.strategy.meet(f"epoch {epoch + 1} ends")
        self.trainer.flush()
        self.trainer.check_same_reading("train", f"after epoch {epoch + 1}")
        self.trainer.check_same_reads(f"after epoch {epoch + 1}")
        self.trainer.settle_counts()
        self._check(f"after epoch {epoch + 1}")
        self._agree_on_stopping()
        self._selection.end_epoch()
        self.trainer.recorder.end_epoch(logs)
        notify(self.trainer.callbacks.callbacks, "on_epoch_agreed", epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Compare the weights a last time, and tell callbacks that they no longer change."""
        self._check("after on_train_end of the callbacks")
        notify(self.trainer.callbacks.callbacks, "on_end_agreed", logs)

    def _check(self, when: str) -> None:
        if self.trainer.takes_over:
            shared_weights.check_same_weights(self.trainer, when)

    def _take_wish(self) -> None:
        self._wishes_to_stop |= self.model.stop_training
        self.model.stop_training = False

    def _agree_on_stopping(self) -> None:
        """Stop all ranks if one wants to; agree on the step after which they ask again.

        A signal's handler or a thread may wish it at any time: ranks ask about once a second.
        """
        if self._alone:
            return
        world, now = self.trainer.strategy.world, time.monotonic()
        steps, since = self._asked
        if self._steps > steps:
            in_a_second = round((self._steps - steps) / max(now - since, 1e-6))
            # At most doubled: the first steps tell little about how long the others take.
            self._pause = max(1, min(2 * self._pause, in_a_second))
        self._take_wish()
        # This may run after every batch, so it sends two small numbers, not an object.
        mine = [int(self._wishes_to_stop), self._pause if world.rank == 0 else 0]
        agreed, self._pause = world.allreduce(tf.constant(mine), "max").numpy().tolist()
        self._take_wish()  # one that came meanwhile waits for the next time
        self._asked, self._asks_at = (self._steps, now), self._steps + self._pause
        self.model.stop_training = self.trainer.stop_agreed = bool(agreed)


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
        rows = self.trainer.feed.rows_between(before, steps)
        if rows is not None and now > since:
            self.progbar.unit_name = f"step, {rows / (now - since):,.0f} samples/s"
        super().on_train_batch_end(batch, logs)
