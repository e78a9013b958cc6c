"""Choosing a checkpoint to resume from, and giving a model what it holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import cast

import keras
import tensorflow as tf

from dtk.callbacks.checkpointing import state as states
from dtk.callbacks.checkpointing.files import STATE, CheckpointFiles, CorruptCheckpointError
from dtk.callbacks.checkpointing.model_state import (
    accumulators_of,
    check_same_counts,
    check_same_model,
    copies_of,
    describe,
    give_to_first,
    restore_exchange,
)
from dtk.compat import tf_replicas
from dtk.errors import CheckpointFormatError
from dtk.layers.whole import ModelInParts
from dtk.nests import Array
from dtk.parameter_server import evaluator
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import seeds, shared_weights


class CheckpointReader:
    """Reads the checkpoints of one directory."""

    def __init__(self, files: CheckpointFiles):
        self._files = files

    def load_newest(
        self,
        trainer: DistributedTrainer,
        resume: bool = True,
        parts: ModelInParts | None = None,
    ) -> tuple[str, states.CheckpointState] | None:
        """Load the newest readable checkpoint's weights into the model; on rank 0 alone.

        What an earlier process left half written is removed first.
        """
        self._files.clear_unfinished()
        names = self._files.names() if resume else []
        if not names:
            return None
        name, (packed, arrays) = self._newest_readable(names)
        path = self._files.directory / name
        state: ModelState = (
            trainer if parts is None else ModelState(parts.build(), trainer.strategy)
        )
        check_same_model(packed["variables"], describe(state), path)
        check_same_counts(packed, state, path)
        state.model.load_weights(self._files.weights(name))
        # The keys stay, and arrays take the places of their names.
        loaded = cast(states.CheckpointState, states.unpack(packed, arrays))
        if parts is not None:
            for variable, value in zip(state.seed_states(), loaded["seeds"], strict=True):
                variable.assign(value)
        return name, loaded

    def _newest_readable(
        self, names: list[str]
    ) -> tuple[str, tuple[states.CheckpointState, dict[str, Array]]]:
        corrupt: list[str] = []
        for name in names:
            try:
                found = self._files.read(name)
                _check(found[0], self._files.directory / name)
            except CorruptCheckpointError as error:
                corrupt.append(f"{self._files.directory / name}: {error}")
                continue
            if corrupt:
                warnings.warn(
                    f"corrupt checkpoint ({'; '.join(corrupt)}); going back to "
                    f"{self._files.directory / name}",
                    stacklevel=2,
                )
            return name, found
        raise ValueError(
            f"no checkpoint can be read ({'; '.join(corrupt)}); remove {self._files.directory} or "
            "give resume=False to start afresh"
        )

    def load_weights(self, model: keras.Model, name: str) -> evaluator.SavedProgress | None:
        """Load the weights of a checkpoint into a model that will not be trained."""
        trainer = trainer_of(model)
        assert trainer is not None
        try:
            packed, _ = self._files.read(name)
            count, path = len(model.weights), self._files.directory / name
            _check(packed, path)
            check_same_model(packed["variables"][:count], describe(trainer)[:count], path)
            evaluator.quietly_load(model, self._files.weights(name))
        except (CorruptCheckpointError, FileNotFoundError):
            if name in self._files.names():
                raise
            return None
        return evaluator.SavedProgress(packed["epoch"], packed["step"], packed.get("iterations"))


def _check(state: states.CheckpointState, path: Path) -> None:
    """Refuse values that cannot be, and what a newer dtk has written.

    An older checkpoint in the place of a newer dtk's would lose steps.
    """
    given = state.get("format")
    if not isinstance(given, int) or given < 1:
        raise CorruptCheckpointError(f"{STATE}: format is {given!r:.60}, expected 1 or more")
    if given > states.FORMAT:
        raise CheckpointFormatError(
            f"{path} has format {given}, and this dtk reads {states.FORMAT} at most; "
            "resume with the dtk that wrote it or a newer one, or give another directory"
        )
    try:
        states.check(state)
    except ValueError as error:
        raise CorruptCheckpointError(f"{STATE}: {error}") from None


def restore(
    state: states.CheckpointState,
    trainer: DistributedTrainer,
    epochs: int,
    parts: ModelInParts | None = None,
) -> None:
    """Restore everything but the weights, which rank 0 has loaded. All ranks call it together."""
    strategy = trainer.strategy
    if parts is not None:
        parts.scatter(strategy.world)
    shared_weights.start_from(0, trainer)
    for variable in accumulators_of(trainer):
        give_to_first(variable, copies_of(variable, strategy)[0], strategy)
    restore_exchange(trainer, state.get("exchange", {}))
    if parts is None:
        for variable, value in zip(trainer.seed_states(), state["seeds"], strict=True):
            variable.assign(value)
    seeds.spread_seeds(trainer)
    states.to_callbacks(state["callbacks"], trainer.callbacks.callbacks)
    states.to_generators(state["random"])
    _restore_seeds(state, trainer)
    if state["stopped"]:
        trainer.set_initial_epoch(max(state["epoch"], epochs))
        return
    trainer.set_initial_epoch(state["epoch"])
    if state["trained"] is None:
        trainer.feed.resume_at(state["step"], state["data"])
    else:
        trainer.feed.resume_after_steps(state["trained"], state["data"])


def _restore_seeds(state: states.CheckpointState, trainer: DistributedTrainer) -> None:
    strategy = trainer.strategy
    if strategy.shuffle_seed.value is not None and state["shuffle_seed"] is not None:
        strategy.shuffle_seed.restore(state["shuffle_seed"], in_force=state["tensorflow_seed"])
    if state["tensorflow_seed"] not in (None, tf_replicas.global_seed()):
        tf.random.set_seed(state["tensorflow_seed"])
        trainer.feed.set_batches(trainer.feed.iterator.data_adapter)


def resume_message(state: states.CheckpointState, epochs: int, path: Path) -> str:
    """Return the line that says where training goes on."""
    if state["stopped"]:
        return f"a callback had stopped training after epoch {state['epoch']} ({path})"
    if state["epoch"] >= epochs:
        return f"training had finished, epoch {state['epoch']} of {epochs} ({path})"
    step = f", step {state['step'] + 1}," if state["step"] else ""
    step = step if state["trained"] is None else ", validation,"
    return f"resuming at epoch {state['epoch'] + 1}/{epochs}{step} from {path}"
