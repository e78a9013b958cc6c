"""Choosing a checkpoint to resume from, and giving a model what it holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import cast

import keras
import tensorflow as tf

from dtk.callbacks.checkpointing import checkpoint_state as states
from dtk.callbacks.checkpointing.checkpoint_files import (
    STATE,
    CheckpointFiles,
    CorruptCheckpointError,
)
from dtk.callbacks.checkpointing.writing import (
    PART,
    accumulators_of,
    copies_of,
    describe,
    give_to_first,
)
from dtk.compat import tf_replicas
from dtk.errors import CheckpointFormatError
from dtk.exchange.contract import SavedItem
from dtk.layers.whole import ModelInParts
from dtk.nests import Array
from dtk.parameter_server import evaluator
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.sharded_optimizer import ShardedState
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import shared_weights
from dtk.trainer.replica.step_metrics import metric_variables

_ELSE = "use another directory, or resume=False"


def load_newest(
    files: CheckpointFiles,
    trainer: DistributedTrainer,
    resume: bool = True,
    parts: ModelInParts | ShardedState | None = None,
) -> tuple[str, states.CheckpointState] | None:
    """Load the newest readable checkpoint's weights into the model; on rank 0 alone.

    What an earlier process left half written is removed first.
    """
    files.clear_unfinished()
    names = files.names() if resume else []
    if not names:
        return None
    name, packed, arrays = _newest_readable(files, names)
    path = files.directory / name
    state: ModelState = trainer if parts is None else ModelState(parts.build(), trainer.strategy)
    check_same_model(packed["variables"], describe(state), path)
    check_same_counts(packed, state, path)
    state.model.load_weights(files.weights(name))
    # The keys stay, and arrays take the places of their names.
    loaded = cast(states.CheckpointState, states.unpack(packed, arrays))
    if parts is not None:
        for variable, value in zip(state.seed_states(), loaded["seeds"], strict=True):
            variable.assign(value)
    return name, loaded


def _newest_readable(
    files: CheckpointFiles, names: list[str]
) -> tuple[str, states.CheckpointState, dict[str, Array]]:
    corrupt: list[str] = []
    for name in names:
        path = files.directory / name
        try:
            state, arrays = files.read(name)
            _check(state, path)
        except CorruptCheckpointError as error:
            corrupt.append(f"{path}: {error}")
            continue
        if corrupt:
            warnings.warn(
                f"corrupt checkpoint ({'; '.join(corrupt)}); going back to {path}", stacklevel=2
            )
        return name, state, arrays
    raise ValueError(
        f"no checkpoint can be read ({'; '.join(corrupt)}); remove {files.directory} or give "
        "resume=False to start afresh"
    )


def load_weights(
    files: CheckpointFiles, model: keras.Model, name: str
) -> evaluator.SavedProgress | None:
    """Load the weights of a checkpoint into a model that will not be trained."""
    trainer = trainer_of(model)
    assert trainer is not None
    try:
        packed, _ = files.read(name)
        count, path = len(model.weights), files.directory / name
        _check(packed, path)
        check_same_model(packed["variables"][:count], describe(trainer)[:count], path)
        evaluator.quietly_load(model, files.weights(name))
    except (CorruptCheckpointError, FileNotFoundError):
        if name in files.names():
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


def check_same_model(saved: states.Described, mine: states.Described, path: Path) -> None:
    """Compare what `describe` returned then and now.

    Layers are named anew in every process, so of a path only its last word counts.
    """
    for (name, *shape), (own_name, *own_shape) in zip(saved, mine, strict=False):
        if shape != own_shape or _last_word(name) != _last_word(own_name):
            raise ValueError(
                f"{path} belongs to another model: it has {name} {shape}, this model has "
                f"{own_name} {own_shape} there; {_ELSE}"
            )
    if len(saved) != len(mine):
        more, where = (saved, "the checkpoint") if len(saved) > len(mine) else (mine, "this model")
        raise ValueError(
            f"{path} belongs to another model: only {where} has "
            f"{more[min(len(saved), len(mine))][0]}; {_ELSE}"
        )


def _last_word(path: str) -> str:
    """Return the name of a variable without its folder and what stands before its last _."""
    return path.rsplit("/", 1)[-1].rsplit("_", 1)[-1]


def check_same_counts(saved: states.CheckpointState, trainer: ModelState, path: Path) -> None:
    """Compare what has no weights: random layers, and metrics in the middle of an epoch."""
    seeds, metrics = saved["seeds"], saved["metrics"]
    counts = [("random layers (Dropout and the like)", seeds, trainer.seed_states())]
    if metrics is not None:
        counts.append(("variables of metrics", metrics, metric_variables(trainer.model)))
    for what, theirs, mine in counts:
        if len(theirs) != len(mine):
            raise ValueError(
                f"{path} belongs to another model: it has {len(theirs)} {what}, this model has "
                f"{len(mine)}; use another directory or resume=False, and model.load_weights to "
                "start from its weights"
            )


def restore(
    state: states.CheckpointState,
    trainer: DistributedTrainer,
    epochs: int,
    parts: ModelInParts | ShardedState | None = None,
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
    shared_weights.spread_seeds(trainer)
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


def restore_exchange(trainer: DistributedTrainer, saved: dict[str, SavedItem]) -> None:
    """Restore what the exchange of gradients remembers; on a grid, of this rank's part.

    What belongs to another division of the model cannot be used: the exchange then begins anew, and
    rank 0 warns. One process without an exchange keeps it for the next.
    """
    strategy = trainer.strategy
    group = strategy.model_communicator
    parts = {name.partition("/")[0] for name in saved if name.startswith(PART)}
    if group.size == 1 and not (parts and shared_optimizer.gradient_exchanges_of(trainer.model)):
        trainer.restore_exchange(saved)
        return
    if len(parts) == group.size:
        start = f"{PART}{group.rank}/"
        mine = {k.removeprefix(start): v for k, v in saved.items() if k.startswith(start)}
        trainer.restore_exchange(mine)
        return
    trainer.restore_exchange({})
    if saved and strategy.is_chief:
        warnings.warn(
            f"the checkpoint remembers gradients of a model in {len(parts) or 1} part(s), which "
            f"here has {group.size}: exchange={strategy.exchange} begins anew, with nothing kept",
            stacklevel=2,
        )


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
