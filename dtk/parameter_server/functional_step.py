"""Functional steps for workers of parameter servers: they change nothing.

A worker's step is traced as a pure function of data and state, and returns the changes that it
would have made. Tables are not part of the state: the step looks up a few rows on the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import keras
import tensorflow as tf

from dtk.compat import keras_models, keras_optimizers, keras_steps, keras_variables
from dtk.nests import Function, Nest
from dtk.parameter_server.recorded_updates import RecordedUpdates
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import step_metrics
from dtk.trainer.strategy import StepFunction
from dtk.trainer.tracing import traced_step


class FunctionalStep(NamedTuple):
    """Results of a traced step that has changed nothing."""

    logs: Nest  # returned by Keras's step
    applied: list[traced_step.Applied]  # gradients by optimizer, in the order the step passed them
    # has the values that the step assigned (`keras.StatelessScope.get_current_value`)
    scope: keras.StatelessScope
    step: traced_step.Step
    rows_read: tf.Tensor  # bytes of table rows that the step looked up, int64 scalar

    @property
    def assigned(self) -> set[int]:
        """Ids of the Keras variables that the step assigned."""
        return set(self.step.assigned)


def trace_functional_step(
    step_function: StepFunction,
    data: Nest,
    model: keras.Model,
    *,
    share: tf.Tensor,
    world_sum: Callable[[tf.Tensor], tf.Tensor],
    state: Sequence[tuple[keras.Variable, tf.Tensor]],
    tables: Sequence[keras.Variable] = (),
    kinds: Mapping[str, str] | None = None,
    tried: bool = False,
) -> FunctionalStep:
    """Trace one of Keras's steps as a pure function of data and state."""
    scope = keras.StatelessScope(state_mapping=state, collect_losses=True)
    recorded = RecordedUpdates(scope, model, tables)
    own = traced_step.takes_own_step(step_function, model)
    step = traced_step.Step(
        share, model, world_sum, kinds=kinds or {}, own=own, tried=tried, noted=recorded
    )
    with (
        traced_step.tracing(step),
        # Inside `tracing`, which looks for loss terms in the sources that this replaces.
        _tapes_watching(state, tables, recorded),
        traced_step.in_shares(),
        keras_steps.patch_results(keras_models.metrics_of(model), step_metrics.result_of),
        _looked_up_in_place(tables, model, recorded),
        scope,
    ):
        logs = step_function(data)
    recorded.check(set(step.assigned))
    return FunctionalStep(logs, recorded.applied, scope, step, tf.add_n(step.rows_read))


def pulled_variables(
    model: keras.Model, *elsewhere: Iterable[keras.Variable]
) -> list[keras.Variable]:
    """Return the variables that a step reads whole from the servers."""
    without = {id(variable) for variables in elsewhere for variable in variables}
    without |= {id(variable) for variable in step_metrics.metric_variables(model)}
    return [variable for variable in model.variables if id(variable) not in without]


def zero_metrics(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return the metrics' variables, each with the zeros to count from; called while tracing."""
    metrics = step_metrics.metric_variables(model)
    return [(v, tf.zeros(v.shape, keras_variables.stored(v).dtype)) for v in metrics]


def _tapes_watching(
    state: Sequence[tuple[keras.Variable, tf.Tensor]],
    tables: Sequence[keras.Variable],
    recorded: RecordedUpdates,
) -> AbstractContextManager[None]:
    """Let gradient tapes watch the values that replace variables."""
    given = {id(variable): value for variable, value in state if variable.trainable}
    places = {id(variable): keras_variables.stored(variable) for variable in tables}

    def differentiate(
        gradient: keras_steps.Gradient,
        values: keras_steps.Values,
        target: Nest,
        sources: Nest,
        output_gradients: Nest,
    ) -> Nest:
        flat = keras.tree.flatten(sources)
        asked = [
            keras_variables.shards_of(places[id(s)]) or places[id(s)]
            if id(s) in places
            else (values or given).get(id(s), s)
            for s in flat
        ]
        found = [
            _whole_gradient(f, s) if isinstance(f, list | tuple) else f
            for f, s in zip(gradient(target, asked, output_gradients), flat, strict=True)
        ]
        return keras.tree.pack_sequence_as(sources, found)

    return keras_steps.patch_tapes(differentiate, lambda: {**given, **recorded.placeholders})


def _whole_gradient(
    parts: Sequence[tf.Tensor | tf.IndexedSlices | None], variable: keras.Variable
) -> tf.IndexedSlices | None:
    """Join the gradients of a table's parts into the gradient of the table."""
    rows, indices, first = [], [], 0
    shards = keras_variables.shards_of(keras_variables.stored(variable)) or ()
    for part, shard in zip(parts, shards, strict=True):
        if part is not None:
            sparse = as_slices(part)
            rows.append(sparse.values)
            indices.append(tf.cast(sparse.indices, tf.int64) + first)
        first += shard.shape[0]
    if not rows:
        return None
    return rows_of(tf.concat(rows, 0), tf.concat(indices, 0), variable.shape)


def rows_of(values: tf.Tensor, indices: tf.Tensor, shape: Sequence[int]) -> tf.IndexedSlices:
    """Return a gradient of some rows, with its shape as a tensor, as TensorFlow makes it.

    Keras computes with the shape and the row numbers together, so their dtypes must be equal.
    """
    return tf.IndexedSlices(values, indices, tf.constant(tuple(shape), indices.dtype))


def as_slices(gradient: tf.Tensor | tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a gradient as rows of a table; a dense one has all rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.IndexedSlices(gradient, tf.range(tf.shape(gradient, tf.int64)[0]))


def _looked_up_in_place(
    tables: Sequence[keras.Variable], model: keras.Model, recorded: RecordedUpdates
) -> AbstractContextManager[None]:
    """Let `keras.ops.take` fetch from tables only the rows it takes, each once.

    Then the gradient has each row once, too. But Keras squares and clips a sparse gradient row by
    row, so for Adam two equal row numbers differ from one with their sum. For such optimizers a row
    that was taken twice stays two rows, as in one process.
    """
    summed = all(map(keras_optimizers.is_linear, shared_optimizer.optimizers_of(model)))
    places = {id(variable): keras_variables.stored(variable) for variable in tables}

    def take_rows(
        x: tf.Tensor, indices: tf.Tensor, axis: int | None, take: Function[tf.Tensor]
    ) -> tf.Tensor:
        dense = not isinstance(indices, tf.SparseTensor | tf.RaggedTensor)
        if id(x) not in places or axis != 0 or not dense:
            return take(x, indices, axis)
        recorded.note_lookup(x)
        indices = tf.convert_to_tensor(indices)
        flat = tf.reshape(indices, [-1])
        flat = tf.where(flat < 0, flat + x.shape[0], flat)
        once, positions = tf.unique(flat) if summed else (flat, None)
        rows = tf.nn.embedding_lookup(places[id(x)], once)
        step = traced_step.current()
        if step is not None:
            step.note_read(rows)
        taken = rows if positions is None else tf.gather(rows, positions)
        return tf.reshape(taken, tf.concat([tf.shape(indices), x.shape[1:]], 0))

    return keras_steps.patch_take(take_rows)
