"""Apply the gradients in workers' buffers to the weights, on the servers."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_optimizers, keras_variables, tf_replicas
from dtk.errors import NotDistributedError
from dtk.nests import Array
from dtk.parameter_server import functional_step, gradient_buffers
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.job_context import JobTrainer
from dtk.trainer.gradients import shared_optimizer, variable_parts
from dtk.trainer.tracing import lookups, traced_step

# Makes a layout from weights, and the ids of the weights with sparse gradients.
NewLayout: TypeAlias = Callable[
    [list[gradient_buffers.Weight], set[int]], gradient_buffers.BufferLayout
]


class GradientCommit:
    """Applies a step's gradients and its changes of statistics on the servers."""

    def __init__(
        self,
        trainer: JobTrainer,
        new_layout: NewLayout = gradient_buffers.BufferLayout,
    ):
        self._trainer, self._new_layout = trainer, new_layout
        self._model = trainer.model
        self._buffers: collections.deque[gradient_buffers.GradientBuffer] = collections.deque()
        self._plan: list[tuple[keras.Optimizer, list[gradient_buffers.Weight]]] = []
        self._without_gradient: set[int] = set()
        self._looked_up: set[int] = set()
        self._moving: list[keras.Variable] = []
        self._commits: dict[int, tf.types.experimental.ConcreteFunction] = {}

    @functools.cached_property
    def tables(self) -> list[keras.Variable]:
        """Variables that steps look rows up in; known when the first step is traced."""
        return list(keras_models.tables_of(self._model))

    @functools.cached_property
    def layout(self) -> gradient_buffers.BufferLayout:
        """Layout of gradient buffers; known when the first step is traced."""
        parts_of = self._trainer.parts_of
        weights = [part for v in self._model.trainable_variables for part in parts_of(v)]
        sparse = [v for v in self._model.trainable_variables if self._is_sparse(v)]
        return self._new_layout(weights, {id(part) for v in sparse for part in parts_of(v)})

    def _is_sparse(self, variable: keras.Variable) -> bool:
        tables = {id(table) for table in self.tables}
        return id(variable) in tables | self._looked_up

    def _make_room(self, variable: keras.Variable) -> None:
        """Change the layout, from the next trace on, for sparse gradients of a variable."""
        self._looked_up.add(id(variable))
        self.__dict__.pop("layout", None)
        self._buffers.clear()
        self._commits.clear()

    # While a step is traced.

    def plan(self, traced: FunctionalStep) -> list[gradient_buffers.Gradient]:
        """Put gradients into the layout's order, and note which optimizer applies them."""
        if not traced.applied and self._model.trainable_variables:
            raise NotDistributedError(
                f"the train_step of model {self._model.name!r} handed no gradient to an optimizer "
                "that is an attribute of the model, so nothing would be trained; it must call "
                "self.optimizer.apply(gradients, self.trainable_variables)"
            )
        found: dict[int, gradient_buffers.Gradient] = {}
        self._plan = []
        for optimizer, gradients, variables in traced.applied:
            parts = [p for v in variables for p in self._checked_parts(optimizer, v)]
            split = [
                g
                for gradient, v in zip(gradients, variables, strict=True)
                for g in gradient_buffers.split_gradient(
                    self._tagged(optimizer, gradient, v, traced.step), v
                )
            ]
            if set(found) & {id(p) for p in parts}:
                raise NotDistributedError(
                    f"the train_step of model {self._model.name!r} updates a weight twice in a "
                    "step; behind parameter servers a step applies one gradient to each weight"
                )
            found |= {id(p): g for p, g in zip(parts, split, strict=True)}
            self._plan.append((optimizer, parts))
        gradients = [found.get(id(w)) for w in self.layout.weights]
        self._without_gradient = {
            id(w) for w, g in zip(self.layout.weights, gradients, strict=True) if g is None
        }
        return gradients

    def _tagged(
        self,
        optimizer: keras.Optimizer,
        gradient: gradient_buffers.Gradient,
        variable: keras.Variable,
        step: traced_step.Step,
    ) -> gradient_buffers.Gradient:
        """Tag the slices of a table's gradient with their origin, if the optimizer needs it."""
        # No tags if a worker sums several batches: one process would not add their slices either.
        accrues = self._trainer.strategy.exchange is not None
        if gradient is None or accrues or keras_optimizers.is_linear(optimizer):
            return gradient
        if not self._is_sparse(variable):
            if isinstance(gradient, tf.IndexedSlices):
                self._make_room(variable)
            return gradient
        slices = functional_step.as_slices(gradient)
        rank = self._trainer.strategy.rank
        pieces = lookups.known_pieces(slices, variable.path, rank, False, step)
        self.layout.tagged |= {id(part) for part in self._trainer.parts_of(variable)}
        return lookups.tagged(slices, pieces, variable.shape[0])

    def _checked_parts(
        self, optimizer: keras.Optimizer, variable: keras.Variable
    ) -> list[gradient_buffers.Weight]:
        parts = self._trainer.parts_of(variable)
        if not {id(part) for part in parts} <= {id(weight) for weight in self.layout.weights}:
            raise NotDistributedError(
                f"the train_step of model {self._model.name!r} hands a gradient of "
                f"{variable.path!r} to optimizer {optimizer.name!r}, which is no trainable weight "
                "of the model, so workers have no place to send it to; make the layer that "
                "has it an attribute of the model"
            )
        variable_parts.check_parts(optimizer, variable, parts)
        return parts

    def moved_by(
        self, traced: FunctionalStep, given: Sequence[tuple[keras.Variable, tf.Tensor]]
    ) -> list[tf.Tensor]:
        """Return by how much a step changes statistics, such as batch normalization's."""
        before = {id(v): value for v, value in given}
        states = {id(v) for v in self._trainer.seed_states()}
        moving = (traced.assigned & set(before)) - states
        self._moving = [v for v in self._model.non_trainable_variables if id(v) in moving]
        now = traced.scope.get_current_value
        return [now(v) - before[id(v)] for v in self._moving]

    # While steps are computed.

    def take_buffer(self) -> gradient_buffers.GradientBuffer:
        """Return an unused gradient buffer.

        The buffer of a lost worker is never reused: the worker may come back and write to it.
        """
        try:
            return self._buffers.pop()
        except IndexError:
            return gradient_buffers.GradientBuffer(self.layout)

    def release(self, buffer: gradient_buffers.GradientBuffer) -> None:
        """Take a gradient buffer back."""
        self._buffers.append(buffer)

    # On the servers.

    def apply(
        self,
        buffers: Sequence[gradient_buffers.GradientBuffer],
        shares: Sequence[float],
        moved: Sequence[Sequence[Array]],
    ) -> None:
        """Have the servers apply the gradients in some buffers."""
        count = len(buffers)
        if count not in self._commits:
            self._commits[count] = self._commit_function(count)
        changes = [
            sum((share * m[i] for share, m in zip(shares, moved, strict=True)), start=0.0)
            for i in range(len(self._moving))
        ]
        changes = [
            _as(keras_variables.stored(v).dtype, change)
            for change, v in zip(changes, self._moving, strict=True)
        ]
        self._commits[count]([buffer.handles for buffer in buffers], changes)

    def _commit_function(self, count: int) -> tf.types.experimental.ConcreteFunction:
        # A handle's own specification has the buffer's declared length of 0.
        handle = tf.TensorSpec([], tf.resource)
        function = tf.function(self._commit, autograph=False)
        return function.get_concrete_function(
            [[handle for _ in self.layout.slots] for _ in range(count)],
            [tf.TensorSpec(v.shape, keras_variables.stored(v).dtype) for v in self._moving],
        )

    def _commit(self, buffers: list[list[tf.Tensor]], moved: list[tf.Tensor]) -> None:
        """Apply the gradients in some buffers; traced on the chief, runs on the servers."""
        with (
            tf_replicas.in_replica(self._trainer.strategy),
            tf.compat.v1.device(gradient_buffers.near_inputs),
        ):
            gradients = {
                id(w): None if id(w) in self._without_gradient else g
                for w, g in zip(self.layout.weights, self.layout.take(buffers), strict=True)
            }
            for optimizer, parts in self._plan:
                shared_optimizer.apply_now(optimizer, [gradients[id(p)] for p in parts], parts)
            for variable, change in zip(self._moving, moved, strict=True):
                keras_variables.stored(variable).assign_add(change)


def _as(dtype: tf.DType, change: Array | float) -> tf.Tensor:
    """Cast a change to a variable's dtype; round counts, which are sums of shares."""
    return tf.cast(np.rint(change) if dtype.is_integer else change, dtype)
