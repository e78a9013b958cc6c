"""Collecting what a checkpoint holds, and writing it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import keras
import numpy as np

from dtk.callbacks.checkpointing import state as states
from dtk.callbacks.checkpointing.background import Background
from dtk.callbacks.checkpointing.best import BestValue
from dtk.callbacks.checkpointing.files import CheckpointFiles
from dtk.callbacks.checkpointing.model_state import (
    copies_of,
    describe,
    exchange_of,
    fold_accumulators,
    iterations_of,
    parts_of,
    value_of,
)
from dtk.callbacks.checkpointing.weights_file import MemoryFile, save_weights
from dtk.communicators.root import on_root
from dtk.compat import tf_replicas
from dtk.errors import CheckpointSaveError
from dtk.exchange.state import SavedItem
from dtk.nests import Array, Logs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.model_state import ModelState
from dtk.trainer.replica.replica_step import metric_variables
from dtk.trainer.strategy import Strategy

T = TypeVar("T")


def on_chief(strategy: Strategy, work: Callable[[], T]) -> T:
    """Do work on rank 0, and return its result on every rank. All ranks call it together."""

    def alone() -> T:
        # Summed state is read as it is there, without waiting for the others.
        with getattr(strategy.extended, "local_reads", contextlib.nullcontext)():
            return work()

    return on_root(strategy.world, alone)


class TrainingProgress(NamedTuple):
    """Progress of training when a checkpoint is written."""

    epoch: int  # the epoch to resume at, from 0
    step: int  # steps of that epoch that are done
    in_epoch: bool  # whether Keras is between two of its steps
    logs: Logs | None = None  # the numbers of an epoch that is over; None before
    # the numbers of an epoch of which only the validation is left; else None
    trained: Logs | None = None


class NotFiniteError(Exception):
    """Error of a model whose weights are not worth keeping; the message names them."""


class CheckpointWriter:
    """Writes checkpoints to one directory."""

    def __init__(
        self,
        files: CheckpointFiles,
        max_to_keep: int | None,
        best: BestValue,
        background: Background | None = None,
    ):
        self._files, self._max_to_keep, self._best = files, max_to_keep, best
        self._background = background

    def save(self, trainer: DistributedTrainer, progress: TrainingProgress) -> str:
        """Write one checkpoint. All ranks call it together: some state is spread over them.

        With a `background`, it is copied, and written later; the one before has been finished.
        """
        trainer.flush()
        fold_accumulators(trainer)
        parts = parts_of(trainer)
        if parts is not None:
            if trainer.strategy.is_chief:
                parts.build()
            parts.gather()
        metrics = None
        if progress.in_epoch and progress.step:
            metrics = [value_of(v) for v in metric_variables(trainer.model)]
        exchange, best = exchange_of(trainer), self._best
        note: dict[str, object] | None = None
        if best.improves(progress.logs):
            note = {"epoch": progress.epoch, "monitor": best.monitor, "value": best.value}

        def write() -> str:
            arrays: dict[str, Array] = {}
            whole: ModelState = trainer
            if parts is not None and parts.whole is not None:
                whole = ModelState(parts.whole, trainer.strategy)
            _check_finite(whole.model)
            state = self._state(trainer, whole, progress, metrics, exchange)
            packed = {key: states.pack(value, arrays) for key, value in state.items()}
            if self._background is None:
                model = whole.model
                return self._write(lambda path: save_weights(model, path), packed, arrays, note)
            weights = MemoryFile()
            keras.Model.save_weights(whole.model, weights)
            # An array of a callback's own may change while it is written.
            copies = {name: np.array(array) for name, array in arrays.items()}
            name = self._files.next_name()
            self._background.start(
                name,
                lambda: self._write(
                    lambda path: _put(path, weights.getbuffer()), packed, copies, note
                ),
            )
            return name

        return on_chief(trainer.strategy, write)

    def _state(
        self,
        trainer: DistributedTrainer,
        whole: ModelState,
        progress: TrainingProgress,
        metrics: list[Array] | None,
        exchange: dict[str, SavedItem],
    ) -> states.CheckpointState:
        """Collect what rank 0 knows by itself."""
        model, strategy = trainer.model, trainer.strategy
        return {
            "format": states.FORMAT,
            "workers": strategy.size,
            "iterations": iterations_of(model),
            "variables": describe(whole),
            "best": self._best.value,
            "stopped": bool(model.stop_training),
            "seeds": [copies_of(v, strategy)[0] for v in whole.seed_states()],
            "callbacks": states.of_callbacks(trainer.callbacks.callbacks),
            "random": states.of_generators(),
            "tensorflow_seed": tf_replicas.global_seed(),
            "shuffle_seed": strategy.shuffle_seed.value,
            "data": trainer.feed.position(progress.in_epoch),
            "epoch": progress.epoch,
            "step": progress.step,
            "metrics": metrics,
            "trained": progress.trained,
            "exchange": exchange,
        }

    def _write(
        self,
        save_weights: Callable[[str], object],
        state: dict[str, states.Packed],
        arrays: dict[str, Array],
        note: dict[str, object] | None,
    ) -> str:
        files, name = self._files, None
        try:
            name = files.write(save_weights, state, arrays)
            if note is not None:
                files.keep_best(name, note)
            files.prune(self._max_to_keep)
        except OSError as error:
            what = "no checkpoint" if name is None else f"{name}, but not all beside it,"
            newest = next(iter(files.names()), None)
            kept = f"the newest one is {newest}" if newest else "there is none yet"
            raise CheckpointSaveError(
                f"{files.directory}: {what} was written, {kept}: {error}"
            ) from error
        return name


def _put(path: str, content: memoryview) -> None:
    with open(path, "xb") as file:
        file.write(content)


def _check_finite(model: keras.Model) -> None:
    paths = [
        variable.path
        for variable in model.trainable_variables
        if not np.all(np.isfinite(value_of(variable)))
    ]
    if paths:
        named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
        raise NotFiniteError(f"{named} hold NaN or infinite numbers")
