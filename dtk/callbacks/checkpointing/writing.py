"""Collecting what a checkpoint holds, and writing it, on a thread of its own if asked."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.callbacks.checkpointing import checkpoint_state as states
from dtk.callbacks.checkpointing.checkpoint_files import CheckpointFiles, MemoryFile, save_weights
from dtk.callbacks.find_non_finite import non_finite_weights
from dtk.cluster import progress
from dtk.communicators.root import on_root
from dtk.compat import keras_models, tf_replicas
from dtk.compat.keras_variables import is_sharded
from dtk.exchange.contract import SavedItem
from dtk.layers.parallelize import is_in_parts
from dtk.layers.whole import ModelInParts
from dtk.nests import Array, Logs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.sharded_optimizer import ShardedState
from dtk.trainer.model_state import ModelState
from dtk.trainer.ranks.rank_checks import whole_shape
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
            with progress.awaiting(self._thread):
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
    fold_accumulators(trainer)
    parts = parts_of(trainer)
    if parts is not None:
        if trainer.strategy.is_chief:
            parts.build()
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
        packed = {key: states.pack(value, arrays) for key, value in state.items()}
        if background is None:
            return files.save(
                lambda path: save_weights(model, path), packed, arrays, keep=keep, best=note
            )
        weights = MemoryFile()
        keras.Model.save_weights(model, weights)
        # An array of a callback's own may change while it is written.
        copies = {name: np.array(array) for name, array in arrays.items()}
        name = files.next_name()
        background.start(
            name,
            lambda: files.save(
                lambda path: _put(path, weights.getbuffer()), packed, copies, keep=keep, best=note
            ),
        )
        return name

    try:
        return on_chief(trainer.strategy, write)
    finally:
        if isinstance(parts, ShardedState):
            parts.forget()


def _put(path: Path, content: memoryview) -> None:
    with open(path, "xb") as file:
        file.write(content)


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


def parts_of(trainer: DistributedTrainer) -> ModelInParts | ShardedState | None:
    """Return what puts together what ranks hold in parts. All ranks call it together.

    A checkpoint holds the layers of one device, also where one rank has all parts of each: the same
    script resumes it on any grid, and in one process.
    """
    strategy = trainer.strategy
    if sharded := shared_optimizer.sharded_of(trainer.model):
        return ShardedState(trainer.model, sharded)
    if strategy.model_communicator.size == 1:
        model = trainer.model
        divisible = any(map(is_in_parts, keras_models.layers_of(model)))
        if not divisible or not hasattr(model, "operations"):
            return None
        return ModelInParts(model, strategy.model_communicator)
    return ModelInParts(trainer.model, strategy.model_communicator)


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
    variables = trainer.shared_variables()
    return [(v.path, list(map(int, whole_shape(v))), str(v.dtype)) for v in variables]


def accumulators_of(trainer: DistributedTrainer) -> list[keras.Variable]:
    """Return the variables that hold this rank's part of unfinished accumulation windows."""
    optimizers = shared_optimizer.optimizers_of(trainer.model)
    found = [v for optimizer in optimizers for v in shared_optimizer.accumulators_of(optimizer)]
    return [v for v in found if not is_sharded(v)]  # those hold sums of all ranks


def fold_accumulators(trainer: DistributedTrainer) -> None:
    """Move unfinished gradient accumulation to rank 0: its sum there, zeros elsewhere.

    The window ends with a sum over ranks, so nothing changes, and what rank 0 saves is what a
    single process would have.
    """
    variables, strategy = accumulators_of(trainer), trainer.strategy
    if not variables:
        return
    sums = [tf.add_n(copies_of(v, strategy)) for v in variables]
    for variable, total in zip(variables, strategy.communicator.allreduce(sums), strict=True):
        give_to_first(variable, total, strategy)


def give_to_first(variable: keras.Variable, value: tf.Tensor, strategy: Strategy) -> None:
    """Set a per-replica variable: `value` on replica 0, zeros on the others."""
    zeros, ranks = tf.zeros_like(value), strategy.local_ranks()
    strategy.set_per_replica(variable, [zeros if rank else value for rank in ranks])


def copies_of(variable: keras.Variable, strategy: Strategy) -> list[tf.Tensor]:
    """Return what this process's replicas hold of a variable."""
    return [tf.convert_to_tensor(v) for v in strategy.experimental_local_results(variable.value)]


def value_of(variable: keras.Variable) -> Array:
    return keras.ops.convert_to_tensor(variable).numpy()
