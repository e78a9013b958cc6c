"""One replica's step, made exact.

Keras's own train or test step runs on this replica's slice; what it leaves is then made global:

* Metric state is summed over ranks after every step, so logs are those of one process.
* Non-trainable state that a step assigns (moving statistics) is averaged, weighted by share.
* A replica without rows computes with a stand-in, whose metrics are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dtk.errors import NotDistributedError, at_rank
from dtk.strategies import adopt, extended, optimizing, slicing, tracing


def run_step(step_function: Callable, batch: slicing.Slices, model: Any, strategy: Any) -> Any:
    """Run Keras's own train or test step on this replica's slice, then make its logs global."""
    index = strategy.local_index()
    data, mine = slicing.forget_rows(batch.parts[index]), batch.counts[index]
    rows = _sum_over_replicas(mine) if isinstance(batch.rows, tuple) else batch.rows
    share = tf.cast(
        tf.math.divide_no_nan(tf.cast(mine, tf.float64), tf.cast(rows, tf.float64)), tf.float32
    )

    size = strategy.num_replicas_in_sync
    step = tracing.Step(share, size, model, _sum_over_replicas, tf.cast(rows, tf.int64))
    before = {id(v): tf.identity(v) for v in metric_variables(model)}
    with tracing.tracing(step), extended.counted_if(mine > 0):
        logs = step_function(data)
    _forget_stand_in(mine > 0, before, model)
    if step_function.__name__ == "train_step":
        _check_reduced(step, model, strategy)
        together = weights_are_equal(model)
        if together is not None:
            return _own_state(step, model, logs, together)
    return _global_state(step, model, logs)


def weights_are_equal(model: Any) -> tf.Tensor | None:
    """Whether all replicas hold the same weights now; None where they always do."""
    flags = [flag for e in optimizing.exchangings_of(model) for flag in e.together()]
    return tf.reduce_all(flags) if flags else None


def share_of_meeting(model: Any) -> tf.Tensor:
    """What this replica counts in a mean over replicas that have just met; they add up to 1."""
    shares = [e.share() for e in optimizing.exchangings_of(model)]
    return next(share for share in shares if share is not None)


def _own_state(step: tracing.Step, model: Any, logs: Any, together: tf.Tensor) -> Any:
    """Where replicas train apart, nothing is sent until they meet: logs are this replica's own.

    What metrics have counted is summed when an epoch's logs are made.
    """
    averaged = _moving_statistics(step)
    values = [tf.convert_to_tensor(v) for v in averaged]
    replica = tf.distribute.get_replica_context()
    if averaged:
        share = share_of_meeting(model)
        parts = [tf.math.multiply_no_nan(v, tf.cast(share, v.dtype)) for v in values]
        means = tf.cond(
            together,
            lambda: replica.all_reduce(tf.distribute.ReduceOp.SUM, parts),
            lambda: values,
        )
        for variable, mean in zip(averaged, means, strict=True):
            variable.assign(mean)
    if not isinstance(logs, dict):
        return logs
    return logs | {
        name: tf.math.divide_no_nan(value, tf.cast(step.share, value.dtype))
        for name, value in logs.items()
        if tf.is_tensor(value) and value in step.parts
    }


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def metric_variables(model: Any) -> list:
    """State variables of every metric of a model, the loss tracker among them."""
    return [v for metric in model.metrics for v in metric.variables]


def _forget_stand_in(present: tf.Tensor, before: dict, model: Any) -> None:
    """Without rows of its own, a replica's metrics stay as they were.

    But for what counts batches and not rows, see `count_batches`: there it adds zero and counts.
    """
    counts_batches = set() if tf.executing_eagerly() else count_batches(model)

    def restore() -> tf.Tensor:
        for variable in metric_variables(model):
            if id(variable) in counts_batches:
                continue
            variable.assign(before.get(id(variable), tf.zeros_like(variable)))
        return tf.constant(True)

    tf.cond(present, lambda: tf.constant(False), restore)


def count_batches(model: Any) -> set[int]:
    """Ids of the metric variables that count batches, in a graph: trackers of single outputs.

    `tracing` gives them losses whose mean over the replicas' counts is the batch's.
    """
    compile_loss = adopt.compile_loss(model)
    if compile_loss is None:
        return set()
    return {id(v) for metric in compile_loss.metrics for v in metric.variables}


def _check_reduced(step: tracing.Step, model: Any, strategy: Any) -> None:
    if step.reductions or not model.trainable_variables:
        return
    if tf.executing_eagerly() and any(
        optimizing.accumulates(optimizer) for optimizer in optimizing.optimizers_of(model)
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


def _global_state(step: tracing.Step, model: Any, logs: Any) -> Any:
    """One reduction for all that must be global after a step: metrics and moving statistics."""
    replica = tf.distribute.get_replica_context()
    summed = [v for v in metric_variables(model) if v.aggregation == "sum"]
    averaged = _moving_statistics(step)
    numbers = other_logs(step, logs)
    share = step.share
    values = (
        [tf.convert_to_tensor(v) for v in summed]
        + [
            tf.math.multiply_no_nan(tf.convert_to_tensor(v), tf.cast(share, v.dtype))
            for v in averaged
        ]
        + list(numbers.values())
    )
    if not values:
        return logs
    # They are ready before the gradients are.
    with replica.strategy.beside("state"):
        reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, values)
    totals, means = reduced[: len(summed)], reduced[len(summed) : len(summed) + len(averaged)]
    for variable, mean in zip(averaged, means, strict=True):
        variable.assign(mean)
    if not isinstance(logs, dict):
        return logs
    with keras.StatelessScope(state_mapping=list(zip(summed, totals, strict=True))):
        counted = _counted(model, set(step.assigned))
    logs = {name: counted.get(name, value) for name, value in logs.items()}
    others = reduced[len(summed) + len(averaged) :]
    return {**logs, **dict(zip(numbers, others, strict=True))}


def other_logs(step: tracing.Step, logs: Any) -> dict:
    """What adds up to the numbers a custom step returned that are no metric it has updated."""
    if not isinstance(logs, dict):
        return {}
    counted = _counted(step.model, set(step.assigned))
    return {
        name: value
        if value in step.parts
        else tf.math.multiply_no_nan(value, tf.cast(step.share, value.dtype))
        for name, value in logs.items()
        if name not in counted and tf.is_tensor(value) and value.dtype.is_floating
    }


def _counted(model: Any, assigned: set[int]) -> dict:
    """Results of the metrics a step has updated."""
    names: set[str] = set()
    for metric in model.metrics:
        if any(id(v) in assigned for v in metric.variables):
            result = metric.result()
            names |= set(result) if isinstance(result, dict) else {metric.name}
    return {name: value for name, value in model.get_metrics_result().items() if name in names}


def _moving_statistics(step: tracing.Step) -> list:
    """Non-trainable floats the step assigned, but for those synchronized layers keep equal."""
    model = step.model
    exact = {
        id(v)
        for layer in adopt.layers_of(model)
        if getattr(layer, "synchronized", False)
        for v in layer.non_trainable_variables
    }
    return [
        v
        for v in model.non_trainable_variables
        if id(v) in step.assigned and id(v) not in exact and keras.backend.is_float_dtype(v.dtype)
    ]


def predict_rows(data: Any, model: Any) -> Any:
    """Keras's predict step on this replica's rows, of which there may be none."""
    data = slicing.forget_rows(without_optionals(data))
    outputs = model.predict_step(slicing.stand_in(data))
    rows = slicing.count_rows(data)
    return keras.tree.map_structure(lambda output: _first(output, rows), outputs)


def _first(output: Any, rows: tf.Tensor) -> Any:
    if isinstance(output, tf.SparseTensor):
        raise ValueError(
            "predict cannot put sparse outputs of several workers together; end the model with "
            "tf.sparse.to_dense"
        )
    return output[:rows]


def without_optionals(data: Any) -> Any:
    """A structure in which what Keras marks as absent is None."""
    return keras.tree.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )
