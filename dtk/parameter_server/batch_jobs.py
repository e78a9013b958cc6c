"""Loops of Keras whose steps run on workers behind parameter servers: `evaluate` and `predict`.

Keras's loop reads global batches on the chief and submits them to a job. A step is traced once for
each kind of batches, on the chief; workers call it on slices. See `train_jobs` for `fit`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, cast

import keras
import tensorflow as tf

from dtk.compat import keras_models, tf_replicas, tf_servers
from dtk.input import slicing
from dtk.nests import Function, Leaf, Specs, Tree
from dtk.parameter_server import consistency_models, worker_data
from dtk.parameter_server.dispatcher import Dispatcher, OutputsT, Result, Task, TaskQueue
from dtk.parameter_server.functional_step import (
    FunctionalStep,
    pull,
    pulled_variables,
    trace_functional_step,
    zero_metrics,
)
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.job_state import Counted, MetricSum, PackedReport, ReportT, RngStates
from dtk.parameter_server.scheduler import Schedule
from dtk.trainer.replica import replica_step

T = TypeVar("T")

# A traced function that can be sent to workers.
ConcreteFunction: TypeAlias = tf.types.experimental.ConcreteFunction


class Batch(NamedTuple):
    """Global batch in slices."""

    parts: tuple[Tree, ...]  # the slices
    # real rows of each slice; 0 for a slice that holds only a padding row
    counts: tuple[int, ...]
    rows: int  # rows of all slices
    spec: Specs  # specification of a slice of any number of rows
    # the source of the rows if workers read them and the chief has none
    pipelines: worker_data.Pipelines | None = None

    @classmethod
    def of(cls, data: slicing.Slices | worker_data.Pipelines, spec: Specs, slices: int) -> Batch:
        """Make a batch from slices or pipelines that Keras's loop has read."""
        if isinstance(data, worker_data.Pipelines):
            # Every slice has the same number of rows, see `worker_dataset`.
            return cls((), (1,) * slices, slices, spec, data)
        return cls(data.parts, tuple(map(int, data.counts)), int(data.rows), spec)

    @property
    def key(self) -> str:
        """The specification as a dictionary key."""
        return str(self.spec)

    @property
    def empty(self) -> list[int]:
        """Slices without rows."""
        return [part for part, count in enumerate(self.counts) if not count]

    def share_of(self, part: int) -> float:
        """Return a slice's part of the rows, 0 to 1."""
        return self.counts[part] / self.rows

    def call(self, worker: int, function: Function[T], data: Tree, *more: Tree) -> T:
        """Call a function with some rows, or with the worker's own pipeline."""
        if self.pipelines is None:
            return function(data, *more)
        return self.pipelines.call(worker, function, *more)


def in_turn(worker: int, number: int, workers: int, lost: Collection[int]) -> bool:
    """Return whether a worker may take the n-th slice: its own, or a lost worker's.

    Workers with their own pipelines take turns, so that all pipelines are read equally far:
    otherwise a fast worker's rows would count more often than a slow worker's.
    """
    owner = number % workers
    return owner == worker or owner in lost


def whole_batch(data: Tree | tf.data.Iterator) -> Tree:
    """Return a batch as Keras's steps take it; called while tracing."""
    if isinstance(data, tf.data.Iterator):
        data = data.get_next()
    return replica_step.without_optionals(data)


class Traced(NamedTuple, Generic[ReportT]):
    """Function that workers call for batches of one specification."""

    function: tf.types.experimental.ConcreteFunction
    report: PackedReport[ReportT] | None  # how to read what it returns, if that is packed


class BatchJob(Generic[ReportT, OutputsT]):
    """One of Keras's loops: its step, traced for workers, and a dispatcher of its batches."""

    name: ClassVar[str]  # of Keras's step, such as "train"

    def __init__(
        self, trainer: JobTrainer, new_schedule: Callable[[], Schedule], in_turns: bool = False
    ):
        self.trainer, self.model, self.strategy = trainer, trainer.model, trainer.strategy
        self.rng_states = RngStates(trainer.seed_states)
        self.traced: dict[str, Traced[ReportT]] = {}
        self._packed: PackedReport[ReportT] | None = None
        self.metrics = MetricSum(self.model)
        workers, pool = self.strategy.workers, self.strategy.pool

        def may_take(worker: int, number: int, batch: Batch) -> bool:
            in_turns_only = in_turns and batch.pipelines is not None
            return not in_turns_only or in_turn(worker, number, workers, pool.lost_workers)

        self._dispatcher: Dispatcher[Batch, OutputsT] = Dispatcher(
            pool, lambda: TaskQueue(new_schedule(), may_take), self.compute, self.apply
        )

    # What Keras's loop calls, on the main thread.

    @property
    def schedule(self) -> Schedule:
        return self._dispatcher.schedule

    @property
    def ahead(self) -> int:
        """Number of batches that may be under way when `submit` returns."""
        return consistency_models.ahead(self.schedule.tau, self.strategy.workers)

    def submit(self, batch: Batch) -> None:
        """Take one batch; return once at most `ahead` are under way."""
        rng_states = self.rng_states.begin(self.schedule)
        if batch.key not in self.traced:  # trace here, not on a worker's thread
            function = self.trace(batch.spec, rng_states)
            self.traced[batch.key] = Traced(function, self._packed)
        self.dispatch(batch)

    def dispatch(self, batch: Batch) -> None:
        """Give a batch to the workers."""
        self._dispatcher.submit(batch, batch.empty, self.ahead)

    def drain(self) -> None:
        """Wait until every batch is applied."""
        self._dispatcher.drain()
        self.rng_states.write_back(self.schedule)

    def close(self) -> None:
        """Release the workers, and forget unfinished steps, which an exception has left."""
        self._dispatcher.close()
        self.rng_states.forget()

    # Tracing, on the chief.

    def trace(self, spec: Specs, rng_states: tf.TensorSpec, *more: Specs) -> ConcreteFunction:
        """Trace the function that workers call for such batches."""
        share = tf.TensorSpec([], tf.float64)
        function = tf.function(self.step, autograph=False)
        return function.get_concrete_function(spec, share, rng_states, *more)

    def step(self, data: Tree, share: tf.Tensor, rng_states: tf.Tensor) -> Tree:
        """Compute one slice: its share of the rows; traced."""
        raise NotImplementedError

    @property
    def slices(self) -> int:
        """Number of slices that a batch is cut into."""
        return self.strategy.slices

    @property
    def is_joined(self) -> bool:
        """Whether one worker computes all rows of a step, since its slices do not add up."""
        joined = self.trainer.checks_of(self.name).joined
        return bool(self.trainer.checks_of("train").joined if joined is None else joined)

    @property
    def tables(self) -> Sequence[keras.Variable]:
        """Variables that steps look rows up in."""
        return keras_models.tables_of(self.model)

    def variables(self) -> list[keras.Variable]:
        """Return the variables that a step reads whole."""
        return pulled_variables(self.model, self.tables, self.trainer.seed_states())

    def keras_step(
        self,
        data: Tree,
        values: Sequence[tf.Tensor],
        rng_states: tf.Tensor,
        share: tf.Tensor | None = None,
    ) -> FunctionalStep:
        """Trace Keras's step with values of `variables`; without a share, of a whole batch."""
        whole = share is None
        # Pipelines of workers are read in slices, whatever other data needed.
        joined = self.is_joined and not isinstance(data, tf.data.Iterator)
        all_rows = self.slices == 1 or joined
        only = tf_replicas.as_only_replica() if all_rows else contextlib.nullcontext()
        state = list(zip(self.variables(), values, strict=True))
        with only, self.metrics.noting(self.trainer.metrics_of_all_rows):
            traced = trace_functional_step(
                getattr(self.model, f"{self.name}_step"),
                whole_batch(data),
                self.model,
                share=tf.constant(1.0) if whole else share,
                sum_over_replicas=tf.identity if whole else self.strategy.sum_over_slices,
                state=[*state, *zero_metrics(self.model), *self.rng_states.values(rng_states)],
                tables=self.tables,
                kinds={} if whole else self.trainer.kinds_of(self.name),
                tried=self.trainer.checks_of(self.name).trial is not None,
            )
        self.rng_states.note_draws(traced)
        return traced

    def pack(self, report: ReportT) -> list[Leaf]:
        """Return a report as few tensors, and remember how to read it."""
        self._packed = PackedReport(report)
        return self._packed.tensors

    # Computing, on a worker's thread.

    def compute(self, task: Task[Batch], worker: int, schedule: Schedule) -> Result[OutputsT]:
        """Compute a slice."""
        return Result(cast(OutputsT, self.call(task, worker, schedule)))

    def call(self, task: Task[Batch], worker: int, schedule: Schedule, *more: Tree) -> ReportT:
        """Call the step on a slice; return what it has computed."""
        batch, traced = task.work, self.traced[task.work.key]
        # Constants made on the chief go along with the call; on the worker, each is a message.
        with tf.device(tf_servers.CHIEF):
            share = tf.constant(batch.share_of(task.part), tf.float64)
            rng_states = tf.constant(self.rng_states.of(task.piece, schedule))

        def step(data: Tree) -> ReportT:
            return self.fetch(traced, traced.function(data, share, rng_states, *more))

        return batch.call(worker, step, batch.parts[task.part] if batch.parts else None)

    def fetch(self, traced: Traced[ReportT], outputs: Sequence[Leaf]) -> ReportT:
        """Fetch what a function has returned."""
        assert traced.report is not None
        packed, *rows = outputs
        return traced.report.read(packed.numpy(), _on_chief(rows))

    # Applying, on the main thread.

    def apply(self, batch: Batch, outputs: Sequence[OutputsT], schedule: Schedule) -> None:
        """Apply a batch whose slices are computed."""
        raise NotImplementedError


class TestJob(BatchJob[Counted, Counted]):
    """Batches of `evaluate`, in any order; nothing is applied."""

    name = "test"

    def __init__(self, trainer: JobTrainer):
        slices = trainer.strategy.slices
        super().__init__(trainer, lambda: Schedule(math.inf, slices), in_turns=True)

    def step(self, data: Tree, share: tf.Tensor, rng_states: tf.Tensor) -> Tree:
        """Count the metrics of one slice; traced."""
        with tf_replicas.in_replica(self.strategy):
            traced = self.keras_step(data, pull(self.variables()), rng_states, share)
            return self.pack(self.metrics.count(traced))

    def apply(self, batch: Batch, outputs: Sequence[Counted], schedule: Schedule) -> None:
        self.metrics.add(outputs)


class PredictJob(BatchJob[Tree, Tree]):
    """Batches of `predict`, one after the other: a slice per worker, rows in order."""

    name = "predict"

    def __init__(self, trainer: JobTrainer):
        workers = trainer.strategy.workers
        super().__init__(trainer, lambda: Schedule(math.inf, workers))
        self._outputs: list[Tree] = []

    @property
    def slices(self) -> int:
        return self.strategy.workers

    @property
    def is_joined(self) -> bool:
        return bool(self.trainer.checks_of(self.name).joined)

    @property
    def ahead(self) -> int:
        return 0  # batches are applied in order

    def step(self, data: Tree, share: tf.Tensor, rng_states: tf.Tensor) -> Tree:
        """Predict for one slice, as if it were a batch; traced."""
        with tf_replicas.in_replica(self.strategy):
            return self.keras_step(data, pull(self.variables()), rng_states).logs

    def fetch(self, traced: Traced[Tree], outputs: Tree) -> Tree:
        return _on_chief(outputs)

    def apply(self, batch: Batch, outputs: Sequence[Tree], schedule: Schedule) -> None:
        with tf.device(tf_servers.CHIEF):
            self._outputs.append(_concatenated(outputs))

    def take_outputs(self) -> Tree:
        """Return the outputs of all batches since the last call, with rows in order."""
        outputs, self._outputs = self._outputs, []
        return _concatenated(outputs)

    def close(self) -> None:
        super().close()
        self._outputs = []


def _on_chief(outputs: T) -> T:
    """Copy tensors to the chief: now, so that a lost worker is noticed here."""
    with tf.device(tf_servers.CHIEF):
        return tf.nest.map_structure(tf.identity, outputs, expand_composites=True)


def _concatenated(outputs: Sequence[Tree]) -> Tree:
    """Put the rows of structures of tensors one after the other."""
    return tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), *outputs)
