"""Queue of tasks: the parts of steps, handed to workers as the schedule allows.

    add             work of one step
    take            a part of it, for a worker     <-----.
    finished        the worker's result                  |  lost: another worker takes it
    next_complete   the results of a step that has them all

The schedule decides that some worker may take one more piece of a step. The queue decides whether
this worker may, and which part of the step's work the piece is.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Set
from typing import Generic, NamedTuple, TypeVar

from dtk.parameter_server.scheduler import Schedule, StepSlice

WorkT = TypeVar("WorkT")
OutputsT = TypeVar("OutputsT")


class Task(NamedTuple, Generic[WorkT]):
    """Part of a step's work for a worker."""

    piece: StepSlice  # handed out by the schedule
    part: int  # index of the part, `0 <= part < schedule.slices`
    work: WorkT  # the step's work


def _keep() -> None:
    """Release nothing."""


@dataclasses.dataclass(frozen=True)
class Result(Generic[OutputsT]):
    """Result of one task."""

    outputs: OutputsT  # computed by the worker
    older: int = 0  # applied steps missing in the weights used, besides the steps under way
    # called once when the outputs are no longer needed, for example to reuse their gradient buffer
    release: Callable[[], None] = _keep


class InTurns(Generic[WorkT]):
    """Turns of workers with their own pipelines, so that all pipelines are read equally far.

    Otherwise a fast worker's rows would count more often than a slow worker's. While a worker is
    lost, another takes its turn.
    """

    def __init__(
        self, workers: int, lost_workers: Collection[int], has_turns: Callable[[WorkT], bool]
    ):
        self._workers, self._lost_workers, self._has_turns = workers, lost_workers, has_turns

    def allows(self, worker: int, number: int, work: WorkT) -> bool:
        """Return whether a worker may take the next slice: its own, or a lost worker's."""
        owner = number % self._workers
        return not self._has_turns(work) or owner == worker or owner in self._lost_workers


class CompleteStep(NamedTuple, Generic[WorkT, OutputsT]):
    """Step with the results of all parts."""

    number: int
    work: WorkT
    # in the order of parts, without parts that have no rows
    results: list[Result[OutputsT]]


def in_order(worker: int, index: int, free: Set[int]) -> int:
    """Choose the part with the slice's number."""
    del worker, free
    return index


def own_part(worker: int, index: int, free: Set[int]) -> int:
    """Choose the part with the worker's number, or the first free part if that is taken.

    A worker that keeps its rows already has the rows of this part.
    """
    del index
    return worker if worker in free else min(free)


@dataclasses.dataclass
class _OpenStep(Generic[WorkT, OutputsT]):
    """Step that is not complete."""

    work: WorkT
    empty: Collection[int]  # parts
    parts: dict[int, int] = dataclasses.field(default_factory=dict)  # slice -> part
    results: dict[int, Result[OutputsT]] = dataclasses.field(default_factory=dict)  # by part


class TaskQueue(Generic[WorkT, OutputsT]):
    """Queue of the parts of steps; see `worker_pool.WorkSource`."""

    def __init__(
        self,
        schedule: Schedule,
        turns: InTurns[WorkT] | None = None,
        choose_part: Callable[[int, int, Set[int]], int] = in_order,
    ):
        self.schedule, self._turns, self._choose_part = schedule, turns, choose_part
        self._steps: dict[int, _OpenStep[WorkT, OutputsT]] = {}
        self._complete: collections.deque[int] = collections.deque()

    def add(self, work: WorkT, empty: Collection[int] = ()) -> None:
        """Add the work of one step."""
        self._steps[self.schedule.offer()] = _OpenStep(work, empty)

    def take(self, worker: int) -> Task[WorkT] | None:
        """Hand out the next task for a worker. A lost piece keeps its part."""
        while self._is_allowed(worker) and (piece := self.schedule.take(worker)) is not None:
            step = self._steps[piece.step]
            if piece.slice not in step.parts:
                free = set(range(self.schedule.slices)).difference(step.parts.values())
                part = self._choose_part(worker, piece.slice, free)
                step.parts[piece.slice] = part
            task = Task(piece, step.parts[piece.slice], step.work)
            if task.part not in step.empty:
                return task
            self.finished(task, worker, None)
        return None

    def _is_allowed(self, worker: int) -> bool:
        number, index = self.schedule.next_slice
        step = self._steps.get(number)
        if step is None or self._turns is None:
            return True
        return self._turns.allows(worker, number * self.schedule.slices + index, step.work)

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

    def next_complete(self) -> CompleteStep[WorkT, OutputsT] | None:
        """Remove and return a complete step; None if there is none."""
        if not self._complete:
            return None
        number = self._complete.popleft()
        # A worker may still compute a copy of a part; its task holds the work.
        step = self._steps.pop(number)
        return CompleteStep(number, step.work, [r for _, r in sorted(step.results.items())])
