"""Train with workers behind parameter servers: the job of `fit`.

A step is traced once, on the chief. A worker reads the weights, computes the step on a slice, and
puts gradients into a gradient buffer on the servers. When all slices of a step are computed, the
chief has the servers apply them. Weights and gradients never pass the chief.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from dtk.compat import tf_replicas
from dtk.nests import Array, Nest, Specs
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.functional_step import (
    pulled_variables,
    trace_functional_step,
    zero_metrics,
)
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.jobs.batch_dispatch import SerialPhase
from dtk.parameter_server.jobs.batches import Batch, whole_batch
from dtk.parameter_server.jobs.step_update import StepUpdate, TrainOutputs, TrainReport
from dtk.parameter_server.jobs.trace_cache import ConcreteFunction, TraceCache
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import Result, Task


class SliceReport(TrainReport):
    """Report of a step on one slice."""

    traffic: Array  # bytes pulled and bytes pushed, int64 of shape `[2]`


class TrainJob:
    """Job of `fit`'s steps; see `batch_dispatch.BatchJob`."""

    def __init__(self, trainer: JobTrainer, serial_phase: SerialPhase):
        self._trainer = trainer
        self._update = StepUpdate(trainer, serial_phase)
        self.rng_states = self._update.rng_states
        self.traces: TraceCache[SliceReport] = TraceCache()

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
        commit, scalar = self._update.commit, tf.TensorSpec([], tf.float64)
        while True:
            layout = commit.layout
            handles = [tf.TensorSpec([], tf.resource) for _ in layout.slots]
            function = tf.function(self._step, autograph=False)
            traced = function.get_concrete_function(spec, scalar, scalar, rng_states, handles)
            if commit.layout is layout:  # else tracing has found sparse gradients: trace again
                return traced

    def _step(
        self,
        data: Nest,
        share: tf.Tensor,
        size: tf.Tensor,
        rng_states: tf.Tensor,
        handles: list[tf.Tensor],
    ) -> tf.Tensor:
        """Take Keras's step on one slice, fill a buffer; traced on the chief, runs on a worker."""
        model, strategy, update = self._trainer.model, self._trainer.strategy, self._update
        tables, layout = update.commit.tables, update.commit.layout
        with tf_replicas.in_replica(strategy):
            random = self._trainer.seed_states()
            pulled, read = gradient_buffers.pull(pulled_variables(model, tables, random))
            state = [*pulled, *zero_metrics(model)]
            data = whole_batch(data)
            state += self.rng_states.values(rng_states)
            traced = trace_functional_step(
                model.train_step,
                data,
                model,
                share=share,
                world_sum=strategy.sum_over_slices,
                state=state,
                tables=tables,
                kinds=self._trainer.kinds_of("train"),
                tried="train" in self._trainer.tried,
            )
            sent = layout.put(layout.contents(update.commit.plan(traced)), handles)
            report: SliceReport = {
                **update.report(traced, data, state),
                "traffic": tf.stack([read + traced.rows_read, sent]),
            }
            return self.traces.report(report)

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[TrainOutputs]:
        """Compute the gradients of a slice, and leave them in a buffer on the servers."""
        commit = self._update.commit
        buffer = commit.take_buffer()
        rng_states = self.rng_states.of(task.piece, schedule)
        report = self.traces.call(task, worker, rng_states, buffer.handles)
        self._trainer.strategy.note_traffic(worker, report["traffic"])
        outputs = TrainOutputs(report, task.work.share_of(task.part), buffer, worker)
        return Result(outputs, release=functools.partial(commit.release, buffer))

    def apply(
        self, work: Batch, results: Sequence[Result[TrainOutputs]], schedule: Schedule
    ) -> None:
        """Have the servers apply a step's gradients; add up its counts."""
        del work
        self._update.apply([result.outputs for result in results], schedule)

    def closed(self) -> None:
        """Do nothing: workers keep nothing of a step."""
