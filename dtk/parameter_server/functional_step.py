"""Functional steps for workers of parameter servers: they change nothing.

A worker's step is traced as a pure function of data and state, and returns the changes that it
would have made. Tables are not part of the state: the step looks up a few rows on the servers.

Gradients that the step hands to optimizers are recorded, and applied afterwards. So the step must
not need the update. A step that hands over a weight's gradient and then reads the weight expects
the updated weight, which does not exist yet:

    d_optimizer.apply(gradients of the discriminator)      noted
    loss = loss_of(discriminator(generator(noise)))        reads the discriminator: refused

So a placeholder tensor replaces the weight after its gradient is handed over. If an operation
consumes the placeholder, the step has read the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.aligned_slices import concatenated
from dtk.compat import keras_models, keras_optimizers, keras_steps, keras_variables
from dtk.errors import NotDistributedError
from dtk.nests import Function, Tree
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica import step_metrics
from dtk.trainer.strategy import StepFunction
from dtk.trainer.tracing import traced_step

# Variables and the values that a step begins with.
State: TypeAlias = Sequence[tuple[keras.Variable, tf.Tensor]]


class FunctionalStep(NamedTuple):
    """Results of a traced step that has changed nothing."""

    data: Tree
    state: State
    logs: Tree  # returned by Keras's step
    applied: list[traced_step.Applied]  # gradients by optimizer, in the order the step passed them
    scope: keras.StatelessScope
    step: traced_step.Step
    rows_read: tf.Tensor  # bytes of table rows that the step looked up, int64 scalar

    def value(self, variable: keras.Variable) -> tf.Tensor:
        """Return the value that the step leaves in a variable."""
        return self.scope.get_current_value(variable)


def trace_functional_step(
    step_function: StepFunction,
    data: Tree,
    model: keras.Model,
    *,
    share: tf.Tensor,
    sum_over_replicas: Callable[[tf.Tensor], tf.Tensor],
    state: State,
    tables: Sequence[keras.Variable],
    kinds: Mapping[str, str],
    tried: bool = False,
    notes_losses: bool = False,
    times: tf.Variable | None = None,
) -> FunctionalStep:
    """Trace one of Keras's steps as a pure function of data and state."""
    scope = keras.StatelessScope(state_mapping=state, collect_losses=True)
    recorded = RecordedUpdates(scope, model, tables)
    step = traced_step.Step(
        share,
        model,
        sum_over_replicas,
        kinds=kinds,
        weighs_loss=traced_step.takes_own_step(step_function, model),
        tried=tried,
        noted=recorded,
        notes_losses=notes_losses,
        times=times,
    )
    with (
        traced_step.tracing(step),
        # Inside `tracing`, which looks for loss terms in the sources that this replaces.
        _tapes_watching(state, tables, recorded),
        traced_step.weighing_by_rows(),
        keras_steps.patch_metrics(keras_models.metrics_of(model), "result", step_metrics.result_of),
        _looked_up_in_place(tables, model, recorded),
        scope,
    ):
        logs = step_function(data)
    recorded.check(step.assigned)
    rows_read = tf.add_n(step.rows_read)
    return FunctionalStep(data, state, logs, recorded.applied, scope, step, rows_read)


def pulled_variables(
    model: keras.Model, *elsewhere: Iterable[keras.Variable]
) -> list[keras.Variable]:
    """Return the variables that a step reads whole from the servers."""
    without = {id(variable) for variables in elsewhere for variable in variables}
    without |= {id(variable) for variable in step_metrics.metric_variables(model)}
    return [variable for variable in model.variables if id(variable) not in without]


def pull(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    """Read variables once from their servers; traced, runs on a worker."""
    return [tf.identity(tf.convert_to_tensor(keras_variables.stored(v))) for v in variables]


def bytes_of(values: Sequence[tf.Tensor]) -> int:
    """Return the size of tensors of known shapes, in bytes."""
    return sum(value.shape.num_elements() * value.dtype.size for value in values)


def zero_metrics(model: keras.Model) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Return the metrics' variables, each with the zeros to count from; called while tracing."""
    metrics = step_metrics.metric_variables(model)
    return [(v, tf.zeros(v.shape, keras_variables.stored(v).dtype)) for v in metrics]


class RecordedUpdates(traced_step.NotedGradients):
    """Gradients handed to optimizers by a step that is being traced."""

    def __init__(
        self, scope: keras.StatelessScope, model: keras.Model, tables: Collection[keras.Variable]
    ):
        super().__init__()
        self._scope, self._model = scope, model
        self._tables = {id(variable) for variable in tables}
        self._graph = tf.compat.v1.get_default_graph()
        # Every weight with a placeholder, and the optimizer that will update it. A weight that is
        # noted twice has two.
        self._waiting: list[tuple[keras.Variable, keras.Optimizer, tf.Tensor]] = []
        self._looked_up: set[int] = set()
        self.placeholders: dict[int, tf.Tensor] = {}

    def note(self, applied: traced_step.Applied) -> None:
        """Record the gradients that an optimizer is to apply when the step is over."""
        optimizer, gradients, variables, _ = applied
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise NotDistributedError(
                f"the train_step of model {self._model.name!r} calls {optimizer.name}.apply inside "
                "a branch, a loop or a function of the graph (tf.cond, tf.while_loop, "
                "tf.function); behind parameter servers a step hands over its gradients once, "
                "in any case. Call apply in train_step itself, without @tf.function, or use "
                "AllReduceStrategy"
            )
        super().note(applied)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                self._put_placeholder(variable, optimizer)

    def _put_placeholder(self, variable: keras.Variable, optimizer: keras.Optimizer) -> None:
        if id(variable) in self._tables:
            # Reading a table would fetch all of it. A step that reads this placeholder is refused.
            value = tf.zeros(variable.shape, keras_variables.stored(variable).dtype)
        else:
            now = self._scope.get_current_value(variable)
            value = tf.identity(keras_variables.stored(variable) if now is None else now)
        self.placeholders[id(variable)] = value
        self._waiting.append((variable, optimizer, value))
        self._scope.add_update((variable, value))

    def note_lookup(self, variable: keras.Variable) -> None:
        """Record that rows of a table are looked up."""
        if id(variable) in self.placeholders:
            self._looked_up.add(id(variable))

    def check(self, assigned: Collection[int]) -> None:
        """Refuse a traced step that reads weights after their update, or assigns them itself."""
        read = {
            id(variable): (variable, optimizer)
            for variable, optimizer, value in self._waiting
            if id(variable) in self._looked_up or value.consumers()
        }
        by_hand = [v for v in self._model.trainable_variables if id(v) in assigned]
        if read:
            variable, optimizer = next(iter(read.values()))
            others = f" (and {len(read) - 1} more)" if len(read) > 1 else ""
            raise NotDistributedError(
                f"the train_step of model {self._model.name!r} reads {variable.path!r}{others} "
                f"after it has handed the gradient to optimizer {optimizer.name!r}, so it needs "
                "its own update before the step is over. Behind parameter servers gradients are "
                "applied when the step is over: it would go on with the old weights, and train "
                "something else than one process does. Use AllReduceStrategy, where every worker "
                "updates inside the step (start with `dtk run -n 2 train.py`, without --ps); or "
                "compute every gradient before the first apply, if that is what you mean. A moving "
                "average of the weights is the optimizer's use_ema=True"
            )
        if by_hand:
            raise NotDistributedError(
                f"a step of model {self._model.name!r} assigns {by_hand[0].path!r}, which is "
                "trainable, by itself. Behind parameter servers only optimizers change trainable "
                "weights, and what a step assigns would be lost. Give the weight a "
                "constraint (kernel_constraint= and the like), make it trainable=False, or use "
                "AllReduceStrategy"
            )


def _tapes_watching(
    state: State, tables: Sequence[keras.Variable], recorded: RecordedUpdates
) -> AbstractContextManager[None]:
    """Let gradient tapes watch the values that replace variables."""
    trained = {id(variable): value for variable, value in state if variable.trainable}
    places = {id(variable): keras_variables.stored(variable) for variable in tables}

    def differentiate(
        gradient: keras_steps.Gradient,
        values: keras_steps.Values,
        target: Tree,
        sources: Tree,
        output_gradients: Tree,
    ) -> Tree:
        flat = keras.tree.flatten(sources)
        asked = [
            keras_variables.shards_of(places[id(s)]) or places[id(s)]
            if id(s) in places
            else (values or trained).get(id(s), s)
            for s in flat
        ]
        given_back = gradient(target, asked, output_gradients)
        assert isinstance(given_back, list)  # as `asked`
        gradients = [
            _whole_gradient(f, s) if isinstance(f, list | tuple) else f
            for f, s in zip(given_back, flat, strict=True)
        ]
        return keras.tree.pack_sequence_as(sources, gradients)

    return keras_steps.patch_tapes(differentiate, lambda: {**trained, **recorded.placeholders})


def _whole_gradient(
    parts: Sequence[tf.Tensor | tf.IndexedSlices | None], variable: keras.Variable
) -> tf.IndexedSlices | None:
    """Join the gradients of a table's parts into the gradient of the table."""
    pieces, first = [], 0
    shards = keras_variables.shards_of(keras_variables.stored(variable)) or ()
    for part, shard in zip(parts, shards, strict=True):
        if part is not None:
            sparse = as_slices(part)
            indices = tf.cast(sparse.indices, tf.int64) + first
            pieces.append(rows_of(sparse.values, indices, variable.shape))
        first += shard.shape[0]
    return concatenated(pieces) if pieces else None


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
        x: tf.Tensor, indices: tf.Tensor, axis: int | None = None, *, original: Function[tf.Tensor]
    ) -> tf.Tensor:
        dense = not isinstance(indices, tf.SparseTensor | tf.RaggedTensor)
        if id(x) not in places or axis != 0 or not dense:
            return original(x, indices, axis)
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
