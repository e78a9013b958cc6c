"""A job of `fit` behind parameter servers that does not push and fetch in every step.

Between two calls a worker keeps tensors on its own device:

    fetch --> weights, rate, zero gradient      from the servers
    step  --> weights, sum of gradients         once per batch
    push  --> gradient buffer                   significant entries; the rest waits for a later push

See `dtk.exchange.Downpour` for the algorithm, and `train.py` for the job that pushes in every step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables, tf_replicas, tf_servers
from dtk.exchange import Downpour
from dtk.nests import Array, Nest, Specs
from dtk.parameter_server import gradient_buffers, gradient_compression
from dtk.parameter_server.functional_step import (
    pulled_variables,
    trace_functional_step,
    zero_metrics,
)
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.jobs.batch_dispatch import SerialPhase
from dtk.parameter_server.jobs.batches import Batch, whole_batch
from dtk.parameter_server.jobs.gradient_commit import GradientCommit
from dtk.parameter_server.jobs.step_update import StepUpdate, TrainOutputs, TrainReport
from dtk.parameter_server.jobs.trace_cache import ConcreteFunction, TraceCache
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import Result, Task
from dtk.trainer.gradients import shared_optimizer


class Held(NamedTuple):
    """Weights that a worker keeps for its next batches."""

    values: list[tf.Tensor]  # the weights
    rate: tf.Tensor  # the optimizer's learning rate, a scalar
    nothing: list[tf.Tensor]  # zero gradient, see `BufferLayout.zeros`
    finished: int  # steps applied when the worker fetched the weights
    pushes: int = 0  # pushes of the worker since then


class LocalReport(TrainReport):
    """Report of a step on a worker's own weights."""

    read: Array  # bytes of table rows that the step looked up, int64 scalar


class _Trained(NamedTuple):
    """Weights, gradients and reports after the batches of a push, and the number of fetches."""

    values: list[tf.Tensor]
    rate: tf.Tensor
    accrued: list[tf.Tensor]
    reports: list[LocalReport]
    fetches: int


class FetchAndPush:
    """Functions that fetch weights from the servers and push gradients, traced when it is made."""

    def __init__(self, trainer: JobTrainer, commit: GradientCommit):
        self._trainer, self._commit = trainer, commit
        self.fetched = 0
        self.fetch = tf.function(self._fetch, autograph=False).get_concrete_function()
        values, rate, nothing = self.fetch.structured_outputs
        dense = len(commit.layout.dense)
        # Rows of tables grow with every batch.
        gradients = [tf.TensorSpec(n.shape, n.dtype) for n in nothing[:dense]]
        gradients += [tf.TensorSpec([None], n.dtype) for n in nothing[dense:]]
        scalar = tf.TensorSpec([], rate.dtype)
        self.state_spec = ([tf.TensorSpec(v.shape, v.dtype) for v in values], scalar, gradients)
        handles = [tf.TensorSpec([], tf.resource) for _ in commit.layout.slots]
        push = tf.function(self._push, autograph=False)
        self.push = push.get_concrete_function(gradients, gradients, scalar, handles)

    def variables(self) -> list[keras.Variable]:
        """Return the variables that workers hold copies of."""
        random = self._trainer.seed_states()
        return pulled_variables(self._trainer.model, self._commit.tables, random)

    def _fetch(self) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
        """Return weights, the optimizer's rate, and a zero gradient; traced."""
        with tf_replicas.in_replica(self._trainer.strategy):
            pulled, self.fetched = gradient_buffers.pull(self.variables())
            optimizers = shared_optimizer.optimizers_of(self._trainer.model)
            rate = tf.convert_to_tensor(optimizers[0].learning_rate) if optimizers else 0.0
            return [value for _, value in pulled], tf.identity(rate), self._commit.layout.zeros()

    def _push(
        self,
        accrued: list[tf.Tensor],
        kept: list[tf.Tensor],
        rate: tf.Tensor,
        handles: list[tf.Tensor],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Compress gradients, write them into a buffer, return bytes and the rest; traced."""
        layout = self._commit.layout
        sent, kept = layout.compress(layout.add(accrued, kept), rate)
        return layout.put(sent, handles), kept


class DownpourJob:
    """Job of `fit` with several steps per push (Downpour SGD, Dean et al. 2012).

    A `Batcher` collects the batches of a push. See `batch_dispatch.BatchJob`.
    """

    def __init__(self, trainer: JobTrainer, exchange: Downpour, serial_phase: SerialPhase):
        self._trainer, self._exchange = trainer, exchange
        _check_optimizers(trainer.model, exchange)
        self._update = StepUpdate(trainer, serial_phase, functools.partial(_layout_of, exchange))
        self.rng_states = self._update.rng_states
        self.traces: TraceCache[LocalReport] = TraceCache()
        # The gradients that each worker has not pushed yet.
        self._kept: dict[int, list[tf.Tensor]] = {}
        # The weights that each worker goes on with, if it fetches less often than it pushes.
        self._held: dict[int, Held] = {}

    @functools.cached_property
    def _exchanging(self) -> FetchAndPush:
        """Functions of the exchange; traced on the main thread before the first step."""
        return FetchAndPush(self._trainer, self._update.commit)

    @property
    def logs(self) -> dict[str, Nest]:
        """Loss, metrics and staleness of the steps so far, by name."""
        return self._update.metrics.logs

    @property
    def update(self) -> StepUpdate:
        """The update by complete steps."""
        return self._update

    def trace(self, spec: Specs, rng_states: tf.TensorSpec) -> ConcreteFunction:
        """Trace the step for such batches."""
        state_spec = self._exchanging.state_spec
        step = tf.function(self._step, autograph=False)
        return step.get_concrete_function(spec, rng_states, *state_spec)

    def _step(
        self,
        data: Nest,
        rng_states: tf.Tensor,
        values: list[tf.Tensor],
        rate: tf.Tensor,
        accrued: list[tf.Tensor],
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Take Keras's step on one batch, with plain SGD on the worker's weights; traced."""
        model, update = self._trainer.model, self._update
        tables, layout = update.commit.tables, update.commit.layout
        variables = self._exchanging.variables()
        with tf_replicas.in_replica(self._trainer.strategy):
            data = whole_batch(data)
            state = [*zip(variables, values, strict=True), *zero_metrics(model)]
            state += self.rng_states.values(rng_states)
            traced = trace_functional_step(
                model.train_step,
                data,
                model,
                share=tf.constant(1.0),
                world_sum=lambda value: value,
                state=state,
                tables=tables,
            )
            accrued = layout.add(accrued, layout.contents(update.commit.plan(traced)))
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
            report: LocalReport = {**update.report(traced, data, state), "read": traced.rows_read}
            states = report["rng_state"]
            drawn = tf.cast(tf.stack(states), rng_states.dtype) if states else rng_states
            return self.traces.report(report), drawn, values, accrued

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[TrainOutputs]:
        """Train on some batches, and put the sum of their gradients into a server's buffer."""
        commit, exchange = self._update.commit, self._exchange
        buffer = commit.take_buffer()
        with tf.device(tf_servers.CHIEF):
            rng_states = tf.constant(self.rng_states.of(task.piece, schedule))
        try:
            held = self._held.pop(worker, None) or self._fetch(schedule)
            older = max(0, schedule.finished - held.finished - held.pushes)
            trained = self._train(task, worker, held, rng_states)
            kept = self._kept.get(worker, held.nothing)
            sent, kept = self._exchanging.push(trained.accrued, kept, trained.rate, buffer.handles)
            sent = int(sent.numpy())
        except tf.errors.OpError:
            self._kept.pop(worker, None)
            raise
        # A serial step needs the weights after the step before, so it always fetches.
        pushes = held.pushes + 1 if schedule.tau else exchange.fetch
        if pushes * exchange.push_every < exchange.fetch:
            self._held[worker] = held._replace(values=trained.values, pushes=pushes)
        if exchange.keeps:
            self._kept[worker] = kept
        reports = trained.reports
        pulled = trained.fetches * self._exchanging.fetched + sum(int(r["read"]) for r in reports)
        traffic = np.array([pulled, sent], np.int64)
        self._trainer.strategy.note_traffic(worker, traffic, len(reports))
        outputs = TrainOutputs(_merge_reports(reports), 1.0, buffer, worker, len(reports))
        return Result(outputs, older, functools.partial(commit.release, buffer))

    def _fetch(self, schedule: Schedule) -> Held:
        values, rate, nothing = self._exchanging.fetch()
        return Held(values, rate, nothing, schedule.finished)

    def _train(self, task: Task[Batch], worker: int, held: Held, rng_states: tf.Tensor) -> _Trained:
        """Train on the batches of a push, one after the other; fetch every `fetch` batches."""
        batch, step = task.work, self.traces.function(task.work.spec)
        values, rate, accrued = held.values, held.rate, held.nothing
        reports: list[LocalReport] = []
        fetches = 0 if held.pushes else 1
        batches = batch.parts[task.part]
        assert isinstance(batches, tuple)  # as `Batcher` has joined them
        for number, data in enumerate(batches):
            if number and number % self._exchange.fetch == 0:
                values, rate, _ = self._exchanging.fetch()
                fetches += 1
            call = functools.partial(_called, step, rng_states, values, rate, accrued)
            if batch.pipelines is None:
                report, rng_states, values, accrued = call(data)
            else:
                report, rng_states, values, accrued = batch.pipelines.call(call, worker)
            reports.append(self.traces.read(batch.spec, report.numpy()))
        return _Trained(values, rate, accrued, reports, fetches)

    def apply(
        self, work: Batch, results: Sequence[Result[TrainOutputs]], schedule: Schedule
    ) -> None:
        """Have the servers apply the gradients of a push, and count one step per batch."""
        del work
        outputs = [result.outputs for result in results]
        self._update.apply(outputs, schedule)
        more = sum(found.batches for found in outputs) - 1
        if more:
            for optimizer in shared_optimizer.optimizers_of(self._trainer.model):
                keras_variables.stored(optimizer.iterations).assign_add(more)

    def closed(self) -> None:
        """Forget the weights and gradients that workers kept during this `fit`."""
        self._kept.clear()
        self._held.clear()


def _check_optimizers(model: keras.Model, exchange: Downpour) -> None:
    """Refuse optimizers for which a plain sum of several steps' gradients is wrong."""
    for optimizer in shared_optimizer.optimizers_of(model):
        if keras_optimizers.is_multi(optimizer):
            raise ValueError(
                f"{exchange!r} trains on with the optimizer's rate on the worker, and "
                f"optimizer {optimizer.name!r} has several; use one optimizer, or exchange=None"
            )
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if scales or optimizer.gradient_accumulation_steps:
            raise ValueError(
                f"{exchange!r} sums gradients on the worker, and optimizer "
                f"{optimizer.name!r} {'scales its loss' if scales else 'accumulates them, too'}"
                "; use one or the other"
            )


def _layout_of(
    exchange: Downpour, weights: list[gradient_buffers.Weight], sparse: set[int]
) -> gradient_buffers.BufferLayout:
    """Make the layout of buffers for an exchange."""
    if exchange.significant:
        return gradient_compression.FilteredLayout(weights, sparse, exchange.significant)
    if exchange.bits:
        return gradient_compression.QuantizedLayout(weights, sparse, exchange.bits)
    return gradient_buffers.BufferLayout(weights, sparse)


def _called(
    step: tf.types.experimental.ConcreteFunction,
    rng_states: tf.Tensor,
    values: list[tf.Tensor],
    rate: tf.Tensor,
    accrued: list[tf.Tensor],
    data: Nest,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    return step(data, rng_states, values, rate, accrued)


def _merge_reports(reports: Sequence[LocalReport]) -> TrainReport:
    """Merge the reports of several batches: sums, and the last value of logs and states."""
    last = reports[-1]
    return {
        "metrics": _added([r["metrics"] for r in reports]),
        "logs": last["logs"],
        "rows": np.array(sum(int(r["rows"]) for r in reports)),
        "moved": _added([r["moved"] for r in reports]),
        "rng_state": last["rng_state"],
    }


def _added(rows: Sequence[Sequence[Array]]) -> list[Array]:
    return [functools.reduce(operator.add, column) for column in zip(*rows, strict=True)]
