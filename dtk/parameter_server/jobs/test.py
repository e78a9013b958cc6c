"""Test with workers behind parameter servers: the job of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.compat import keras_models, tf_replicas
from dtk.nests import Nest, Specs
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.functional_step import (
    pulled_variables,
    trace_functional_step,
    zero_metrics,
)
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.jobs.batches import Batch, whole_batch
from dtk.parameter_server.jobs.metric_sum import Counted, MetricSum
from dtk.parameter_server.jobs.rng_states import RngStates
from dtk.parameter_server.jobs.trace_cache import ConcreteFunction, TraceCache
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import Result, Task


class TestJob:
    """Job of `evaluate`'s batches: any order, nothing applied. See `batch_dispatch.BatchJob`."""

    def __init__(self, trainer: JobTrainer):
        self._trainer = trainer
        self._metrics = MetricSum(trainer.model)
        self.rng_states = RngStates(trainer.seed_states)
        self.traces: TraceCache[Counted] = TraceCache()

    @property
    def logs(self) -> dict[str, Nest]:
        """Loss and metrics of the batches so far, by name."""
        return self._metrics.logs

    def trace(self, spec: Specs, rng_states: tf.TensorSpec) -> ConcreteFunction:
        """Trace the step for such batches."""
        scalar = tf.TensorSpec([], tf.float64)
        function = tf.function(self._step, autograph=False)
        return function.get_concrete_function(spec, scalar, scalar, rng_states)

    def _step(
        self, data: Nest, share: tf.Tensor, size: tf.Tensor, rng_states: tf.Tensor
    ) -> tf.Tensor:
        """Take Keras's step on one slice; traced on the chief, runs on a worker."""
        model, strategy = self._trainer.model, self._trainer.strategy
        tables = keras_models.tables_of(model)
        with tf_replicas.in_replica(strategy):
            random = self._trainer.seed_states()
            pulled, _ = gradient_buffers.pull(pulled_variables(model, tables, random))
            state = [*pulled, *zero_metrics(model)]
            data = whole_batch(data)
            given = self.rng_states.values(rng_states)
            traced = trace_functional_step(
                model.test_step,
                data,
                model,
                share=share,
                world_sum=strategy.sum_over_slices,
                state=[*state, *given],
                tables=tables,
                kinds=self._trainer.kinds_of("test"),
            )
            self.rng_states.note_draws(traced, given)
            return self.traces.report(self._metrics.count(traced, data))

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[Counted]:
        """Compute the metrics of a slice."""
        rng_states = self.rng_states.of(task.piece, schedule)
        return Result(self.traces.call(task, worker, rng_states))

    def apply(self, work: Batch, results: Sequence[Result[Counted]], schedule: Schedule) -> None:
        """Add up the counts of a batch's slices."""
        del work, schedule
        self._metrics.add([result.outputs for result in results])

    def closed(self) -> None:
        """Do nothing: workers keep nothing of a batch."""
