"""Functions for workers, traced once for each specification of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias

import tensorflow as tf

from dtk.compat import tf_servers
from dtk.nests import Array, Nest, Specs
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.gradient_buffers import ReportT
from dtk.parameter_server.jobs.batches import Batch
from dtk.parameter_server.task_queue import Task

# A traced function that can be sent to workers.
ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction


class TraceCache(Generic[ReportT]):
    """Traced functions by the specification of batches, and how to read their reports."""

    def __init__(self) -> None:
        self._functions: dict[str, ConcreteFunction] = {}
        self._reports: dict[str, gradient_buffers.PackedResults[ReportT]] = {}
        self._traced: gradient_buffers.PackedResults[ReportT] | None = None

    def add(self, spec: Specs, trace: Callable[[], ConcreteFunction]) -> None:
        """Trace a function, unless there is one for such batches."""
        key = gradient_buffers.key_of(spec)
        if key not in self._functions:
            self._functions[key] = trace()
            if self._traced is not None:
                self._reports[key] = self._traced

    def report(self, results: ReportT) -> tf.Tensor:
        """Pack a function's report into one tensor; called while tracing."""
        self._traced = gradient_buffers.PackedResults(results)
        return self._traced.tensor

    def function(self, spec: Specs) -> ConcreteFunction:
        """Return the function for some batches."""
        return self._functions[gradient_buffers.key_of(spec)]

    def read(self, spec: Specs, numbers: Array) -> ReportT:
        """Return the report of the function for such batches."""
        return self._reports[gradient_buffers.key_of(spec)].read(numbers)

    def call(self, task: Task[Batch], worker: int, rng_states: Array, *more: Nest) -> ReportT:
        """Call a function on a slice, on the worker of this thread."""
        batch, function = task.work, self.function(task.work.spec)
        # Constants made on the chief go along with the call; on the worker, each is a message.
        with tf.device(tf_servers.CHIEF):
            numbers = [
                tf.constant(n, tf.float64) for n in (batch.share_of(task.part), batch.holders)
            ]
            numbers.append(tf.constant(rng_states))

        def step(data: Nest) -> Array:
            return function(data, *numbers, *more).numpy()

        if batch.pipelines is None:
            found = step(batch.parts[task.part])
        else:
            found = batch.pipelines.call(step, worker)
        return self.read(batch.spec, found)
