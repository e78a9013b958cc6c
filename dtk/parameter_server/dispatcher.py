"""Dispatch the parts of steps to workers, and apply steps that are complete.

Workers only compute. Everything else happens on the main thread, inside the calls of a dispatcher,
so a callback that reads weights never sees half a step.

    main thread   submit ------------------- wait: complete --- apply --- applied ...
    workers          \\-- take, compute, hand in --/                         \\-- the next may start

`scheduler.Schedule` decides that some worker may take one more piece of a step; the queue decides
whether this worker may, and which part of the step's work the piece is.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from dtk.parameter_server.scheduler import Schedule, StepSlice
from dtk.parameter_server.worker_pool import Piece, WorkerPool

WorkT = TypeVar("WorkT")
OutputsT = TypeVar("OutputsT")


class Task(NamedTuple, Generic[WorkT]):
    """Part of a step's work for a worker."""

    piece: StepSlice  # handed out by the schedule
    part: int  # index of the part, `0 <= part < schedule.slices`
    work: WorkT  # the step's work


@dataclasses.dataclass(frozen=True)
class Result(Generic[OutputsT]):
    """Result of one task."""

    outputs: OutputsT  # computed by the worker
    older: int = 0  # applied steps missing in the weights used, besides the steps under way
    # called once when the outputs are no longer needed, for example to reuse their gradient buffer
    release: Callable[[], None] = lambda: None


@dataclasses.dataclass
class OpenStep(Generic[WorkT, OutputsT]):
    """Step that is not complete, or not yet removed from the queue."""

    number: int
    work: WorkT
    empty: Collection[int]  # parts
    parts: dict[int, int] = dataclasses.field(default_factory=dict)  # slice -> part
    results: dict[int, Result[OutputsT]] = dataclasses.field(default_factory=dict)  # by part

    def in_order(self) -> list[Result[OutputsT]]:
        """Return the results in the order of parts, without parts that have no rows."""
        return [result for _, result in sorted(self.results.items())]


class TaskQueue(Generic[WorkT, OutputsT]):
    """Queue of the parts of steps, handed to workers as the schedule allows.

    add             work of one step
    take            a part of it, for a worker     <-----.
    finished        the worker's result                  |  lost: another worker takes it
    next_complete   the step and its results, once it has them all

    Args:
        schedule: When a step may start.
        may_take: Whether a worker may take the n-th slice, counted over all steps, of this work.
        own_parts: A worker takes the part with its number, whose rows it already has, or the first
            free part if that is taken; else parts are taken in order.
    """

    def __init__(
        self,
        schedule: Schedule,
        may_take: Callable[[int, int, WorkT], bool] = lambda worker, number, work: True,
        own_parts: bool = False,
    ):
        self.schedule, self._may_take, self._own_parts = schedule, may_take, own_parts
        self._steps: dict[int, OpenStep[WorkT, OutputsT]] = {}
        self._complete: collections.deque[int] = collections.deque()

    def add(self, work: WorkT, empty: Collection[int] = ()) -> None:
        """Add the work of one step."""
        number = self.schedule.offer()
        self._steps[number] = OpenStep(number, work, empty)

    def take(self, worker: int) -> Task[WorkT] | None:
        """Hand out the next task for a worker. A lost piece keeps its part."""
        while self._is_allowed(worker) and (piece := self.schedule.take(worker)) is not None:
            step = self._steps[piece.step]
            if piece.slice not in step.parts:
                step.parts[piece.slice] = self._choose_part(worker, piece, step.parts.values())
            task = Task(piece, step.parts[piece.slice], step.work)
            if task.part not in step.empty:
                return task
            self.finished(task, worker, None)
        return None

    def _is_allowed(self, worker: int) -> bool:
        number, index = self.schedule.next_slice
        step = self._steps.get(number)
        nth = number * self.schedule.slices + index
        return step is None or self._may_take(worker, nth, step.work)

    def _choose_part(self, worker: int, piece: StepSlice, taken: Collection[int]) -> int:
        if not self._own_parts:
            return piece.slice
        free = set(range(self.schedule.slices)).difference(taken)
        return worker if worker in free else min(free)

    def finished(self, task: Task[WorkT], worker: int, result: Result[OutputsT] | None) -> None:
        """Take the result of a task; release it if another result came first."""
        number = task.piece.step
        if self.schedule.returned(task.piece, worker, 0 if result is None else result.older):
            if result is not None:
                self._steps[number].results[task.part] = result
            if self.schedule.complete(number):
                self._complete.append(number)
        elif result is not None:
            result.release()

    def lost(self, task: Task[WorkT], worker: int) -> None:
        """Hand out again the task of a lost worker."""
        self.schedule.lost(task.piece, worker)

    def next_complete(self) -> OpenStep[WorkT, OutputsT] | None:
        """Remove and return a complete step; None if there is none."""
        # A worker may still compute a copy of a part; its task holds the work.
        return self._steps.pop(self._complete.popleft()) if self._complete else None


# Computes a part of a step, on the worker's thread.
Compute: TypeAlias = Callable[[Task[WorkT], int, Schedule], Result[OutputsT]]
# Applies a complete step, on the main thread, one step after the other.
Apply: TypeAlias = Callable[[WorkT, Sequence[OutputsT], Schedule], None]


class Dispatcher(Generic[WorkT, OutputsT]):
    """Dispatches steps to the workers of a pool, and applies them when they are complete."""

    def __init__(
        self,
        pool: WorkerPool,
        new_queue: Callable[[], TaskQueue[WorkT, OutputsT]],
        compute: Compute[WorkT, OutputsT],
        apply: Apply[WorkT, OutputsT],
    ):
        self._pool, self._new_queue = pool, new_queue
        self._compute, self._apply = compute, apply
        self._queue = new_queue()
        self._open: contextlib.ExitStack | None = None

    @property
    def schedule(self) -> Schedule:
        return self._queue.schedule

    def submit(self, work: WorkT, empty: Collection[int] = (), ahead: float = 0) -> None:
        """Dispatch one step; return once at most `ahead` steps are under way."""
        if self._open is None:
            self._open = contextlib.ExitStack()
            self._open.enter_context(self._pool.working(functools.partial(self._take, self._queue)))
        self._pool.offer(functools.partial(self._queue.add, work, empty))
        self._apply_until(ahead)

    def _take(self, queue: TaskQueue[WorkT, OutputsT], worker: int) -> Piece | None:
        task = queue.take(worker)
        if task is None:
            return None

        def compute() -> Callable[[], None]:
            result = self._compute(task, worker, queue.schedule)
            return functools.partial(queue.finished, task, worker, result)

        return Piece(compute, functools.partial(queue.lost, task, worker))

    def drain(self) -> None:
        """Wait until every step submitted is applied."""
        if self._open is not None:
            self._apply_until(0)

    def loosen(self, tau: float) -> None:
        """Let steps from now on start earlier than before; see `Schedule.loosen`."""
        self._pool.offer(functools.partial(self.schedule.loosen, tau))

    def close(self) -> None:
        """Release the workers, and forget unfinished steps, which an exception has left."""
        if self._open is not None:
            self._open.close()
            self._open = None
        if self.schedule.unfinished:
            self._queue = self._new_queue()

    def _apply_until(self, allowed: float) -> None:
        """Apply steps as they become complete, until no more than `allowed` are under way."""

        def ready() -> tuple[OpenStep[WorkT, OutputsT] | None] | None:
            step = self._queue.next_complete()
            return (step,) if step or self.schedule.unfinished <= allowed else None

        while True:
            (step,) = self._pool.wait(ready)
            if step is None:
                return
            results = step.in_order()
            with self._pool.asking_servers():
                self._apply(step.work, [result.outputs for result in results], self.schedule)
            self._pool.offer(functools.partial(self.schedule.applied, step.number))
            for result in results:
                result.release()
