"""Dispatch the batches that Keras's loop reads, with the work before a step and after an epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import keras
import tensorflow as tf

from dtk.nests import Specs
from dtk.parameter_server import consistency_models
from dtk.parameter_server.dispatch import Dispatcher, WorkerJob
from dtk.parameter_server.job_context import JobStrategy
from dtk.parameter_server.jobs.batches import Batch, Batcher, is_read_by_workers
from dtk.parameter_server.jobs.rng_states import RngStates
from dtk.parameter_server.jobs.trace_cache import ConcreteFunction
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import InTurns, OutputsT, TaskQueue
from dtk.trainer.gradients import shared_optimizer

# Covariant, since no result is seen from outside: every dispatcher is a dispatcher of objects.
DispatchedT = TypeVar("DispatchedT", covariant=True)


class Traces(Protocol):
    """Traced functions for workers, see `trace_cache.TraceCache`."""

    def add(self, spec: Specs, trace: Callable[[], ConcreteFunction]) -> None:
        """Trace a function, unless there is one for such batches."""


class BatchJob(WorkerJob[Batch, OutputsT], Protocol[OutputsT]):
    """Job that computes batches by functions traced for them."""

    rng_states: RngStates  # states of random layers; every slice derives its own from these

    @property
    def traces(self) -> Traces:
        """The functions, traced for each kind of batches."""

    def trace(self, spec: Specs, rng_states: tf.TensorSpec) -> ConcreteFunction:
        """Trace the function that workers call for such batches."""

    def closed(self) -> None:
        """Forget the data of steps that are over, or that an exception left."""


class SerialPhase:
    """Serial steps at the start of a training; see `consistency_models.SerialStart`."""

    def __init__(self, consistency: consistency_models.Consistency, model: keras.Model):
        self._consistency, self._model = consistency, model
        self._epoch = self._rows = 0

    @property
    def tau(self) -> float:
        """The bound tau after the serial steps; see `Schedule.tau`."""
        return self._consistency.tau

    def new_epoch(self, epoch: int) -> None:
        """Note that an epoch begins."""
        self._epoch = epoch

    def ends_before(self, schedule: Schedule) -> bool:
        """Return whether the steps so far were serial, and the next one is not."""
        if schedule.tau == self.tau:
            return False
        start = self._consistency.warm_start
        return start is None or start.is_over(self._epoch, self._rows)

    def count(self, rows: int, batches: int, schedule: Schedule) -> None:
        """Count the rows of an applied step, if it was serial."""
        if schedule.tau == self.tau:
            return
        if not self._rows:
            # In a resumed run, count each earlier step as a batch of this size.
            optimizer = shared_optimizer.optimizers_of(self._model)[0]
            self._rows = (int(optimizer.iterations.numpy()) - 1) * rows // batches
        self._rows += rows


class BatchDispatcher(Generic[DispatchedT]):
    """Dispatcher of the batches for Keras's train, test or predict function."""

    def __init__(
        self,
        strategy: JobStrategy,
        new_schedule: Callable[[], Schedule],
        job: BatchJob[DispatchedT],
        *,
        in_turns: bool = False,
        in_order: bool = False,
        serial_phase: SerialPhase | None = None,
        batcher: Batcher | None = None,
    ):
        workers, pool = strategy.workers, strategy.pool
        turns = InTurns(workers, pool.lost_workers, is_read_by_workers) if in_turns else None

        def new_queue() -> TaskQueue[Batch, DispatchedT]:
            return TaskQueue(new_schedule(), turns)

        def ahead(schedule: Schedule) -> float:
            return 0 if in_order else consistency_models.ahead(schedule.tau, workers)

        self._job, self._serial_phase, self._batcher = job, serial_phase, batcher
        self._dispatcher = Dispatcher(pool, new_queue, job, ahead)

    @property
    def schedule(self) -> Schedule:
        """Schedule that decides which step may start."""
        return self._dispatcher.schedule

    def new_epoch(self, epoch: int) -> None:
        """Begin the statistics of staleness anew."""
        if self._serial_phase is not None:
            self._serial_phase.new_epoch(epoch)
        self.schedule.take_statistics()

    def submit(self, batch: Batch) -> None:
        """Dispatch one batch; return once at most `consistency_models.ahead` are under way."""
        serial_phase = self._serial_phase
        if serial_phase is not None and serial_phase.ends_before(self.schedule):
            # Serial steps draw random numbers one after the other; asynchronous steps each derive
            # their own state.
            self.drain()
            self._dispatcher.loosen(serial_phase.tau)
        # Trace here, not on a worker's thread.
        rng_states = self._job.rng_states.begin(self.schedule)
        trace = functools.partial(self._job.trace, batch.spec, rng_states)
        self._job.traces.add(batch.spec, trace)
        self._submit([batch] if self._batcher is None else self._batcher.add(batch))

    def _submit(self, ready: list[Batch]) -> None:
        for batch in ready:
            self._dispatcher.submit(batch, batch.empty)

    def drain(self) -> None:
        """Wait until every submitted batch is applied, also those that wait for more batches."""
        if self._batcher is not None:
            self._submit(self._batcher.take())
        self._dispatcher.drain()
        self._job.rng_states.write_back(self.schedule)

    def close(self) -> None:
        """Release the workers, and forget unfinished steps, which an exception has left."""
        if self._batcher is not None:
            self._batcher.take()
        self._dispatcher.close()
        self._job.rng_states.forget()
        self._job.closed()
