"""Predict with workers behind parameter servers: the job of `predict`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.compat import keras_models, tf_replicas, tf_servers
from dtk.nests import Nest, Specs
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.functional_step import pulled_variables, trace_functional_step
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.jobs.batches import Batch
from dtk.parameter_server.jobs.rng_states import RngStates
from dtk.parameter_server.jobs.trace_cache import ConcreteFunction, TraceCache
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import Result, Task
from dtk.trainer.replica import replica_step


class PredictJob:
    """Job of `predict`'s batches: a slice per worker, rows put together in order.

    See `batch_dispatch.BatchJob`.
    """

    def __init__(self, trainer: JobTrainer):
        self._trainer = trainer
        self.rng_states = RngStates(trainer.seed_states)
        self.traces: TraceCache[Nest] = TraceCache()
        self._outputs: list[Nest] = []

    def trace(self, spec: Specs, rng_states: tf.TensorSpec) -> ConcreteFunction:
        """Trace the step for such batches."""
        function = tf.function(self._step, autograph=False)
        return function.get_concrete_function(spec, rng_states)

    def _step(self, data: Nest, rng_states: tf.Tensor) -> Nest:
        """Take Keras's step on one slice; traced on the chief, runs on a worker."""
        model = self._trainer.model
        tables = keras_models.tables_of(model)
        with tf_replicas.in_replica(self._trainer.strategy):
            random = self._trainer.seed_states()
            pulled, _ = gradient_buffers.pull(pulled_variables(model, tables, random))
            given = self.rng_states.values(rng_states)
            traced = trace_functional_step(
                model.predict_step,
                replica_step.without_optionals(data),
                model,
                share=tf.constant(1.0),
                world_sum=lambda value: value,
                state=[*pulled, *given],
                tables=tables,
            )
            self.rng_states.note_draws(traced, given)
            return traced.logs

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[Nest]:
        """Predict for a slice."""
        function = self.traces.function(task.work.spec)
        with tf.device(tf_servers.CHIEF):
            rng_states = tf.constant(self.rng_states.of(task.piece, schedule))
        outputs = function(task.work.parts[task.part], rng_states)
        with tf.device(tf_servers.CHIEF):  # fetch now, so that a lost worker is noticed here
            outputs = tf.nest.map_structure(tf.identity, outputs, expand_composites=True)
        return Result(outputs)

    def apply(self, work: Batch, results: Sequence[Result[Nest]], schedule: Schedule) -> None:
        """Put the rows of a batch's slices together, in order."""
        del work, schedule
        with tf.device(tf_servers.CHIEF):
            self._outputs.append(_concatenated([result.outputs for result in results]))

    def take_outputs(self) -> Nest:
        """Return the outputs of all batches since the last call, with rows in order."""
        outputs, self._outputs = self._outputs, []
        return _concatenated(outputs)

    def closed(self) -> None:
        """Forget outputs that an exception has left."""
        self._outputs = []


def _concatenated(outputs: Sequence[Nest]) -> Nest:
    """Put the rows of structures of tensors one after the other."""
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
