"""Train with workers behind parameter servers: the loop of `fit`.

A step is traced once, on the chief. A worker computes it as a function of a slice and of weights it
reads, and puts gradients into a gradient buffer on the servers; when all slices of a step are
there, the chief has the servers apply them. Weights and gradients never pass the chief.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_variables, tf_replicas
from dtk.errors import NotDistributedError
from dtk.input import slicing
from dtk.parameter_server import gradient_buffers, worker_data
from dtk.parameter_server.consistency_models import ahead
from dtk.parameter_server.contract import LoopTrainer
from dtk.parameter_server.dispatch import Result, SliceTask, whole_batch
from dtk.parameter_server.functional_step import FunctionalStep, trace_functional_step
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.testing import Counting
from dtk.trainer.gradients import partitioned_variables, shared_optimizer
from dtk.trainer.tracing.traced_step import Applied


class Training(Counting):
    """Loop of `fit`'s steps.

    Args:
        trainer: The model's trainer.
    """

    def __init__(self, trainer: LoopTrainer):
        strategy = trainer.strategy
        self._consistency = strategy.consistency
        schedule = functools.partial(Schedule.of, self._consistency, strategy.workers)
        super().__init__(trainer, schedule)
        self._epoch = self._rows = 0
        self._buffers: collections.deque[gradient_buffers.GradientBuffer] = collections.deque()
        self._layout: gradient_buffers.Layout | None = None
        self._plan: list[tuple[keras.Optimizer, list[gradient_buffers.Weight]]] = []
        self._without_gradient: set[int] = set()
        self._moving: list[keras.Variable] = []
        self._commits: dict[int, tf.types.experimental.ConcreteFunction] = {}

    @property
    def ahead(self) -> int:
        """Batches that may be under way when `step` returns; see `consistency_models.ahead`."""
        return ahead(self.schedule.tau, self.strategy.workers)

    def step(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> None:
        """Hand out one batch as the base class does; end the warm start when it is over.

        Args:
            batch: The batch in slices, or the pipelines that workers read themselves.
            spec: Specification of its slices, of any number of rows.
        """
        self._loosen_when_warm()
        super().step(batch, spec)

    def _loosen_when_warm(self) -> None:
        if self.schedule.tau != self._consistency.tau:
            warm_start = self._consistency.warm_start
            if warm_start is None or warm_start.is_over(self._epoch, self._rows):
                # Serial steps draw their random numbers one after the other; these have their own.
                self.drain()
                self.strategy.pool.offer(lambda: self.schedule.loosen(self._consistency.tau))

    def new_epoch(self, epoch: int) -> None:
        """Begin the statistics of staleness anew.

        Args:
            epoch: Number of the epoch that begins, from 0.
        """
        self._epoch = epoch
        self.schedule.take_statistics()

    # On the workers.

    def _prepare(self, spec: Any) -> None:
        if self._layout is None:
            weights = [p for v in self.model.trainable_variables for p in self.trainer.parts_of(v)]
            self._tables = keras_models.tables_of(self.model)
            self._layout = self._lay_out(
                weights, {id(p) for v in self._tables for p in self.trainer.parts_of(v)}
            )
        self._take_rng_state()
        self._draws = True
        key = gradient_buffers.key_of(spec)
        if key not in self._functions:
            self._functions[key] = self._trace(spec, self._layout)
            self._reports[key] = self._report

    def _lay_out(
        self, weights: list[gradient_buffers.Weight], sparse: set[int]
    ) -> gradient_buffers.Layout:
        return gradient_buffers.Layout(weights, sparse)

    def _trace(
        self, spec: Any, layout: gradient_buffers.Layout
    ) -> tf.types.experimental.ConcreteFunction:
        assert self._rng_state is not None
        handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]
        scalar = tf.TensorSpec([], tf.float32)
        rng_state = tf.TensorSpec(self._rng_state.shape, tf.uint32)
        function = tf.function(self._step, autograph=False)
        return function.get_concrete_function(spec, scalar, scalar, rng_state, handles)

    def _step(
        self,
        data: Any,
        share: tf.Tensor,
        size: tf.Tensor,
        rng_state: tf.Tensor,
        handles: list[tf.Tensor],
    ) -> tf.Tensor:
        """Keras's step on one slice; traced on the chief, runs on a worker, fills a buffer."""
        model, strategy, layout = self.model, self.strategy, self._layout
        assert layout is not None
        with tf_replicas.in_replica(strategy):
            state, read = self._state(self._tables)
            data = whole_batch(data)
            state += self._rng_states(rng_state)
            traced = trace_functional_step(
                model.train_step,
                data,
                model,
                share=share,
                size=size,
                world_sum=strategy.sum_over_slices,
                state=state,
                tables=self._tables,
                kinds=self.trainer.kinds_of("train"),
            )
            sent = layout.put(layout.contents(self._plan_for(traced.applied)), handles)
            return self._report_of(
                {
                    **self._results(traced, data, state),
                    "traffic": tf.stack([read + traced.rows_read, sent]),
                }
            )

    def _results(self, traced: FunctionalStep, data: Any, state: list) -> dict:
        """Collect what is reported of a traced step, besides its gradients."""
        states = self.trainer.rng_state_variables()
        before = {id(v): value for v, value in state}
        moving = (traced.assigned & set(before)) - {id(v) for v in states}
        self._moving = [v for v in self.model.non_trainable_variables if id(v) in moving]
        now = traced.scope.get_current_value
        return {
            **self._count(traced, data),
            "moved": [now(v) - before[id(v)] for v in self._moving],
            "rng_state": [now(v) for v in states],
        }

    def _plan_for(self, applied: Sequence[Applied]) -> list[gradient_buffers.Gradient]:
        """Put gradients into the layout's order, and note which optimizer is to apply them."""
        assert self._layout is not None
        if not applied and self.model.trainable_variables:
            raise NotDistributedError(
                f"the train_step of model {self.model.name!r} handed no gradient to an optimizer "
                "that is an attribute of the model, so nothing would be trained; it must call "
                "self.optimizer.apply(gradients, self.trainable_variables)"
            )
        found: dict[int, gradient_buffers.Gradient] = {}
        self._plan = []
        for optimizer, gradients, variables in applied:
            parts = [p for v in variables for p in self._checked_parts(optimizer, v)]
            split = [
                g
                for gradient, v in zip(gradients, variables, strict=True)
                for g in gradient_buffers.split_gradient(gradient, v)
            ]
            if set(found) & {id(p) for p in parts}:
                raise NotDistributedError(
                    f"the train_step of model {self.model.name!r} updates a weight twice in a "
                    "step; behind parameter servers a step applies one gradient to each weight"
                )
            found |= {id(p): g for p, g in zip(parts, split, strict=True)}
            self._plan.append((optimizer, parts))
        gradients = [found.get(id(w)) for w in self._layout.weights]
        self._without_gradient = {
            id(w) for w, g in zip(self._layout.weights, gradients, strict=True) if g is None
        }
        return gradients

    def _checked_parts(
        self, optimizer: keras.Optimizer, variable: keras.Variable
    ) -> list[gradient_buffers.Weight]:
        assert self._layout is not None
        parts = self.trainer.parts_of(variable)
        if not {id(part) for part in parts} <= {id(weight) for weight in self._layout.weights}:
            raise NotDistributedError(
                f"the train_step of model {self.model.name!r} hands a gradient of "
                f"{variable.path!r} to optimizer {optimizer.name!r}, which is no trainable weight "
                "of the model, so workers have no place to send it to; make the layer that "
                "has it an attribute of the model"
            )
        partitioned_variables.check_parts(optimizer, variable, parts)
        return parts

    def _compute(self, work: SliceTask, worker: int) -> Result:
        piece, batch = work
        buffer = self._free_buffer()
        outputs, share = self._call(batch, piece, worker, self._rng_state_of(piece), buffer.handles)
        self.strategy.note_traffic(worker, outputs["traffic"])
        return Result(outputs, share, buffer, self._buffers.append)

    def _free_buffer(self) -> gradient_buffers.GradientBuffer:
        # One whose worker was lost is never used again: the lost may come back and write to it.
        try:
            return self._buffers.pop()
        except IndexError:
            assert self._layout is not None
            return gradient_buffers.GradientBuffer(self._layout)

    # On the servers.

    def _finish(self, step: int, results: list[Result]) -> None:
        count = len(results)
        if count not in self._commits:
            self._commits[count] = self._commit_function(count)
        moved = [
            sum((r.share * r.outputs["moved"][i] for r in results), start=0.0)
            for i in range(len(self._moving))
        ]
        moved = [
            _as(keras_variables.stored(v).dtype, m)
            for m, v in zip(moved, self._moving, strict=True)
        ]
        buffers = [r.buffer.handles for r in results if r.buffer is not None]
        self._commits[count](buffers, moved)
        if not self.schedule.tau and results[0].outputs["rng_state"]:
            # One after the other, steps go on from where the last one stopped.
            self._rng_state = np.array(results[0].outputs["rng_state"], "uint32")
        self._add_up(results)
        if self.schedule.tau != self._consistency.tau:
            self._count_rows(results)
        if self.schedule.tau:
            statistics = self.schedule.statistics
            self.logs["staleness_mean"] = statistics.mean
            self.logs["staleness_max"] = float(statistics.max)

    def _count_rows(self, results: list[Result]) -> None:
        rows = sum(int(r.outputs["rows"]) for r in results)
        if not self._rows:
            # A batch of a run that is resumed counts as each of those before it.
            batches = sum(r.outputs.get("batches", 1) for r in results)
            optimizer = shared_optimizer.optimizers_of(self.model)[0]
            self._rows = (int(optimizer.iterations.numpy()) - 1) * rows // batches
        self._rows += rows

    def _commit_function(self, count: int) -> tf.types.experimental.ConcreteFunction:
        assert self._layout is not None
        # A handle's own specification would tell the buffer's declared length, which is no length.
        handle = tf.TensorSpec([], tf.resource)
        function = tf.function(self._commit, autograph=False)
        return function.get_concrete_function(
            [[handle for _ in self._layout.slots] for _ in range(count)],
            [tf.TensorSpec(v.shape, keras_variables.stored(v).dtype) for v in self._moving],
        )

    def _commit(self, buffers: list[list[tf.Tensor]], moved: list[tf.Tensor]) -> None:
        """Apply the gradients in some buffers; traced on the chief, runs on the servers."""
        assert self._layout is not None
        with (
            tf_replicas.in_replica(self.strategy),
            tf.compat.v1.device(gradient_buffers.near_inputs),
        ):
            gradients = {
                id(w): None if id(w) in self._without_gradient else g
                for w, g in zip(self._layout.weights, self._layout.take(buffers), strict=True)
            }
            for optimizer, parts in self._plan:
                shared_optimizer.apply_now(optimizer, [gradients[id(p)] for p in parts], parts)
            for variable, change in zip(self._moving, moved, strict=True):
                keras_variables.stored(variable).assign_add(change)


def _as(dtype: tf.DType, change: np.ndarray | float) -> tf.Tensor:
    """Cast a change to a variable's type; a count that sixths add up to is a whole number."""
    return tf.cast(np.rint(change) if dtype.is_integer else change, dtype)
