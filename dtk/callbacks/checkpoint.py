"""Checkpoints that any number of workers can resume from."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from dtk.callbacks import state as states
from dtk.callbacks.base import StrategyCallback
from dtk.callbacks.checkpoint_files import CheckpointFiles, CorruptCheckpointError
from dtk.callbacks.checkpoint_state import (
    accumulators_of,
    better_when_larger,
    check_same_counts,
    check_same_model,
    copies_of,
    describe,
    fold_accumulators,
    give_to_first,
    iterations_of,
    value_of,
)
from dtk.callbacks.termination import EXIT_CODE, Termination
from dtk.communicators.root import on_root
from dtk.compat import tf_replicas
from dtk.parameter_server import evaluator
from dtk.trainer import seeds, shared_weights
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.replica_step import metric_variables

_FORMAT = 1


class Checkpoint(StrategyCallback):
    """Save training, and go on from where it was: rank 0 reads and writes, all ranks agree.

    Restored are weights, the optimizer's state and its rate, the epoch and the step within it, what
    Keras's EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and History have learned, any callback
    that has `get_state()` and `set_state(state)`, dropout seeds, and the random state of Python,
    numpy and TensorFlow's seed. Values travel by broadcast, so only rank 0 needs to see the
    directory. A checkpoint says nothing about how many workers wrote it: any number can resume.

    A resumed run ends with the weights of an uninterrupted one when its data is arrays, or a
    `tf.data` pipeline whose order depends on seeds and on how often it was iterated, and
    `keras.utils.set_random_seed` was called. What cannot be restored: the position of generators,
    the order of a shuffling `PyDataset`, and the state of `tf.random` ops inside a step or a
    pipeline. A step within an epoch is resumed by passing over the batches before it.

    Files never lie half written (see `dtk.callbacks.checkpoint_files`). On SIGTERM all ranks save
    at the same step, within about a second, and exit with code 143, so that a scheduler can start
    the job again. During `fit`'s validation they save what training has reached; resuming begins
    that validation anew. Nothing is saved when a single step, or what another callback does between
    two, takes more than 20 seconds.

    A `fit` that is called again with the same callback goes on with the model in memory; give every
    `fit` that must be resumable a directory of its own.

    Args:
        directory: Where checkpoints lie.
        save_freq: "epoch", or a number of steps (checked once per execution when
            `steps_per_execution` is larger than 1).
        max_to_keep: How many to keep, older ones are removed; None keeps all.
        monitor: A number in the epoch's logs, such as "val_loss"; the best epoch's weights are
            copied to `best.weights.h5` in the directory, for `model.load_weights`.
        mode: "min" or "max"; "auto" decides by the name.
        resume: Whether to go on from the newest checkpoint; an empty directory starts afresh.
        save_on_sigterm: Whether to catch SIGTERM during `fit`.

    Raises:
        ValueError: An argument is out of range; at train begin, when the checkpoint belongs to
            another model, or none in the directory can be read.

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
        directory: str | os.PathLike,
        save_freq: str | int = "epoch",
        max_to_keep: int | None = 5,
        monitor: str | None = None,
        mode: str = "auto",
        resume: bool = True,
        save_on_sigterm: bool = True,
    ):
        super().__init__()
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq >= 1):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of steps (1 or more), got {save_freq!r}"
            )
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None for all, got {max_to_keep}")
        self.files = CheckpointFiles(directory)
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self.monitor = monitor
        self.larger_is_better = monitor is not None and better_when_larger(monitor, mode)
        self.best: float | None = None
        self.resume = resume
        self.save_on_sigterm = save_on_sigterm
        self._begun = self._fitting = False
        self._termination: Termination | None = None
        self._metrics: list | None = None
        self._trained: dict | None = None
        self._initial_epoch: int | None = None

    # Resuming.

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Catch SIGTERM."""
        self._fitting, self._initial_epoch = True, self.trainer.initial_epoch()
        self._epoch = self._since_save = self._last_step = self._resumed_step = 0
        self._trained = None
        if self.save_on_sigterm:
            self._termination = Termination(self.strategy.communicator)
            self._termination.install()

    def on_train_agreed(self, logs: dict | None = None) -> None:
        """Resume, now that the other callbacks have begun: that resets what they learned."""
        if self._begun:
            return
        self._begun = True
        loaded = self._on_chief(self._load)
        if loaded is not None:
            name, state = loaded
            self._restore(state)
            self._tell(name, state)

    def _load(self) -> tuple[str, dict] | None:
        """Rank 0: weights into the model, the rest for everyone."""
        self.files.clear_unfinished()
        names = self.files.names() if self.resume else []
        if not names:
            return None
        name, (packed, arrays) = self._newest_readable(names)
        path = self.files.directory / name
        check_same_model(packed["variables"], describe(self.trainer), path)
        check_same_counts(packed, self.trainer, path)
        self.model.load_weights(self.files.weights(name))
        return name, states.unpack(packed, arrays)

    def _newest_readable(self, names: list[str]) -> tuple[str, tuple[dict, dict]]:
        corrupt: list[str] = []
        for name in names:
            try:
                found = self.files.read(name)
            except CorruptCheckpointError as error:
                corrupt.append(f"{self.files.directory / name}: {error}")
                continue
            if corrupt:
                warnings.warn(
                    f"corrupt checkpoint ({'; '.join(corrupt)}); going back to "
                    f"{self.files.directory / name}",
                    stacklevel=2,
                )
            return name, found
        raise ValueError(
            f"no checkpoint can be read ({'; '.join(corrupt)}); remove {self.files.directory} or "
            "give resume=False to start afresh"
        )

    def _restore(self, state: dict) -> None:
        """All ranks: everything but the weights, which rank 0 has."""
        trainer = self.trainer
        shared_weights.start_from(0, trainer)
        for variable in accumulators_of(trainer):
            give_to_first(variable, copies_of(variable, self.strategy)[0], self.strategy)
        trainer.restore_exchange(state.get("exchange", {}))
        for variable, value in zip(trainer.seed_states(), state["seeds"], strict=True):
            variable.assign(value)
        seeds.spread_seeds(trainer)
        states.to_callbacks(state["callbacks"], trainer.callbacks.callbacks)
        states.to_generators(state["random"])
        if self.strategy.shuffle_seed is not None and state["shuffle_seed"] is not None:
            self.strategy.shuffle_seed = state["shuffle_seed"]
            self.strategy.seed_in_force = state["tensorflow_seed"]
        if state["tensorflow_seed"] not in (None, tf_replicas.global_seed()):
            tf.random.set_seed(state["tensorflow_seed"])
            trainer.feed.set_batches(trainer.feed.iterator.data_adapter)
        self._metrics, self._resumed_step = state["metrics"], state["step"]
        self.best, self._trained = state["best"], state["trained"]
        if state["stopped"]:
            trainer.set_initial_epoch(max(state["epoch"], self.params["epochs"]))
            return
        trainer.set_initial_epoch(state["epoch"])
        if self._trained is None:
            trainer.feed.resume_at(state["step"], state["data"])
        else:
            trainer.feed.resume_after_steps(self._trained, state["data"])

    def _tell(self, name: str, state: dict) -> None:
        epochs, path = self.params["epochs"], self.files.directory / name
        if state["stopped"]:
            self.say(f"a callback had stopped training after epoch {state['epoch']} ({path})")
        elif state["epoch"] >= epochs:
            self.say(f"training had finished, epoch {state['epoch']} of {epochs} ({path})")
        else:
            step = f", step {state['step'] + 1}," if state["step"] else ""
            step = step if state["trained"] is None else ", validation,"
            self.say(f"resuming at epoch {state['epoch'] + 1}/{epochs}{step} from {path}")

    # Saving. Between steps means at the begin of a batch: the step before it is complete on every
    # rank, and Keras need not wait for a step's logs.

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Put back the metrics of an epoch that is resumed in its middle."""
        self._epoch, self._last_step, self._resumed_step = epoch, self._resumed_step, 0
        if self._metrics:
            for variable, value in zip(metric_variables(self.model), self._metrics, strict=True):
                variable.assign(value)
        self._metrics = None

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Save between two steps."""
        self._since_save += batch - self._last_step
        self._last_step = batch
        ending = self._termination is not None and self._termination.wanted_after_step()
        if ending or (self._due() and batch):
            self._save(self._epoch, batch, in_epoch=True)
        if ending:
            self._exit()

    def on_test_begin(self, logs: dict | None = None) -> None:
        """Note what training said in this epoch, which validation is about to forget."""
        if self._termination is not None:
            self._termination.find_pace()
            if self._trained is None:
                results = self.model.get_metrics_result()
                self._trained = {name: value_of(value) for name, value in results.items()}

    def on_test_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Save during validation, which changes nothing of what is saved."""
        if self._termination is not None and self._termination.wanted_after_step():
            # Whoever put other weights into the model to validate them takes them out again.
            self.trainer.callbacks.on_test_end(self.model.get_metrics_result())
            steps = self.trainer.feed.iterator.num_batches or 0
            self._save(self._epoch, steps, in_epoch=False, trained=self._trained)
            self._exit()

    def on_epoch_agreed(self, epoch: int, logs: dict | None = None) -> None:
        """Save after an epoch, when all callbacks have seen it."""
        steps = self.trainer.feed.iterator.num_batches
        self._since_save += max(0, (steps or 0) - self._last_step)
        ending = self._termination is not None and self._termination.wanted()
        if self._termination is not None and self._trained is not None:
            self._termination.find_pace()
        self._trained = None
        last = self.model.stop_training or epoch + 1 >= self.params["epochs"]
        if ending or last or self._due() or self.save_freq == "epoch":
            self._save(epoch + 1, 0, in_epoch=False, logs=logs)
        if ending:
            self._exit()

    def on_fit_left(self) -> None:
        """Give SIGTERM back, and let a later `fit` start where it is told to."""
        if self._termination is not None:
            self._termination.remove()
            self._termination = None
        if self._fitting:
            self._fitting = False
            self.trainer.set_initial_epoch(self._initial_epoch)

    def _due(self) -> bool:
        return isinstance(self.save_freq, int) and self._since_save >= self.save_freq

    def _save(
        self,
        epoch: int,
        step: int,
        in_epoch: bool,
        logs: dict | None = None,
        trained: dict | None = None,
    ) -> None:
        """All ranks together: some of the state is spread over them.

        Args:
            epoch: Where to resume.
            step: Steps of that epoch that are done.
            in_epoch: Whether Keras is between two of its steps.
            logs: The numbers of an epoch that is over.
            trained: Those of an epoch of which only the validation is left.
        """
        self._since_save = 0
        self.trainer.flush()
        fold_accumulators(self.trainer)
        metrics = [value_of(v) for v in metric_variables(self.model)] if in_epoch and step else None
        exchange = self.trainer.exchange_state()
        better = self._is_better(logs)
        note = {"epoch": epoch, "monitor": self.monitor, "value": self.best} if better else None

        def write() -> str:
            arrays: dict[str, np.ndarray] = {}
            state = {**self._state(in_epoch), "epoch": epoch, "step": step}
            state |= {"metrics": metrics, "trained": trained, "exchange": exchange}
            return self._write(states.pack(state, arrays), arrays, note)

        self._last = self._on_chief(write)

    def _state(self, in_epoch: bool) -> dict:
        """What rank 0 knows by itself."""
        trainer, strategy = self.trainer, self.strategy
        return {
            "format": _FORMAT,
            "workers": strategy.size,
            "iterations": iterations_of(self.model),
            "variables": describe(trainer),
            "best": self.best,
            "stopped": bool(self.model.stop_training),
            "seeds": [copies_of(v, strategy)[0] for v in trainer.seed_states()],
            "callbacks": states.of_callbacks(trainer.callbacks.callbacks),
            "random": states.of_generators(),
            "tensorflow_seed": tf_replicas.global_seed(),
            "shuffle_seed": strategy.shuffle_seed,
            "data": trainer.feed.position(in_epoch),
        }

    def _write(self, state: dict, arrays: dict, best: dict | None) -> str:
        name = self.files.write(self.model.save_weights, state, arrays)
        if best is not None:
            self.files.keep_best(name, best)
        self.files.prune(self.max_to_keep)
        return name

    def _is_better(self, logs: dict | None) -> bool:
        if self.monitor is None or logs is None:
            return False
        if self.monitor not in logs:
            raise ValueError(
                f"Checkpoint: monitor={self.monitor!r} is not among this epoch's logs "
                f"({', '.join(sorted(logs))})"
            )
        value = float(logs[self.monitor])
        if math.isnan(value) or (
            self.best is not None
            and (value <= self.best if self.larger_is_better else value >= self.best)
        ):
            return False
        self.best = value
        return True

    # Evaluating beside the training; see `dtk.parameter_server.evaluator`.

    @property
    def directory(self) -> Path:
        """Where the checkpoints lie."""
        return self.files.directory

    def appeared(self, seen: Collection[str]) -> list[str]:
        """Checkpoints that are not in `seen`, oldest first."""
        return [name for name in reversed(self.files.names()) if name not in seen]

    def load_weights(self, model: Any, name: str) -> evaluator.Saved | None:
        """Give a model the weights of a checkpoint; None when it is not there any more.

        Raises:
            CorruptCheckpointError: It is not what was written.
            ValueError: It belongs to another model.
        """
        trainer = trainer_of(model)
        assert trainer is not None
        try:
            packed, _ = self.files.read(name)
            count, path = len(model.weights), self.files.directory / name
            check_same_model(packed["variables"][:count], describe(trainer)[:count], path)
            evaluator.quietly_load(model, self.files.weights(name))
        except (CorruptCheckpointError, FileNotFoundError):
            if name in self.files.names():
                raise
            return None
        return evaluator.Saved(packed["epoch"], packed["step"], packed.get("iterations"))

    def _exit(self) -> None:
        self.say(f"SIGTERM: saved {self.files.directory / self._last}; start again to resume")
        raise SystemExit(EXIT_CODE)

    def _on_chief(self, work: Callable[[], Any]) -> Any:
        """Rank 0 does it; everyone gets the result, or the error."""

        def alone() -> Any:
            with _alone(self.strategy):
                return work()

        return on_root(self.strategy.communicator, alone)


@contextlib.contextmanager
def _alone(strategy: Any) -> Iterator[None]:
    """For code of one rank: reading summed state must not wait for the others."""
    with getattr(strategy.extended, "local_reads", contextlib.nullcontext)():
        yield
