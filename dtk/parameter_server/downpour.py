"""Training behind parameter servers that pushes, and fetches, less than every step.

What a worker holds between two calls are tensors that stay where they are:

    begin --> weights, rate, no gradient        from the servers
    step  --> weights, sum of gradients         a batch; as often as it takes
    push  --> gradient buffer                   what is significant; the rest waits for the next

See `dtk.exchange.Downpour` for what it does, and `training.py` for what it has in common.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_variables, tf_replicas, tf_servers
from dtk.input import slicing
from dtk.parameter_server import gradient_buffers, gradient_compression, worker_data
from dtk.parameter_server.contract import LoopTrainer
from dtk.parameter_server.dispatch import Batch, Result, SliceTask, whole_batch
from dtk.parameter_server.functional_step import trace_functional_step
from dtk.parameter_server.training import Training
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.replica.replica_step import metric_variables


class Held(NamedTuple):
    """Weights that a worker goes on with.

    Attributes:
        values: The weights.
        rate: The optimizer's learning rate, a scalar.
        nothing: Gradient of nothing, as `Layout.contents`.
        finished: Steps that were applied when the worker fetched them.
        pushes: How often the worker has pushed since.
    """

    values: list[tf.Tensor]
    rate: tf.Tensor
    nothing: list[tf.Tensor]
    finished: int
    pushes: int = 0


class DownpourTraining(Training):
    """Loop of `fit`'s steps, several to a push (Downpour SGD, Dean et al. 2012).

    Args:
        trainer: The model's trainer; its strategy has an exchange.

    Raises:
        ValueError: An optimizer scales gradients, accumulates them itself, or has several rates.
    """

    def __init__(self, trainer: LoopTrainer):
        super().__init__(trainer)
        exchange = self.strategy.exchange
        assert exchange is not None
        self._exchange = exchange
        self._check_optimizers()
        self._waiting: list[Batch] = []
        # Per worker, what it has not pushed yet.
        self._kept: dict[int, list[tf.Tensor]] = {}
        # And the weights it goes on with, if it fetches less often than it pushes.
        self._held: dict[int, Held] = {}
        self._begin: tf.types.experimental.ConcreteFunction | None = None

    def _check_optimizers(self) -> None:
        """Gradients of several steps are summed on the worker, as they are.

        Raises:
            ValueError: The optimizer scales them, counts steps itself, or has several rates.
        """
        for optimizer in shared_optimizer.optimizers_of(self.model):
            if isinstance(optimizer, keras.optimizers.MultiOptimizer):
                raise ValueError(
                    f"{self._exchange!r} trains on with the optimizer's rate on the worker, and "
                    f"optimizer {optimizer.name!r} has several; use one optimizer, or exchange=None"
                )
            scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            if scales or optimizer.gradient_accumulation_steps:
                raise ValueError(
                    f"{self._exchange!r} sums gradients on the worker, and optimizer "
                    f"{optimizer.name!r} {'scales its loss' if scales else 'accumulates them, too'}"
                    "; use one or the other"
                )

    def step(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> None:
        """Collect batches, and hand them out when there are enough of them for a push.

        Args:
            batch: The batch in slices, or the pipelines that workers read themselves.
            spec: Specification of its slices, of any number of rows.
        """
        self._loosen_when_warm()
        self._prepare(spec)
        added = self._batch(batch, spec)
        if self._waiting and gradient_buffers.key_of(
            self._waiting[0].spec
        ) != gradient_buffers.key_of(spec):
            self._push_out()
        self._waiting.append(added)
        if len(self._waiting) == self._exchange.push_every:
            self._push_out()

    def _push_out(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            rows = sum(batch.rows for batch in waiting)
            parts = tuple(batch.parts[0] if batch.parts else None for batch in waiting)
            first = waiting[0]
            self._hand_out(Batch((parts,), (rows,), rows, first.spec, first.pipelines))

    def drain(self) -> None:
        """Hand out the batches that wait for more, then do as the base class."""
        self._push_out()
        super().drain()

    def close(self) -> None:
        """Forget what workers kept, which belongs to this `fit`; then do as the base class."""
        self._waiting = []
        self._kept.clear()
        self._held.clear()
        super().close()

    # On the workers.

    def _lay_out(
        self, weights: list[gradient_buffers.Weight], sparse: set[int]
    ) -> gradient_buffers.Layout:
        if self._exchange.significant:
            return gradient_compression.FilteredLayout(weights, sparse, self._exchange.significant)
        if self._exchange.bits:
            return gradient_compression.QuantizedLayout(weights, sparse, self._exchange.bits)
        return super()._lay_out(weights, sparse)

    def _trace(
        self, spec: Any, layout: gradient_buffers.Layout
    ) -> tf.types.experimental.ConcreteFunction:
        assert self._rng_state is not None
        if self._begin is None:
            begin = tf.function(self._fetch, autograph=False).get_concrete_function()
            values, rate, nothing = begin.structured_outputs
            dense = len(layout.dense)
            self._state_spec = (
                [tf.TensorSpec(v.shape, v.dtype) for v in values],
                tf.TensorSpec([], rate.dtype),
                # Rows of tables grow with every batch.
                [tf.TensorSpec(n.shape, n.dtype) for n in nothing[:dense]]
                + [tf.TensorSpec([None], n.dtype) for n in nothing[dense:]],
            )
            handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]
            push = tf.function(self._push, autograph=False)
            self._send = push.get_concrete_function(
                self._state_spec[2], self._state_spec[2], self._state_spec[1], handles
            )
            self._begin = begin
        rng_state = tf.TensorSpec(self._rng_state.shape, tf.uint32)
        step = tf.function(self._local_step, autograph=False)
        return step.get_concrete_function(spec, rng_state, *self._state_spec)

    def _pulled_variables(self) -> list[keras.Variable]:
        elsewhere = [*metric_variables(self.model), *self._tables]
        without = {id(v) for v in [*elsewhere, *self.trainer.rng_state_variables()]}
        return [v for v in self.model.variables if id(v) not in without]

    def _fetch(self) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
        """Weights, the optimizer's rate, and a gradient of nothing; traced."""
        assert self._layout is not None
        with tf_replicas.in_replica(self.strategy):
            pulled, self._read = gradient_buffers.pull(self._pulled_variables())
            optimizers = shared_optimizer.optimizers_of(self.model)
            rate = tf.convert_to_tensor(optimizers[0].learning_rate) if optimizers else 0.0
            return [value for _, value in pulled], tf.identity(rate), self._layout.zeros()

    def _local_step(
        self,
        data: Any,
        rng_state: tf.Tensor,
        values: list[tf.Tensor],
        rate: tf.Tensor,
        accrued: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Keras's step on one batch, and plain SGD on this worker's copy of the weights; traced."""
        assert self._layout is not None
        model = self.model
        variables = self._pulled_variables()
        with tf_replicas.in_replica(self.strategy):
            data = whole_batch(data)
            metrics = metric_variables(model)
            state = list(zip(variables, values, strict=True))
            state += [(v, tf.zeros(v.shape, keras_variables.stored(v).dtype)) for v in metrics]
            state += self._rng_states(rng_state)
            traced = trace_functional_step(
                model.train_step,
                data,
                model,
                share=tf.constant(1.0),
                size=tf.constant(1.0),
                world_sum=lambda value: value,
                state=state,
                tables=self._tables,
            )
            accrued = self._layout.add(
                accrued, self._layout.contents(self._plan_for(traced.applied))
            )
            steps = {
                id(variable): tf.convert_to_tensor(gradient) * tf.cast(rate, gradient.dtype)
                for _, gradients, applied_to in traced.applied
                for gradient, variable in zip(gradients, applied_to, strict=True)
                if gradient is not None
            }
            now = traced.scope.get_current_value
            values = [
                value - tf.cast(steps[id(v)], value.dtype) if id(v) in steps else now(v)
                for v, value in zip(variables, values, strict=True)
            ]
            values = [tf.convert_to_tensor(value) for value in values]
            results = self._results(traced, data, state)
            states = results["rng_state"]
            drawn = tf.cast(tf.stack(states), rng_state.dtype) if states else rng_state
            report = self._report_of({**results, "read": traced.rows_read})
            return report, drawn, values, accrued

    def _push(
        self,
        accrued: list[tf.Tensor],
        kept: list[tf.Tensor],
        rate: tf.Tensor,
        handles: list[tf.Tensor],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Write what is to be sent into a buffer; the bytes of it, and what is kept; traced."""
        layout = self._layout
        assert layout is not None
        sent, kept = layout.compress(layout.add(accrued, kept), rate)
        return layout.put(sent, handles), kept

    def _compute(self, work: SliceTask, worker: int) -> Result:
        piece, batch = work
        buffer = self._free_buffer()
        begin, key = self._begin, gradient_buffers.key_of(batch.spec)
        step, report_of = self._functions[key], self._reports[key]
        assert begin is not None
        reports, pulled = [], 0
        with tf.device(tf_servers.CHIEF):
            rng_state = tf.constant(self._rng_state_of(piece))
        try:
            held = self._held.pop(worker, None)
            if held is None:
                values, rate, nothing = begin()
                held = Held(values, rate, nothing, self.schedule.finished)
            values, rate, nothing = held.values, held.rate, held.nothing
            pulled += self._read if not held.pushes else 0
            older = max(0, self.schedule.finished - held.finished - held.pushes)
            accrued = nothing
            for number, data in enumerate(batch.parts[0]):
                if number and number % self._exchange.fetch == 0:
                    values, rate, _ = begin()
                    pulled += self._read
                call = functools.partial(_called, step, rng_state, values, rate, accrued)
                if batch.pipelines is None:
                    report, rng_state, values, accrued = call(data)
                else:
                    report, rng_state, values, accrued = batch.pipelines.call(call, worker)
                reports.append(report_of.read(report.numpy()))
            sent, kept = self._send(accrued, self._kept.get(worker, nothing), rate, buffer.handles)
            sent = int(sent.numpy())
        except tf.errors.OpError:
            self._kept.pop(worker, None)
            raise
        # Serial steps read what the one before has written.
        pushes = held.pushes + 1 if self.schedule.tau else self._exchange.fetch
        if pushes * self._exchange.push_every < self._exchange.fetch:
            self._held[worker] = held._replace(values=values, pushes=pushes)
        if self._exchange.keeps:
            self._kept[worker] = kept
        outputs = _merge_reports(reports)
        traffic = np.array([pulled + sum(int(r["read"]) for r in reports), sent], np.int64)
        self.strategy.note_traffic(worker, traffic, len(reports))
        return Result(outputs, 1.0, buffer, self._buffers.append, older)

    def _finish(self, step: int, results: list[Result]) -> None:
        super()._finish(step, results)
        more = sum(r.outputs["batches"] for r in results) - 1
        if more:
            for optimizer in shared_optimizer.optimizers_of(self.model):
                keras_variables.stored(optimizer.iterations).assign_add(more)


def _called(
    step: tf.types.experimental.ConcreteFunction,
    rng_state: tf.Tensor,
    values: list[tf.Tensor],
    rate: tf.Tensor,
    accrued: list[tf.Tensor],
    data: Any,
) -> Any:
    return step(data, rng_state, values, rate, accrued)


def _merge_reports(reports: list[dict]) -> dict:
    """Merge what several batches reported; of what does not add up, take the last."""
    totals = {
        name: [sum(column) for column in zip(*(r[name] for r in reports), strict=True)]
        for name in ("metrics", "moved")
    }
    rows = sum(int(r["rows"]) for r in reports)
    return {**reports[-1], **totals, "rows": rows, "batches": len(reports)}
