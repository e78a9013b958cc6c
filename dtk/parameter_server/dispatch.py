"""Hand batches out to workers behind parameter servers, and take results back.

A loop is what Keras calls as its train, test or predict function: it hands a batch's slices to
workers and uses what they made of them. Everything but the workers' computing happens on the main
thread, between Keras's callbacks: a callback that reads weights never sees half a step.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from dtk.input import slicing
from dtk.parameter_server import gradient_buffers, worker_data
from dtk.parameter_server.contract import LoopTrainer
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.scheduler import Piece, Schedule
from dtk.trainer.ranks import seeds
from dtk.trainer.replica import replica_step

# Steps that compute at once draw their random numbers this far apart.
RNG_STRIDE = 1 << 10


class Result:
    """Result of one slice that a worker has computed.

    Args:
        outputs: What came back to the chief, as arrays.
        share: The slice's part of the rows of its batch, 0 to 1.
        buffer: The buffer that holds its gradients; None where a step has none.
        release: Takes the gradient buffer back.
        older: Applied steps that were not in the weights it used, besides those under way.
    """

    def __init__(
        self,
        outputs: Any,
        share: float,
        buffer: gradient_buffers.GradientBuffer | None = None,
        release: Callable[[gradient_buffers.GradientBuffer], None] = lambda buffer: None,
        older: int = 0,
    ):
        self.outputs, self.share, self.buffer, self._release = outputs, share, buffer, release
        self.older = older

    def drop(self) -> None:
        """Give the gradient buffer back: the result is not needed any more."""
        if self.buffer is not None:
            self._release(self.buffer)


class Batch(NamedTuple):
    """Global batch in slices.

    Attributes:
        parts: The slices.
        counts: Rows of each slice that are its own; 0 for one that holds a padding row only.
        rows: Rows of all slices.
        spec: Specification of a slice of any number of rows.
        pipelines: Where workers take the rows from, if the chief has none.
        bound: Whether slices go round the workers; for pipelines only.
    """

    parts: tuple
    counts: tuple[int, ...]
    rows: int
    spec: Any
    pipelines: worker_data.Pipelines | None = None
    bound: bool = False

    @property
    def holders(self) -> float:
        """Slices that have rows."""
        return float(sum(count > 0 for count in self.counts))


def whole_batch(data: Any) -> Any:
    """Return a batch as Keras's steps take it; called while tracing.

    Args:
        data: A structure of tensors, or the iterator of a worker's own pipeline, whose next batch
            it is.

    Returns:
        A structure of tensors, without optionals.
    """
    if isinstance(data, tf.data.Iterator):
        data = data.get_next()
    return replica_step.without_optionals(data)


def rng_offset(steps: int) -> np.uint32:
    """Return how far apart steps draw their random numbers.

    Args:
        steps: How many steps lie between.

    Returns:
        The offset of the state's counter, modulo 2^32.
    """
    return np.uint32(steps * RNG_STRIDE % 2**32)


# A slice of a batch, as a worker is given it.
SliceTask = tuple[Piece, Batch]


class Steps:
    """Queue of the slices of batches, handed out as the schedule allows; see `worker_pool.Work`.

    Args:
        schedule: Which slice may start.
        workers: Number of workers.
        lost_workers: Indices of the workers that are lost at the moment; changes from outside.
    """

    def __init__(self, schedule: Schedule, workers: int, lost_workers: Collection[int]):
        self.schedule, self._workers, self._lost_workers = schedule, workers, lost_workers
        self._batches: dict[int, Batch] = {}
        self._results: dict[int, dict[int, Result | None]] = {}
        self._complete: collections.deque[int] = collections.deque()

    def add(self, batch: Batch) -> None:
        """Add a batch, which is one step.

        Args:
            batch: The batch, in as many slices as the schedule gives a step.
        """
        step = self.schedule.offer()
        self._batches[step], self._results[step] = batch, {}

    def take(self, worker: int) -> SliceTask | None:
        """Hand out the next slice for a worker; slices without rows are finished at once.

        Args:
            worker: Index of the worker.

        Returns:
            The slice and its batch; None if nothing may start yet.
        """
        while self._is_turn_of(worker) and (piece := self.schedule.take(worker)) is not None:
            work = (piece, self._batches[piece.step])
            if work[1].counts[piece.slice] > 0:
                return work
            self.finished(work, worker, None)
        return None

    def _is_turn_of(self, worker: int) -> bool:
        """Return whether the next slice may be this worker's.

        Workers that read pipelines of their own take turns, so that each is read as far as any
        other. Another takes its turn while one is lost.
        """
        step, part = self.schedule.next_slice
        batch = self._batches.get(step)
        if batch is None or batch.pipelines is None or not batch.bound:
            return True
        owner = (step * self.schedule.slices + part) % self._workers
        return owner == worker or owner in self._lost_workers

    def finished(self, work: SliceTask, worker: int, result: Result | None) -> None:
        """Take the result of a slice.

        Args:
            work: The slice and its batch, as `take` returned them.
            worker: Index of the worker that has computed it.
            result: Its result; None for a slice without rows.
        """
        piece, _ = work
        if self.schedule.returned(piece, worker, 0 if result is None else result.older):
            self._results[piece.step][piece.slice] = result
            if self.schedule.complete(piece.step):
                self._complete.append(piece.step)
        elif result is not None:
            result.drop()

    def lost(self, work: SliceTask, worker: int) -> None:
        """Hand a slice out again, whose worker was lost with it.

        Args:
            work: The slice and its batch, as `take` returned them.
            worker: Index of the lost worker.
        """
        self.schedule.lost(work[0], worker)

    def next_complete(self) -> tuple[int, list[Result]] | None:
        """Remove and return a step whose slices are all computed.

        The slices without rows are left out.

        Returns:
            The step's number and the results in the order of slices; None if no step is complete.
        """
        if not self._complete:
            return None
        step = self._complete.popleft()
        results = self._results.pop(step)
        # A copy of one of its slices may still be computing, and holds the batch.
        del self._batches[step]
        return step, [r for _, r in sorted(results.items()) if r is not None]


# A complete step and its results, or whether no more steps are under way than allowed.
_Ready = tuple[int, list[Result]] | bool


class Loop:
    """Hands batches out to workers and takes results back: base of training, testing, predicting.

    Args:
        trainer: The model's trainer.
        schedule: Makes what decides which slice may start.
    """

    def __init__(self, trainer: LoopTrainer, schedule: Callable[[], Schedule]):
        self.model, self.strategy = trainer.model, trainer.strategy
        self.trainer = trainer
        self._new_schedule = schedule
        self._steps = self._new_steps()
        self._functions: dict[str, tf.types.experimental.ConcreteFunction] = {}
        self._reports: dict[str, gradient_buffers.Report] = {}
        self._open = contextlib.ExitStack()
        self._is_open = False
        # States of random layers, shape (layers, 2), and the step they are the states of.
        self._rng_state: np.ndarray | None = None
        self._first = 0
        self._draws = False

    @property
    def schedule(self) -> Schedule:
        """Schedule that decides which slice may start."""
        return self._steps.schedule

    @property
    def ahead(self) -> int:
        """Batches that may be under way when `step` returns."""
        return 0

    def new_epoch(self, epoch: int) -> None:
        """Begin what is observed anew; loops without statistics observe nothing.

        Args:
            epoch: Number of the epoch that begins, from 0.
        """

    def step(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> None:
        """Hand out one batch; return once no more than `ahead` are under way.

        Args:
            batch: The batch in slices, or the pipelines that workers read themselves.
            spec: Specification of its slices, of any number of rows.

        Raises:
            ClusterError: A parameter server is gone, or no worker has been there for too long.
        """
        self._prepare(spec)
        self._hand_out(self._batch(batch, spec))

    def _hand_out(self, batch: Batch) -> None:
        if not self._is_open:
            self._open.enter_context(self.strategy.pool.working(self._steps, self._compute))
            self._is_open = True
        self.strategy.pool.offer(lambda: self._steps.add(batch))
        self._flush(self.ahead)

    def _batch(self, batch: slicing.Slices | worker_data.Pipelines, spec: Any) -> Batch:
        if isinstance(batch, worker_data.Pipelines):
            slices = self.strategy.slices
            # Every slice counts alike: they have the same number of rows, see `worker_dataset`.
            return Batch((), (1,) * slices, slices, spec, batch, slices == self.strategy.workers)
        return Batch(batch.parts, tuple(map(int, batch.counts)), int(batch.rows), spec)

    def drain(self) -> None:
        """Wait until all that was handed out is finished; keep the layers' random state."""
        if self._is_open:
            self._flush(0)
        if self._rng_state is not None and self._draws:
            if self.schedule.tau:
                self._rng_state[:, 1] += rng_offset(self.schedule.offered - self._first)
            for variable, state in zip(
                self.trainer.rng_state_variables(), self._rng_state, strict=True
            ):
                variable.assign(state)
        self._rng_state = None

    def close(self) -> None:
        """Stop the workers, and forget what is not finished: an exception left the loop."""
        self._open.close()
        self._is_open = False
        self._rng_state = None
        if self.schedule.unfinished:
            self._steps = self._new_steps()

    def _new_steps(self) -> Steps:
        strategy = self.strategy
        return Steps(self._new_schedule(), strategy.workers, strategy.pool.lost_workers)

    def _flush(self, allowed: int) -> None:
        pool = self.strategy.pool

        def ready() -> _Ready:
            return self._steps.next_complete() or self.schedule.unfinished <= allowed

        while True:
            found = cast(_Ready, pool.wait(ready))
            if isinstance(found, bool):
                return
            step, results = found
            with pool.asking_servers():
                self._finish(step, results)
            pool.offer(functools.partial(self.schedule.applied, step))
            for result in results:
                result.drop()

    def _take_rng_state(self) -> tf.TensorSpec:
        """Find out what random layers go on from."""
        if self._rng_state is None:
            states = [v.numpy() for v in self.trainer.rng_state_variables()]
            self._rng_state = np.array(states, "uint32").reshape(-1, 2)
            self._first = self.schedule.offered
        return tf.TensorSpec(self._rng_state.shape, tf.uint32)

    def _rng_states(self, rng_state: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Return the states of random layers in a traced step."""
        states = self.trainer.rng_state_variables()
        return list(zip(states, tf.unstack(rng_state, num=len(states)), strict=True))

    def _note_draws(
        self, traced: FunctionalStep, given: list[tuple[keras.Variable, tf.Tensor]]
    ) -> None:
        now = traced.scope.get_current_value
        self._draws |= any(now(variable) is not state for variable, state in given)

    def _rng_state_of(self, piece: Piece) -> np.ndarray:
        """Return the random states of a slice: the same on every worker, and at any time."""
        assert self._rng_state is not None
        states = self._rng_state.copy()
        if self.schedule.tau:
            states[:, 1] += rng_offset(piece.step - self._first)
        return np.array(
            [seeds.fold_seed(state, piece.slice) for state in states], "uint32"
        ).reshape(-1, 2)

    def _prepare(self, spec: Any) -> None:
        """Trace, here and not on a worker's thread, what batches like this one need."""
        raise NotImplementedError

    def _compute(self, work: SliceTask, worker: int) -> Result:
        """Compute a slice; called on a worker's thread."""
        raise NotImplementedError

    def _finish(self, step: int, results: list[Result]) -> None:
        """Use the results of a batch, on the main thread."""
        raise NotImplementedError
