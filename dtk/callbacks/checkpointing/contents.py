"""What a checkpoint holds: collected and written, on a thread if asked; read and restored.

Rank 0 reads and writes; all ranks collect and restore together.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from dtk.callbacks.checkpointing import checkpoint_state as states
from dtk.callbacks.checkpointing.checkpoint_files import (
    STATE,
    CheckpointFiles,
    CorruptCheckpointError,
    MemoryFile,
    save_weights,
)
from dtk.callbacks.find_non_finite import non_finite_weights
from dtk.communicators.root import on_root
from dtk.compat import keras_models, tf_replicas
from dtk.compat.keras_variables import in_wholes, whole_shape
from dtk.errors import CheckpointFormatError
from dtk.exchange.contract import SavedItem
from dtk.layers.parallelize import ModelInParts, is_in_parts
from dtk.nests import Array, Logs
from dtk.parameter_server.evaluator import SavedProgress
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.sharded_optimizer import ShardedState
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks import shared_weights
from dtk.trainer.replica.step_metrics import metric_variables
from dtk.trainer.strategy import Strategy

T = TypeVar("T")

# Begins the names of what the exchange remembers of a part of a model, before the part's number.
PART = "part "
# Seconds after which it is said that training waits for the disk.
_LONG = 10.0


def on_chief(strategy: Strategy, work: Callable[[], T]) -> T:
    """Do work on rank 0, and return its result on every rank. All ranks call it together."""

    def alone() -> T:
        # Summed state is read as it is there, without waiting for the others.
        with getattr(strategy.extended, "undistributed", contextlib.nullcontext)():
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
    # what callbacks had learned before a validation that is cut short; on rank 0
    learned: states.Learned = {}


class NotFiniteError(Exception):
    """Error of a model whose weights are not worth keeping; the message names them."""


class Background:
    """Does work on a thread, while training goes on; the next work waits for it."""

    def __init__(self, say: Callable[[str], None], long: float = _LONG):
        self._say = say
        self._long = long
        self._thread: threading.Thread | None = None
        self._what = ""
        self.failure: Exception | None = None

    def start(self, what: str, work: Callable[[], object]) -> None:
        """Begin a piece of work; `finish` has been called since the last."""

        def run() -> None:
            try:
                work()
            except Exception as failure:
                self.failure = failure

        self._what = what
        # Not a daemon: a script that ends by itself leaves nothing half written.
        self._thread = threading.Thread(target=run, name="dtk-checkpoint")
        self._thread.start()

    def finish(self, wait: bool = True) -> None:
        """Raise what the work that is under way has raised, or has raised already."""
        failure = self.left() if wait or self.failure is not None else None
        if failure is not None:
            raise failure

    def left(self) -> Exception | None:
        """Wait for the work that is under way, and return what it has raised."""
        if self._thread is not None:
            self._thread.join(self._long)
            if self._thread.is_alive():
                self._say(f"waiting for {self._what}, which takes more than {self._long:g} s")
                self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        return failure


def save(
    trainer: DistributedTrainer,
    files: CheckpointFiles,
    progress: TrainingProgress,
    keep: int | None,
    best: float | None,
    note: Mapping[str, object] | None,
    background: Background | None,
) -> str:
    """Write one checkpoint. All ranks call it together: some state is spread over them.

    With a `background`, it is copied, and written later; the one before has been finished. Where
    there is a note, the checkpoint is the best so far.
    """
    trainer.flush()
    parts = parts_of(trainer)
    if parts is not None:
        on_chief(trainer.strategy, lambda: bool(parts.build()))
        parts.gather()
    metrics = None
    if progress.in_epoch and progress.step:
        metrics = [value_of(v) for v in metric_variables(trainer.model)]
    exchange = exchange_of(trainer)

    def write() -> str:
        whole: ModelState = trainer
        if parts is not None and parts.whole is not None:
            whole = ModelState(parts.whole, trainer.strategy)
        model, arrays = whole.model, dict[str, Array]()
        if told := non_finite_weights(model):
            raise NotFiniteError(told)
        state = _state(trainer, whole, progress, best, metrics, exchange)
        state["note"] = note
        packed = {key: states.pack(value, arrays, key) for key, value in state.items()}
        if background is None:
            return files.save(lambda path: save_weights(model, path), packed, arrays, keep, note)
        weights = MemoryFile()
        keras.Model.save_weights(model, weights)
        # An array of a callback's own may change while it is written.
        copies = {name: np.array(array) for name, array in arrays.items()}
        name = files.next_name()

        def put(path: Path) -> None:
            path.write_bytes(weights.getbuffer())

        background.start(name, lambda: files.save(put, packed, copies, keep, note))
        return name

    try:
        return on_chief(trainer.strategy, write)
    finally:
        if isinstance(parts, ShardedState):
            parts.forget()


def _state(
    trainer: DistributedTrainer,
    whole: ModelState,
    progress: TrainingProgress,
    best: float | None,
    metrics: list[Array] | None,
    exchange: dict[str, SavedItem],
) -> states.CheckpointState:
    """Collect what a checkpoint holds beside the weights; on rank 0 alone."""
    model, strategy = trainer.model, trainer.strategy
    optimizer = getattr(model, "optimizer", None)
    return {
        "format": states.FORMAT,
        "workers": strategy.size,
        "iterations": None if optimizer is None else int(value_of(optimizer.iterations)),
        "variables": describe(whole),
        "best": best,
        "stopped": bool(model.stop_training),
        "seeds": [shared_weights.copies_of(v, strategy)[0] for v in whole.seed_states()],
        "callbacks": states.of_callbacks(trainer.callbacks.callbacks) | progress.learned,
        "random": states.of_generators(),
        "tensorflow_seed": tf_replicas.global_seed(),
        "shuffle_seed": strategy.shuffle_seed.value,
        "data": trainer.feed.position(progress.in_epoch),
        "epoch": progress.epoch,
        "step": progress.step,
        "lora": [value_of(v) for v in lora_weights(whole.model)],
        "metrics": metrics,
        "trained": progress.trained,
        "exchange": exchange,
    }


def parts_of(trainer: DistributedTrainer) -> ModelInParts | ShardedState | None:
    """Return what puts together what ranks hold in parts. All ranks call it together.

    A checkpoint holds the layers of one device, also where one rank has all parts of each: the same
    script resumes it on any grid, and in one process.
    """
    model, group = trainer.model, trainer.strategy.model_communicator
    if sharded := shared_optimizer.sharded_of(model):
        return ShardedState(model, sharded)
    divided = hasattr(model, "operations") and any(map(is_in_parts, keras_models.layers_of(model)))
    return ModelInParts(model, group) if group.size > 1 or divided else None


def exchange_of(trainer: DistributedTrainer) -> dict[str, SavedItem]:
    """Collect what the exchange of gradients remembers, of all ranks, who call it together."""
    own, group = trainer.exchange_state(), trainer.strategy.model_communicator
    if group.size == 1:
        return own
    return {
        f"{PART}{part}/{name}": item
        for part, items in enumerate(group.allgather_object(own))
        for name, item in items.items()
    }


def describe(trainer: ModelState) -> states.Described:
    """Return path, shape and dtype of every variable a checkpoint holds, in order."""
    descriptions = []
    for first, *others in in_wholes(trainer.shared_variables()):
        shape = [int(size) for size in whole_shape(first)]
        if others:
            shape[0] += sum(int(part.shape[0]) for part in others)
        descriptions.append((first.path, shape, str(first.dtype)))
    return descriptions


def lora_weights(model: keras.Model) -> list[keras.Variable]:
    """Return the weights of layers with LoRA.

    Keras saves the sum of kernel and LoRA. It loads that sum as the kernel, and sets LoRA's two
    factors to zeros. Each factor's gradient is a product with the other, so none would learn again.
    """
    layers = keras_models.layers_of(model)
    return [v for one in layers if getattr(one, "lora_enabled", False) for v in one.weights]


def value_of(variable: keras.Variable) -> Array:
    return keras.ops.convert_to_tensor(variable).numpy()


# Resuming.

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
    try:
        check_same_model(packed["variables"], describe(state), path)
    except ValueError as error:
        if unbuilt := _unbuilt(state.model):
            raise ValueError(unbuilt.format(path)) from error
        raise
    check_same_counts(packed, state, path)
    state.model.load_weights(files.weights(name))
    if (note := packed.get("note")) is not None:
        files.complete_best(name, note)
    # The keys stay, and arrays take the places of their names.
    loaded = cast(states.CheckpointState, states.unpack(packed, arrays))
    for variable, value in zip(lora_weights(state.model), loaded.get("lora", ()), strict=True):
        variable.assign(value)
    if isinstance(parts, ModelInParts):
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


def load_weights(files: CheckpointFiles, model: keras.Model, name: str) -> SavedProgress | None:
    """Load the weights of a checkpoint into a model that will not be trained."""
    trainer = trainer_of(model)
    assert trainer is not None
    try:
        packed, _ = files.read(name)
        count, path = len(model.weights), files.directory / name
        _check(packed, path)
        check_same_model(packed["variables"][:count], describe(trainer)[:count], path)
        with warnings.catch_warnings():
            # A model that does not train has no optimizer state.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            model.load_weights(files.weights(name))
    except (CorruptCheckpointError, FileNotFoundError):
        if name in files.names():
            raise
        return None
    return SavedProgress(packed["epoch"], packed["step"], packed.get("iterations"))


def _check(state: states.CheckpointState, path: Path) -> None:
    """Refuse values that cannot be, and what a newer dtk has written.

    An older checkpoint in the place of a newer dtk's would lose steps.
    """
    version = state.get("format")
    if isinstance(version, int) and version > states.FORMAT:
        raise CheckpointFormatError(
            f"{path} has format {version}, and this dtk reads {states.FORMAT} at most; "
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


def _unbuilt(model: keras.Model) -> str:
    """Return what to do about optimizers that the first step would build, which is too late."""
    optimizers = shared_optimizer.optimizers_of(model)
    names = ", ".join(repr(one.name) for one in optimizers if not one.built)
    return names and (
        f"{{}} cannot be loaded: the model's optimizers {names} have no state yet, since the first "
        "step would build them. Build each where the model is compiled, such as "
        "self.d_optimizer.build(self.discriminator.trainable_variables)"
    )


def _last_word(path: str) -> str:
    """Return the name of a variable without its folder and what stands before its last _."""
    name = path.rsplit("/", 1)[-1]
    # Keras numbers what has no name, such as Nadam's product, in each process anew.
    return "variable" if re.fullmatch(r"variable(_\d+)?", name) else name.rsplit("_", 1)[-1]


def check_same_counts(saved: states.CheckpointState, trainer: ModelState, path: Path) -> None:
    """Compare what Keras's file of weights does not hold."""
    metrics = metric_variables(trainer.model)
    for what, theirs, mine in (
        ("random layers (Dropout and the like)", saved["seeds"], trainer.seed_states()),
        ("variables of metrics", saved["metrics"], metrics),
        ("weights of layers with LoRA", saved.get("lora", []), lora_weights(trainer.model)),
    ):
        if theirs is not None and len(theirs) != len(mine):
            raise ValueError(
                f"{path} belongs to another model: it has {len(theirs)} {what}, this model has "
                f"{len(mine)}; use another directory or resume=False, and model.load_weights to "
                "start from its weights"
            )


def restore(
    state: states.CheckpointState,
    trainer: DistributedTrainer,
    epochs: int,
    parts: ModelInParts | ShardedState | None,
) -> None:
    """Restore everything but the weights, which rank 0 has loaded. All ranks call it together."""
    strategy = trainer.strategy
    if parts is not None:
        parts.scatter(strategy.world)
    shared_weights.start_from(0, trainer)
    for exchange, _ in shared_optimizer.windows_of(trainer.model):
        exchange.divided = False  # until the next epoch begins
    restore_exchange(trainer, state.get("exchange", {}))
    if not isinstance(parts, ModelInParts):  # which has scattered them
        for variable, value in zip(trainer.seed_states(), state["seeds"], strict=True):
            variable.assign(value)
    states.to_callbacks(state["callbacks"], trainer.callbacks.callbacks)
    states.to_generators(state["random"])
    _restore_seeds(state, trainer)
    if is_over(state):
        keras_models.set_initial_epoch(trainer.model, max(state["epoch"], epochs))
        return
    if state["stopped"]:
        trainer.model.stop_training = True
    keras_models.set_initial_epoch(trainer.model, state["epoch"])
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
    alone = group.size == 1 and not (
        parts and shared_optimizer.gradient_exchanges_of(trainer.model)
    )
    fits = alone or len(parts) == group.size
    start = "" if alone else f"{PART}{group.rank}/"
    mine = {k.removeprefix(start): v for k, v in saved.items() if fits and k.startswith(start)}
    trainer.restore_exchange(mine)
    if saved and not fits and strategy.is_chief:
        warnings.warn(
            f"the checkpoint remembers gradients of a model in {len(parts) or 1} part(s), which "
            f"here has {group.size}: exchange={strategy.exchange} begins anew, with nothing kept",
            stacklevel=2,
        )


def learning_rates(model: keras.Model) -> list[keras.Variable]:
    """Return the learning rates of a model's optimizers that are variables."""
    variables = [v for o in shared_optimizer.optimizers_of(model) for v in o.variables]
    return [v for v in variables if v.path.endswith("/learning_rate")]


def _restore_seeds(state: states.CheckpointState, trainer: DistributedTrainer) -> None:
    strategy = trainer.strategy
    if strategy.shuffle_seed.value is not None and state["shuffle_seed"] is not None:
        strategy.shuffle_seed.restore(state["shuffle_seed"], in_force=state["tensorflow_seed"])
    if state["tensorflow_seed"] not in (None, tf_replicas.global_seed()):
        tf.random.set_seed(state["tensorflow_seed"])
        trainer.feed.set_batches(trainer.feed.iterator.data_adapter)


def is_over(state: states.CheckpointState) -> bool:
    """Return whether a callback has stopped training, and the validation of that epoch is done."""
    return state["stopped"] and state["trained"] is None


def resume_message(state: states.CheckpointState, epochs: int, path: Path) -> str:
    """Return the line that says where training goes on."""
    if is_over(state):
        return f"a callback had stopped training after epoch {state['epoch']} ({path})"
    if state["epoch"] >= epochs:
        return f"training had finished, epoch {state['epoch']} of {epochs} ({path})"
    step = f", step {state['step'] + 1}," if state["step"] else ""
    step = step if state["trained"] is None else ", validation,"
    return f"resuming at epoch {state['epoch'] + 1}/{epochs}{step} from {path}"
