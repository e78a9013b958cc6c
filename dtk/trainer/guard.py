"""Decide for each call of `fit`, and each update of a script's own loop: distributed or refused.

In a job of several processes, a model that was compiled outside `strategy.scope()` would silently
train alone in each process. So the calls of all models go through here, from the first strategy on:

    compiled in a scope                  with the checks of `fit`
    built, or called, in a scope         gets a trainer now, then the same
    others, in a job of one process      plain Keras
    others, training                     NotDistributedError, except inside `undistributed()`
    others, evaluating and predicting    plain Keras: every rank computes all rows

And optimizers applied outside `strategy.run`:

    rank 0   all rows -> gradients -> apply        the same N times, or N models that drift apart:
    rank 1   all rows -> gradients -> apply        nothing has summed the gradients

In a job of one process a script's own loop runs as without dtk.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from dtk.compat import (
    keras_data,
    keras_models,
    keras_optimizers,
    keras_steps,
    keras_variables,
    tf_datasets,
    tf_replicas,
)
from dtk.compat.keras_optimizers import Apply
from dtk.errors import NotDistributedError, at_rank
from dtk.nests import Args, Function, Kwargs
from dtk.patches import temporarily
from dtk.placement import outside_graph
from dtk.trainer import distributed_model, fit, model_files, undistributed_jobs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import reducing_optimizer, self_test, step_metrics
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step

# What to write around a script's step.
_LINES = """\
train_set = strategy.experimental_distribute_dataset(train_set)

@tf.function
def distributed_step(*batch):
    return strategy.run(train_step, args=batch)  # your step, from the tape to apply

for batch in train_set:
    distributed_step(*batch)  # distributed_step(batch), if a batch is one tensor"""

_taking_over = threading.Lock()


@contextlib.contextmanager
def undistributed() -> Iterator[None]:
    """Return a context in which models without a strategy train in this process alone.

    In a job of several processes, dtk refuses `fit` of a model that was not compiled inside
    `strategy.scope()`: every process would train its own model. Use this context where you want
    that, for example to train a reference on rank 0:

    Example:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> with undistributed():
        ...     history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """
    undistributed_jobs.made_strategy()  # the script trains alone on purpose
    with temporarily(tf_replicas.running, undistributed=True):
        yield


class _Guard:
    """Decides for the calls of all models; holds the strategy that joins the processes."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def __call__(
        self, model: keras.Model, name: str, method: Function[object], args: Args, kwargs: Kwargs
    ) -> object:
        trainer = distributed_model.trainer_of(model) or _distributed_now(model, name)
        if trainer is not None:
            with keras_data.closing_iterators(), trainer.explaining_losses():
                return fit.call(trainer, name, method, args, kwargs)
        strategy = self.strategy
        trains = name in ("fit", "train_on_batch")
        if not trains or tf_replicas.running.undistributed or strategy.processes == 1:
            return method(*args, **kwargs)
        message = (
            f"{name} of model {model.name!r}, which was compiled outside strategy.scope(): "
            f"each of the {strategy.processes} processes would train a model of its own. Call "
            "model.compile(...) (or load the model) inside `with strategy.scope():`; to train "
            "in this process alone, call fit inside `with dtk.strategies.undistributed():`"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))


def _distributed_now(model: keras.Model, name: str) -> DistributedTrainer | None:
    """Make the trainer of a model that was built, or is called, in a scope."""
    owner = keras_models.owner_of(model)
    strategy = tf.distribute.get_strategy() if owner is None else owner
    compiled_enough = model.compiled or name.startswith("predict")
    if not hasattr(strategy, "make_trainer") or not compiled_enough:
        return None
    if owner is None and tf_replicas.running.undistributed:
        return None
    asked = model.jit_compile if model.compiled else "auto"
    settled = distributed_model.check_and_own(model, asked, strategy)
    if not model.compiled:
        model.jit_compile = settled
    return distributed_model.distribute(model, strategy)


def joining_strategy() -> Strategy | None:
    """Return the strategy with the most processes; None before the first is made."""
    handler = keras_models.handler()
    return handler.strategy if isinstance(handler, _Guard) else None


def install(strategy: Strategy) -> None:
    """Check all models and optimizers from now on. Every new strategy calls this."""
    if strategy.processes > 1:
        model_files.install()
    if max(_joins(strategy)) > 1:
        tf_datasets.patch_iterators()
    self_test.fail_if_nothing_is_trained()
    before = joining_strategy()
    # The strategy with the most processes and replicas decides what is refused.
    if before is None or _joins(strategy) >= _joins(before):
        keras_models.patch_calls(_Guard(strategy))
    keras_optimizers.patch_every_apply(_check_update)
    keras_steps.patch_assign_and_moments(traced_step.assign, step_metrics.moments_in_loop)
    keras_variables.patch_map_aggregation(
        lambda: hasattr(tf.distribute.get_strategy(), "make_trainer")
    )


def _joins(strategy: Strategy) -> tuple[int, int]:
    return strategy.processes, strategy.size


# Updates of a script's own loop.


def _check_update(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Apply | None:
    strategy, current = joining_strategy(), tf.distribute.get_strategy()
    in_scope = tf.distribute.has_strategy()
    if strategy is None:
        return None
    if in_scope and not tf.distribute.in_cross_replica_context():  # inside strategy.run
        taken_over = isinstance(optimizer, shared_optimizer.SharedOptimizer)
        return None if taken_over else _taken_over_now(optimizer, current)
    owner = keras_optimizers.optimizer_owner(optimizer)
    applied_to = variables or keras_optimizers.trained_variables(optimizer)
    are_summed = strategy.summed_by_loop.issuperset(map(keras_variables.reference_to, applied_to))
    alone = tf_replicas.running.undistributed or (bool(applied_to) and are_summed)
    if strategy.size > 1 and strategy.processes > 1 and not alone:
        _refuse_update(
            optimizer,
            f"in a job of {strategy.processes} processes: each would compute all rows of every "
            "batch, and nothing would sum their gradients",
            strategy,
        )
    if in_scope and owner is not current:
        _refuse_update(optimizer, "inside strategy.scope(), and was made outside it", strategy)
    if owner is current or optimizer.built or not variables:
        return None
    replicas = owner.num_replicas_in_sync
    if replicas > 1 and not alone:
        _refuse_update(optimizer, f"with {replicas} replicas: one would compute all rows", strategy)
    with owner.scope():  # its variables must be made here; `apply` would build it outside
        optimizer.build(list(variables))
    return None


def _taken_over_now(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> Apply | None:
    """Take over an optimizer that no model was compiled with, and return its new `apply`.

    Keras's own would clip, scale and look for what is not finite on each rank, and sum afterwards.
    """
    if not hasattr(strategy, "make_trainer"):
        return None
    if strategy.shard_optimizer:
        message = (
            f"optimizer {optimizer.name!r} was applied inside strategy.run, and no model was "
            "compiled with it: every rank would hold all of its state, in spite of "
            "shard_optimizer=True. Call model.compile(optimizer) inside strategy.scope(), before "
            "the first step"
        )
        raise ValueError(at_rank(strategy.rank, message))
    own = [n for n in ("apply_gradients", "apply") if keras_optimizers.has_own(optimizer, n)]
    if own:
        message = (
            f"optimizer {optimizer.name!r} ({type(optimizer).__name__}) has its own {own[0]}, and "
            "no model was compiled with it: it has changed gradients before those of all ranks "
            "were summed. Call model.compile(optimizer) inside strategy.scope(), before the first "
            "step"
        )
        raise NotDistributedError(at_rank(strategy.rank, message))
    groups = (strategy.extended.replica_communicator(), strategy.model_communicator)
    if all(group.size == 1 for group in groups):  # parameter servers sum by themselves
        return None
    with _taking_over:  # replicas may be threads
        outside_graph(lambda: reducing_optimizer.take_over(optimizer, strategy))
    return optimizer.apply


def _refuse_update(optimizer: keras.Optimizer, why: str, strategy: Strategy) -> None:
    message = (
        f"optimizer {optimizer.name!r} was applied outside strategy.run, {why}. Make model, "
        "optimizer and metrics inside `with strategy.scope():`, and let strategy.run call the "
        f"step on each rank's rows:\n\n{_LINES}\n\n"
        "docs/strategies.md has a whole loop, and says what the loss is to be divided by. To "
        "train in this process alone, or where the script has summed the gradients itself, "
        "apply them inside `with dtk.strategies.undistributed():`"
    )
    raise NotDistributedError(at_rank(strategy.rank, message))
