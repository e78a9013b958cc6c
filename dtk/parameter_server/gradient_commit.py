"""Apply the gradients in workers' buffers to the weights, on the servers."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_optimizers, keras_variables, tf_replicas
from dtk.errors import NotDistributedError
from dtk.nests import Array
from dtk.parameter_server import functional_step, gradient_buffers
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.gradient_buffers import Gradient, GradientBuffer, Weight
from dtk.parameter_server.job_context import JobTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.tracing import lookups, traced_step


class GradientCommit:
    """Applies a step's gradients and its changes of statistics on the servers."""

    def __init__(self, trainer: JobTrainer):
        self._trainer, self._strategy, self._model = trainer, trainer.strategy, trainer.model
        self._buffers: collections.deque[GradientBuffer] = collections.deque()
        self._plan: list[tuple[keras.Optimizer, list[Weight]]] = []
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
        parts_of, variables = self._trainer.parts_of, self._model.trainable_variables
        weights = [part for v in variables for part in parts_of(v)]
        sparse = {id(part) for v in variables if self._is_sparse(v) for part in parts_of(v)}
        return gradient_buffers.layout_for(self._strategy.exchange, weights, sparse)

    def _is_sparse(self, variable: keras.Variable) -> bool:
        return id(variable) in {id(table) for table in self.tables} | self._looked_up

    # While a step is traced.

    def plan(self, traced: FunctionalStep) -> list[Gradient]:
        """Put gradients into the layout's order, and note which optimizer applies them."""
        if not traced.applied and self._model.trainable_variables:
            raise self._refusal(
                "handed no gradient to an optimizer that is an attribute of the model, so nothing "
                "would be trained; it must call self.optimizer.apply(gradients, "
                "self.trainable_variables)"
            )
        found: dict[int, Gradient] = {}
        self._plan = []
        for optimizer, gradients, variables in traced.applied:
            planned: list[Weight] = []
            for gradient, variable in zip(gradients, variables, strict=True):
                parts = self._checked_parts(optimizer, variable)
                tagged = self._tagged(optimizer, gradient, variable, traced.step)
                split = gradient_buffers.split_gradient(tagged, variable)
                for part, one in zip(parts, split, strict=True):
                    if id(part) in found:
                        raise self._refusal(
                            "updates a weight twice in a step; behind parameter servers a step "
                            "applies one gradient to each weight"
                        )
                    found[id(part)] = one
                planned += parts
            self._plan.append((optimizer, planned))
        ordered = [found.get(id(w)) for w in self.layout.weights]
        pairs = zip(self.layout.weights, ordered, strict=True)
        self._without_gradient = {id(w) for w, g in pairs if g is None}
        return ordered

    def _refusal(self, what: str) -> NotDistributedError:
        return NotDistributedError(f"the train_step of model {self._model.name!r} {what}")

    def _tagged(
        self,
        optimizer: keras.Optimizer,
        gradient: Gradient,
        variable: keras.Variable,
        step: traced_step.Step,
    ) -> Gradient:
        """Tag the slices of a table's gradient with their origin, if the optimizer needs it."""
        # No tags if a worker sums several batches: one process would not add their slices either.
        accrues = self._strategy.exchange is not None
        if gradient is None or accrues or keras_optimizers.is_linear(optimizer):
            return gradient
        if not self._is_sparse(variable):
            if isinstance(gradient, tf.IndexedSlices):
                self._make_room(variable)
            return gradient
        slices = functional_step.as_slices(gradient)
        pieces = lookups.known_pieces(slices, variable.path, self._strategy.rank, False, step)
        self.layout.tagged |= {id(part) for part in self._trainer.parts_of(variable)}
        return lookups.tagged(slices, pieces, variable.shape[0])

    def _make_room(self, variable: keras.Variable) -> None:
        """Change the layout, from the next trace on, for sparse gradients of a variable."""
        self._looked_up.add(id(variable))
        self.__dict__.pop("layout", None)
        self._buffers.clear()
        self._commits.clear()

    def _checked_parts(self, optimizer: keras.Optimizer, variable: keras.Variable) -> list[Weight]:
        parts = self._trainer.parts_of(variable)
        if not {id(part) for part in parts} <= {id(weight) for weight in self.layout.weights}:
            raise self._refusal(
                f"hands a gradient of {variable.path!r} to optimizer {optimizer.name!r}, which is "
                "no trainable weight of the model, so workers have no place to send it to; make "
                "the layer that has it an attribute of the model"
            )
        shared_optimizer.check_parts(optimizer, variable, parts)
        return parts

    def moved_by(self, traced: FunctionalStep) -> list[tf.Tensor]:
        """Return by how much a step changes statistics, such as batch normalization's."""
        before = {id(variable): value for variable, value in traced.state}
        states = {id(variable) for variable in self._trainer.seed_states()}
        moving = (set(traced.step.assigned) & set(before)) - states
        self._moving = [v for v in self._model.non_trainable_variables if id(v) in moving]
        return [traced.value(v) - before[id(v)] for v in self._moving]

    # While steps are computed.

    def take_buffer(self) -> GradientBuffer:
        """Return an unused gradient buffer.

        The buffer of a lost worker is never reused: the worker may come back and write to it.
        """
        try:
            return self._buffers.pop()
        except IndexError:
            return GradientBuffer(self.layout)

    def release(self, buffer: GradientBuffer) -> None:
        """Take a gradient buffer back."""
        self._buffers.append(buffer)

    # On the servers.

    def apply(
        self,
        buffers: Sequence[GradientBuffer],
        shares: Sequence[float],
        moved: Sequence[Sequence[Array]],
    ) -> None:
        """Have the servers apply the gradients in some buffers."""
        count = len(buffers)
        if count not in self._commits:
            self._commits[count] = self._commit_function(count)
        changes = []
        for index, variable in enumerate(self._moving):
            dtype = keras_variables.stored(variable).dtype
            change = sum(share * m[index] for share, m in zip(shares, moved, strict=True))
            # Counts are sums of shares.
            changes.append(tf.cast(np.rint(change) if dtype.is_integer else change, dtype))
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
        with tf_replicas.in_replica(self._strategy), tf.compat.v1.device(_near_inputs):
            gradients = {
                id(w): None if id(w) in self._without_gradient else g
                for w, g in zip(self.layout.weights, self.layout.take(buffers), strict=True)
            }
            for optimizer, parts in self._plan:
                shared_optimizer.apply_now(optimizer, [gradients[id(p)] for p in parts], parts)
            for variable, change in zip(self._moving, moved, strict=True):
                keras_variables.stored(variable).assign_add(change)


def _near_inputs(op: tf.Operation) -> str:
    """Return the device of an operation; if it has none, of its first input on a server.

    Clipping, loss scaling and the like name no device, and must not pull gradients to the chief.
    """
    devices = [op.device] if op.device else [t.device for t in op.inputs if "/job:ps" in t.device]
    return devices[0] if devices else ""
