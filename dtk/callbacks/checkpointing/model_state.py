"""Model state that a checkpoint holds, and whether it fits the model it is loaded into."""

from __future__ import annotations

import warnings
from pathlib import Path

import keras
import tensorflow as tf

from dtk.callbacks.checkpointing.state import CheckpointState, Described
from dtk.compat import keras_models
from dtk.exchange.state import SavedItem
from dtk.layers.plain import is_in_parts
from dtk.layers.whole import ModelInParts
from dtk.nests import Array
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.model_state import ModelState
from dtk.trainer.replica.replica_step import metric_variables
from dtk.trainer.strategy import Strategy

# Begins the names of what the exchange remembers of a part of a model, before the part's number.
_PART = "part "


def parts_of(trainer: DistributedTrainer) -> ModelInParts | None:
    """Return what puts a model together that ranks hold in parts. All ranks call it together.

    A checkpoint holds the layers of one device, also where one rank has all parts of each: the same
    script resumes it on any grid, and in one process.
    """
    strategy = trainer.strategy
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
        f"{_PART}{part}/{name}": item
        for part, items in enumerate(group.allgather_object(own))
        for name, item in items.items()
    }


def restore_exchange(trainer: DistributedTrainer, saved: dict[str, SavedItem]) -> None:
    """Restore what the exchange of gradients remembers; on a grid, of this rank's part.

    What belongs to another division of the model cannot be used: the exchange then begins anew, and
    rank 0 warns. One process without an exchange keeps it for the next.
    """
    strategy = trainer.strategy
    group = strategy.model_communicator
    parts = {name.partition("/")[0] for name in saved if name.startswith(_PART)}
    if group.size == 1 and not (parts and shared_optimizer.gradient_exchanges_of(trainer.model)):
        trainer.restore_exchange(saved)
        return
    if len(parts) == group.size:
        start = f"{_PART}{group.rank}/"
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


def describe(trainer: ModelState) -> Described:
    """Return path, shape and dtype of every variable a checkpoint holds, in order."""
    variables = trainer.shared_variables()
    return [(v.path, [int(n) for n in v.shape], str(v.dtype)) for v in variables]


def check_same_model(saved: Described, mine: Described, path: Path) -> None:
    """Compare what `describe` returned then and now.

    Layers are named anew in every process, so of a path only its last word counts.
    """
    for (name, *shape), (own_name, *own_shape) in zip(saved, mine, strict=False):
        if shape != own_shape or last_word(name) != last_word(own_name):
            raise ValueError(
                f"{path} belongs to another model: it has {name} {shape}, this model has "
                f"{own_name} {own_shape} there; use another directory, or resume=False"
            )
    if len(saved) != len(mine):
        more, where = (saved, "the checkpoint") if len(saved) > len(mine) else (mine, "this model")
        raise ValueError(
            f"{path} belongs to another model: only {where} has "
            f"{more[min(len(saved), len(mine))][0]}; use another directory, or resume=False"
        )


def check_same_counts(saved: CheckpointState, trainer: ModelState, path: Path) -> None:
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


def last_word(path: str) -> str:
    """Return the name of a variable without its folder and what stands before its last _."""
    return path.rsplit("/", 1)[-1].rsplit("_", 1)[-1]


def accumulators_of(trainer: DistributedTrainer) -> list[keras.Variable]:
    """Return the variables that hold unfinished windows of gradient accumulation."""
    optimizers = shared_optimizer.optimizers_of(trainer.model)
    return [v for optimizer in optimizers for v in shared_optimizer.accumulators_of(optimizer)]


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


def iterations_of(model: keras.Model) -> int | None:
    """Return how many steps the optimizer has taken; None for a model without one."""
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else int(value_of(optimizer.iterations))


def value_of(variable: keras.Variable) -> Array:
    return keras.ops.convert_to_tensor(variable).numpy()
