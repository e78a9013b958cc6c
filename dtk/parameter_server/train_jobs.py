"""Train with workers behind parameter servers: `fit`, with a push in every step or rare pushes.

A step is traced once, on the chief. A worker reads the weights, computes the step on a slice, and
puts gradients into a gradient buffer on the servers. When all slices of a step are computed, the
chief has the servers apply them. Weights and gradients never pass the chief.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_optimizers, keras_variables, tf_replicas, tf_servers
from dtk.exchange import Downpour
from dtk.nests import Array, Leaf, Specs, Tree
from dtk.parameter_server import consistency_models
from dtk.parameter_server.batch_jobs import Batch, BatchJob, ConcreteFunction
from dtk.parameter_server.dispatcher import Result, Task
from dtk.parameter_server.functional_step import FunctionalStep, bytes_of, pull
from dtk.parameter_server.gradient_buffers import GradientBuffer, GradientCommit, Handles
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.job_state import Counted
from dtk.parameter_server.scheduler import Schedule
from dtk.trainer.gradients import shared_optimizer


class SerialPhase:
    """Serial steps at the start of a training; see `consistency_models.SerialStart`."""

    def __init__(self, consistency: consistency_models.Consistency, model: keras.Model):
        self._start, self._model = consistency.warm_start, model
        self.tau = consistency.tau  # after the serial steps; see `Schedule.tau`
        self.epoch = self._rows = 0

    def ends_before(self, schedule: Schedule) -> bool:
        """Return whether the steps so far were serial, and the next one is not."""
        if schedule.tau == self.tau:
            return False
        return self._start is None or self._start.is_over(self.epoch, self._rows)

    def count(self, rows: int, batches: int, schedule: Schedule) -> None:
        """Count the rows of an applied step, if it was serial."""
        if schedule.tau == self.tau:
            return
        if not self._rows:
            # In a resumed run, count each earlier step as a batch of this size.
            optimizer = shared_optimizer.optimizers_of(self._model)[0]
            self._rows = (int(optimizer.iterations.numpy()) - 1) * rows // batches
        self._rows += rows


class TrainReport(Counted):
    """Report of a training step: tensors while it is traced, arrays when it has run."""

    moved: list[Array]  # changes of statistics; see `GradientCommit.moved_by`
    rng_state: list[Array]  # states of random layers after the step, one of shape `[2]` per layer
    traffic: Array  # bytes pulled and bytes pushed, int64 of shape `[2]`


class TrainOutputs(NamedTuple):
    """A worker's outputs for its slice of a training step."""

    report: TrainReport
    share: float  # the slice's part of the rows of its batch, 0 to 1
    buffer: GradientBuffer  # holds the gradients
    worker: int  # index of the worker
    batches: int = 1  # number of batches


class NonFiniteStep(NamedTuple):
    """First training step with a loss or metric that is not finite."""

    step: int  # number of the step, from 1
    workers: tuple[int, ...]  # indices of the workers that computed these slices


class TrainJob(BatchJob[TrainReport, TrainOutputs]):
    """Batches of `fit`, with a push in every step."""

    name = "train"

    def __init__(self, trainer: JobTrainer):
        strategy = trainer.strategy
        super().__init__(
            trainer,
            functools.partial(Schedule.of, strategy.consistency, strategy.workers),
            in_turns=strategy.slices == strategy.workers,  # every worker has one slice of each step
        )
        self.serial_phase = SerialPhase(strategy.consistency, self.model)
        self.commit = GradientCommit(trainer)
        self.non_finite: NonFiniteStep | None = None

    @property
    def tables(self) -> Sequence[keras.Variable]:
        return self.commit.tables

    def new_epoch(self, epoch: int) -> None:
        """Begin the statistics of staleness anew."""
        self.serial_phase.epoch = epoch
        self.schedule.take_statistics()

    def submit(self, batch: Batch) -> None:
        if self.serial_phase.ends_before(self.schedule):
            # Serial steps draw random numbers one after the other; asynchronous steps each derive
            # their own state.
            self.drain()
            self._dispatcher.loosen(self.serial_phase.tau)
        super().submit(batch)

    def trace(self, spec: Specs, rng_states: tf.TensorSpec, *more: Specs) -> ConcreteFunction:
        while True:
            layout = self.commit.layout
            handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]
            traced = super().trace(spec, rng_states, handles)
            if self.commit.layout is layout:  # else it found sparse gradients: trace again
                return traced

    def step(
        self, data: Tree, share: tf.Tensor, rng_states: tf.Tensor, handles: Handles = ()
    ) -> list[Leaf]:
        """Take Keras's step on one slice, and fill a buffer; traced, runs on a worker."""
        layout = self.commit.layout
        with tf_replicas.in_replica(self.strategy):
            pulled = pull(self.variables())
            traced = self.keras_step(data, pulled, rng_states, share)
            sent = layout.put(layout.contents(self.commit.plan(traced)), handles)
            return self.pack(self.report(traced, bytes_of(pulled) + traced.rows_read, sent))

    def report(self, traced: FunctionalStep, pulled: tf.Tensor, sent: tf.Tensor) -> TrainReport:
        """Collect the report of a traced step; gradients go another way."""
        return {
            **self.metrics.count(traced),
            "moved": self.commit.moved_by(traced),
            "rng_state": self.rng_states.left_by(traced),
            "traffic": tf.stack([pulled, sent]),
        }

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[TrainOutputs]:
        """Compute the gradients of a slice, and leave them in a buffer on the servers."""
        buffer = self.commit.take_buffer()
        report = self.call(task, worker, schedule, buffer.handles)
        self.strategy.note_traffic(worker, report["traffic"])
        outputs = TrainOutputs(report, task.work.share_of(task.part), buffer, worker)
        return Result(outputs, release=functools.partial(self.commit.release, buffer))

    def apply(self, batch: Batch, outputs: Sequence[TrainOutputs], schedule: Schedule) -> None:
        """Have the servers apply a step's gradients; add up its counts."""
        reports = [output.report for output in outputs]
        self.commit.apply(
            [output.buffer for output in outputs],
            [output.share for output in outputs],
            [report["moved"] for report in reports],
        )
        if not schedule.tau and reports[0]["rng_state"]:
            # A serial step goes on where the step before has stopped.
            self.rng_states.go_on_from(reports[0]["rng_state"])
        self.metrics.add(reports)
        if self.non_finite is None:
            self.non_finite = non_finite(outputs, schedule.finished + 1)
        rows = sum(int(report["rows"]) for report in reports)
        self.serial_phase.count(rows, sum(output.batches for output in outputs), schedule)
        if schedule.tau:
            self.metrics.logs["staleness_mean"] = schedule.statistics.mean
            self.metrics.logs["staleness_max"] = float(schedule.statistics.max)


def non_finite(outputs: Sequence[TrainOutputs], step: int) -> NonFiniteStep | None:
    """Return the step if a count is not finite, else None; gradients, on servers, are not read."""
    workers = {
        one.worker
        for one in outputs
        if not all(bool(np.all(np.isfinite(counted))) for counted in one.report["metrics"])
    }
    return NonFiniteStep(step, tuple(sorted(workers))) if workers else None


class Batcher:
    """Collects batches of one specification, up to the number that a worker takes at once."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: list[Batch] = []

    def add(self, batch: Batch) -> list[Batch]:
        """Collect a batch; return what is ready for a worker."""
        ready = self.take() if self._waiting and self._waiting[0].key != batch.key else []
        self._waiting.append(batch)
        return ready + (self.take() if len(self._waiting) == self._size else [])

    def take(self) -> list[Batch]:
        """Remove and return the waiting batches, joined into one; nothing if there are none."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return []
        rows = sum(batch.rows for batch in waiting)
        parts = tuple(batch.parts[0] if batch.parts else None for batch in waiting)
        return [waiting[0]._replace(parts=(parts,), counts=(rows,), rows=rows)]


class _HeldWeights(NamedTuple):
    """Weights that a worker keeps for its next batches."""

    values: list[tf.Tensor]  # the weights
    rate: tf.Tensor  # the optimizer's learning rate, a scalar
    nothing: list[tf.Tensor]  # zero gradient, see `BufferLayout.zeros`
    finished: int  # steps applied when the worker fetched the weights
    pushes: int = 0  # pushes of the worker since then


class DownpourJob(TrainJob):
    """Batches of `fit`, with several for a push (Downpour SGD, Dean et al. 2012).

    Between two calls a worker keeps tensors on its own device:

        fetch --> weights, rate, zero gradient      from the servers
        step  --> weights, sum of gradients         once per batch
        push  --> gradient buffer                   the rest waits for a later push
    """

    def __init__(self, trainer: JobTrainer, exchange: Downpour):
        _check_optimizers(trainer.model, exchange)
        super().__init__(trainer)
        self._exchange = exchange
        self._batcher = Batcher(exchange.push_every)
        # The gradients that each worker has not pushed yet.
        self._kept: dict[int, list[tf.Tensor]] = {}
        # The weights that each worker goes on with, if it fetches less often than it pushes.
        self._held: dict[int, _HeldWeights] = {}

    def dispatch(self, batch: Batch) -> None:
        for ready in self._batcher.add(batch):
            super().dispatch(ready)

    def drain(self) -> None:
        for ready in self._batcher.take():
            super().dispatch(ready)
        super().drain()

    def close(self) -> None:
        super().close()
        self._batcher.take()
        self._kept.clear()
        self._held.clear()

    # The functions that workers call, traced on the main thread before the first step.

    @functools.cached_property
    def _fetch(self) -> ConcreteFunction:
        """Function that returns weights, the optimizer's rate, and a zero gradient."""

        def fetch() -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            with tf_replicas.in_replica(self.strategy):
                optimizers = shared_optimizer.optimizers_of(self.model)
                rate = tf.convert_to_tensor(optimizers[0].learning_rate) if optimizers else 0.0
                return pull(self.variables()), tf.identity(rate), self.commit.layout.zeros()

        return tf.function(fetch, autograph=False).get_concrete_function()

    @functools.cached_property
    def _specs(self) -> tuple[list[tf.TensorSpec], tf.TensorSpec, list[tf.TensorSpec]]:
        """Specifications of weights, rate and gradients between two calls."""
        values, rate, gradients = tf.nest.map_structure(
            lambda t: tf.TensorSpec(t.shape, t.dtype), self._fetch.structured_outputs
        )
        dense = len(self.commit.layout.dense)
        # Rows of tables grow with every batch.
        rows = [tf.TensorSpec([None], spec.dtype) for spec in gradients[dense:]]
        return values, rate, [*gradients[:dense], *rows]

    @functools.cached_property
    def _push(self) -> ConcreteFunction:
        """Function that puts compressed gradients into a buffer; returns bytes and the rest."""
        layout = self.commit.layout
        _, rate, gradients = self._specs
        handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]

        def push(
            accrued: list[tf.Tensor], kept: list[tf.Tensor], rate: tf.Tensor, into: Handles
        ) -> tuple[tf.Tensor, list[tf.Tensor]]:
            sent, kept = layout.compress(layout.add(accrued, kept), rate)
            return layout.put(sent, into), kept

        function = tf.function(push, autograph=False)
        return function.get_concrete_function(gradients, gradients, rate, handles)

    def trace(self, spec: Specs, rng_states: tf.TensorSpec, *more: Specs) -> ConcreteFunction:
        """Trace the step for such batches, and before the first step the other functions."""
        _ = self._push
        function = tf.function(self.local_step, autograph=False)
        return function.get_concrete_function(spec, rng_states, *self._specs)

    def local_step(
        self,
        data: Tree,
        rng_states: tf.Tensor,
        values: list[tf.Tensor],
        rate: tf.Tensor,
        accrued: list[tf.Tensor],
    ) -> tuple[list[Leaf], tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Take Keras's step on one batch, with plain SGD on the worker's weights; traced."""
        layout = self.commit.layout
        with tf_replicas.in_replica(self.strategy):
            traced = self.keras_step(data, values, rng_states)
            accrued = layout.add(accrued, layout.contents(self.commit.plan(traced)))
            steps = {
                id(variable): tf.convert_to_tensor(gradient) * tf.cast(rate, gradient.dtype)
                for _, gradients, applied_to, _ in traced.applied
                for gradient, variable in zip(gradients, applied_to, strict=True)
                if gradient is not None
            }
            values = [
                value - tf.cast(steps[id(v)], value.dtype)
                if id(v) in steps
                else tf.convert_to_tensor(traced.value(v))
                for v, value in zip(self.variables(), values, strict=True)
            ]
            report = self.report(traced, traced.rows_read, tf.constant(0, tf.int64))
            states = report["rng_state"]
            drawn = tf.cast(tf.stack(states), rng_states.dtype) if states else rng_states
            return self.pack(report), drawn, values, accrued

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[TrainOutputs]:
        """Train on some batches, and put the sum of their gradients into a server's buffer."""
        exchange, batch, traced = self._exchange, task.work, self.traced[task.work.key]
        buffer = self.commit.take_buffer()
        with tf.device(tf_servers.CHIEF):
            rng_states = tf.constant(self.rng_states.of(task.piece, schedule))
        try:
            held = self._held.pop(worker, None)
            fetches = 0 if held else 1
            if held is None:
                values, rate, nothing = self._fetch()
                held = _HeldWeights(values, rate, nothing, schedule.finished)
            older = max(0, schedule.finished - held.finished - held.pushes)
            values, rate, accrued = held.values, held.rate, held.nothing
            reports: list[TrainReport] = []
            batches = batch.parts[task.part]
            assert isinstance(batches, tuple)  # as `Batcher` has joined them
            for number, rows in enumerate(batches):
                if number and number % exchange.fetch == 0:
                    values, rate, _ = self._fetch()
                    fetches += 1
                report, rng_states, values, accrued = batch.call(
                    worker, traced.function, rows, rng_states, values, rate, accrued
                )
                reports.append(self.fetch(traced, report))
            kept = self._kept.get(worker, held.nothing)
            sent, kept = self._push(accrued, kept, rate, buffer.handles)
            sent = int(sent.numpy())
        except tf.errors.OpError:
            self._kept.pop(worker, None)
            raise
        # A serial step needs the weights after the step before, so it always fetches.
        pushes = held.pushes + 1 if schedule.tau else exchange.fetch
        if pushes * exchange.push_every < exchange.fetch:
            self._held[worker] = held._replace(values=values, pushes=pushes)
        if exchange.keeps:
            self._kept[worker] = kept
        whole = _merged(reports)
        fetched = np.array([fetches * bytes_of(values), sent], np.int64)
        self.strategy.note_traffic(worker, whole["traffic"] + fetched, len(reports))
        outputs = TrainOutputs(whole, 1.0, buffer, worker, len(reports))
        return Result(outputs, older, functools.partial(self.commit.release, buffer))

    def apply(self, batch: Batch, outputs: Sequence[TrainOutputs], schedule: Schedule) -> None:
        # The optimizer counts one step for each batch.
        super().apply(batch, outputs, schedule)
        more = sum(output.batches for output in outputs) - 1
        if more:
            for optimizer in shared_optimizer.optimizers_of(self.model):
                keras_variables.stored(optimizer.iterations).assign_add(more)


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


def _merged(reports: Sequence[TrainReport]) -> TrainReport:
    """Merge the reports of several batches: sums, and the last value of logs and states."""
    summed: list[dict[str, object]] = [
        {name: report[name] for name in ("metrics", "moved", "rows", "traffic")}
        for report in reports
    ]
    totals = tf.nest.map_structure(lambda *counts: np.sum(counts, axis=0), *summed)
    calls = [call for report in reports for call in report["calls"]]
    return cast(TrainReport, {**reports[-1], **totals, "calls": calls})
