"""Run one replica's step so that all replicas together equal one process.

Keras's own train or test step runs on this replica's slice; its results are then made global:

* Metric state is summed over ranks before any result is computed, so a step logs the results of the
  global batch.
* Non-trainable state that a step assigns (moving statistics) is averaged, weighted by share.
* A replica without rows computes with a padding row, which its metrics forget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf

from dtk.cluster import progress
from dtk.compat import keras_models, keras_steps, tf_replicas
from dtk.errors import NotDistributedError, at_rank
from dtk.input import slicing
from dtk.nests import Nest
from dtk.trainer import jit
from dtk.trainer.gradients import local_steps, shared_optimizer
from dtk.trainer.replica import compiled_step, gathered_metrics, step_logs
from dtk.trainer.strategy import StepFunction, Strategy
from dtk.trainer.tracing import lookups, sync_batch_norm, traced_step


@contextlib.contextmanager
def running(model: keras.Model, name: str, gathered: Sequence[keras.Metric] = ()) -> Iterator[None]:
    """Return the context in which a loop around `run_step` is traced and runs."""
    with (
        progress.inside(f"{name} step"),
        traced_step.in_shares(),
        keras_steps.patch_results(keras_models.metrics_of(model), result_of),
        keras_steps.patch_moments(sync_batch_norm.of_all_replicas),
        lookups.in_place(),
        gathered_metrics.on_all_rows(gathered),
    ):
        yield


def run_step(
    step_function: StepFunction,
    batch: slicing.Slices,
    model: keras.Model,
    strategy: Strategy,
    kinds: Mapping[str, str],
    tried: bool = False,
) -> Nest:
    """Run Keras's own train or test step on this replica's slice, then make its logs global.

    This Python runs while the step is traced, or eagerly, and waits for no rank by itself: code
    that does wait reports so.
    """
    data, step, present = begin_step(step_function, batch, model, strategy, kinds)
    step.tried = tried
    before = {id(v): tf.identity(v) for v in metric_variables(model)}
    trains = step_function.__name__ == "train_step"
    world = WorldState(step, before, present)
    if not (trains and any(e.local for e in shared_optimizer.gradient_exchanges_of(model))):
        step.result_of = world.result_of
    tracing = progress.alone("the Python of")
    with tracing, traced_step.tracing(step), tf_replicas.counted_if(present):
        logs = _compute(step_function, data, step, kinds, strategy)
        _forget_padding(present, before, model)
        if trains:
            check_reduced(step, model, strategy)
            if local_steps.average_statistics(step, model):
                return logs
            sync_batch_norm.tell_of_others(step, strategy)
        world.average()
        return _sum_numbers(step, logs)


def _compute(
    step_function: StepFunction,
    data: Nest,
    step: traced_step.Step,
    kinds: Mapping[str, str],
    strategy: Strategy,
) -> Nest:
    """Run Keras's own step, compiled by XLA where the model asks for it."""
    model = step.model
    compiles = bool(model.jit_compile) and not tf.executing_eagerly()
    jit.compile_updates(model, compiles)
    if not compiles:
        return step_function(data)
    compiled = compiled_step.CompiledStep(
        step_function, step, kinds, factors=strategy.communicator.size > 1
    )
    try:
        run = compiled.trace(data)
    except compiled_step.UncompilableError as why:
        jit.leave(model, strategy, str(why))
        return step_function(data)
    return run()


def begin_step(
    step_function: StepFunction,
    batch: slicing.Slices,
    model: keras.Model,
    strategy: Strategy,
    kinds: Mapping[str, str],
) -> tuple[Nest, traced_step.Step, tf.Tensor]:
    """Prepare the step of this replica."""
    index = strategy.local_index()
    data, mine = slicing.forget_rows(batch.parts[index]), batch.counts[index]
    rows = _sum_over_replicas(mine) if isinstance(batch.rows, tuple) else batch.rows
    share = tf.math.divide_no_nan(tf.cast(mine, tf.float64), tf.cast(rows, tf.float64))
    own = step_function.__name__ == "train_step" and keras_models.takes_own_step(model)
    size = strategy.num_replicas_in_sync
    step = traced_step.Step(
        share, size, model, _sum_over_replicas, tf.cast(rows, tf.int64), kinds, own
    )
    step.present = mine > 0
    return data, step, step.present


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Return the state variables of every metric of a model, the loss tracker among them."""
    found = [v for metric in keras_models.metrics_of(model) for v in metric.variables]
    return list({id(v): v for v in found}.values())


def _forget_padding(
    present: tf.Tensor, before: Mapping[int, tf.Tensor], model: keras.Model
) -> None:
    """Restore the metrics of a replica that has no rows."""

    def restore() -> tf.Tensor:
        for variable in metric_variables(model):
            variable.assign(before.get(id(variable), tf.zeros_like(variable)))
        return tf.constant(True)

    tf.cond(present, lambda: tf.constant(False), restore)


def check_reduced(step: traced_step.Step, model: keras.Model, strategy: Strategy) -> None:
    """Check that a train step gave its gradients to an optimizer that reduces them."""
    if step.reductions or not model.trainable_variables:
        return
    if tf.executing_eagerly() and any(
        shared_optimizer.accumulates(optimizer)
        for optimizer in shared_optimizer.optimizers_of(model)
    ):
        return  # Eagerly, an accumulation window reduces only when it closes.
    raise NotDistributedError(
        at_rank(
            strategy.rank,
            f"the first training step of model {model.name!r} finished without reducing any "
            f"gradient over {strategy.num_replicas_in_sync} replicas, so each would train "
            "alone. Its train_step must hand gradients to an optimizer that is an attribute of the "
            "model (self.optimizer.apply(gradients, self.trainable_variables)).",
        )
    )


class WorldState:
    """A step's state over all replicas: metrics summed, moving statistics averaged.

    One reduction serves all results that a step asks for, unless it assigns variables between them.
    """

    def __init__(self, step: traced_step.Step, before: Mapping[int, tf.Tensor], present: tf.Tensor):
        self._step = step
        self._before = before
        self._present = present
        self._reduced_at = -1
        self._averaged: dict[int, int] = {}
        self._totals: list[tuple[keras.Variable, tf.Tensor]] = []
        self._inside = False

    def result_of(self, original: Callable[[], Nest]) -> Nest:
        """Compute a metric's `result` from the state of all replicas."""
        if self._inside:
            return original()
        if self._reduced_at != self._step.assignments:
            self._reduce([v for v in metric_variables(self._step.model) if v.aggregation == "sum"])
        self._inside = True
        try:
            with keras.StatelessScope(state_mapping=self._totals):
                return keras.tree.map_structure(_value_of, original())
        finally:
            self._inside = False

    def average(self) -> None:
        """Average the moving statistics that were assigned since the last reduction."""
        if self._unaveraged():
            self._reduce([])

    def _unaveraged(self) -> list[keras.Variable]:
        return [
            v
            for v in local_steps.moving_statistics(self._step)
            if self._averaged.get(id(v)) != self._step.assigned_at[id(v)]
        ]

    def _reduce(self, summed: list[keras.Variable]) -> None:
        step, replica = self._step, tf.distribute.get_replica_context()
        averaged = self._unaveraged()
        values = [self._counted(v) for v in summed] + [step.weighed(v) for v in averaged]
        # Run beside the gradients' collectives: this state is ready earlier.
        with tf_replicas.counted_if(None), replica.strategy.concurrent("state"):
            reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, values) if values else []
        self._totals = list(zip(summed, reduced, strict=False))
        for variable, mean in zip(averaged, reduced[len(summed) :], strict=True):
            variable.assign(mean)
            self._averaged[id(variable)] = step.assigned_at[id(variable)]
        self._reduced_at = step.assignments if summed else -1

    def _counted(self, variable: keras.Variable) -> tf.Tensor:
        now = tf.convert_to_tensor(variable)
        before = self._before.get(id(variable))
        return tf.where(self._present, now, tf.zeros_like(now) if before is None else before)


def _value_of(result: tf.Tensor | keras.Variable) -> tf.Tensor:
    return tf.convert_to_tensor(result) if isinstance(result, keras.Variable) else result


def result_of(metric: keras.Metric, original: Callable[[], Nest]) -> Nest:
    """Compute a metric's result from the state of all replicas, in place of `Metric.result`."""
    step = traced_step.current()
    if step is None:
        return original()
    result = original() if step.result_of is None else step.result_of(original)
    # Some metrics return a variable, which outside `result_of` holds this replica's value.
    result = keras.tree.map_structure(_value_of, result)
    for path, value in keras.tree.flatten_with_path(result):
        if isinstance(value, tf.Tensor):
            step.results.setdefault(value.ref(), (metric, path))
    return result


def _sum_numbers(step: traced_step.Step, logs: Nest) -> Nest:
    """Sum over replicas the numbers that a step logs besides metric results."""
    numbers = step_logs.numbers_of(step, logs)
    if not numbers:
        return logs
    replica = tf.distribute.get_replica_context()
    with tf_replicas.counted_if(None), replica.strategy.concurrent("state"):
        sums = replica.all_reduce(
            tf.distribute.ReduceOp.SUM, [step.weighed(value) for _, value in numbers]
        )
    found = dict(zip((name for name, _ in numbers), sums, strict=True))
    return step_logs.replaced(logs, found)


def without_optionals(data: Nest) -> Nest:
    """Replace values that Keras marks as absent (`Optional`) by None."""
    return keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
