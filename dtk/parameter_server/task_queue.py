"""Queue of tasks: the parts of steps, handed to workers as the schedule allows.

    add             work of one step
    take            a part of it, for a worker     <-----.
    finished        the worker's result                  |  lost: another worker takes it
    next_complete   the results of a step that has them all

The schedule says that some worker may take one more piece of a step. Whether it may be this one,
and which part of the step's work the piece is, is said here.
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
    """Part of a step's work, as a worker is given it."""

    piece: StepSlice  # what the schedule has handed out
    part: int  # which part of the work it is, `0 <= part < schedule.slices`
    work: WorkT  # the step's work


def _keep() -> None:
    """Release nothing."""


@dataclasses.dataclass(frozen=True)
class Result(Generic[OutputsT]):
    """Result of one task."""

    outputs: OutputsT  # what the worker has computed
    older: int = 0  # applied steps that were not in the weights it used, besides those under way
    # called once when the outputs are not needed any more, such as to take back the gradient buffer
    # that they lie in
    release: Callable[[], None] = _keep


class InTurns(Generic[WorkT]):
    """Turns of workers that read pipelines of their own, so that each is read as far as any other.

    Else a fast worker's rows would count more often than a slow one's. Another takes a worker's
    turn while it is lost.
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
    """Step whose parts are all computed."""

    number: int
    work: WorkT
    # the results in the order of parts, those without rows left out
    results: list[Result[OutputsT]]


def in_order(worker: int, index: int, free: Set[int]) -> int:
    """Choose the part of a step's work that a slice is: that of its own number."""
    del worker, free
    return index


def own_part(worker: int, index: int, free: Set[int]) -> int:
    """Choose the part of the worker's own number, or the first one if another worker has that.

    A worker that keeps the rows it was sent has those of this part already.
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
        """Hand out the next task for a worker. A piece that was lost keeps its part."""
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
        """Take the result of a task; release it if another one was first."""
        number = task.piece.step
        if self.schedule.returned(task.piece, worker, 0 if result is None else result.older):
            if result is not None:
                self._steps[number].results[task.part] = result
            if self.schedule.complete(number):
                self._complete.append(number)
        elif result is not None:
            result.release()

    def lost(self, task: Task[WorkT], worker: int) -> None:
        """Hand a task out again, whose worker was lost with it."""
        self.schedule.lost(task.piece, worker)

    def next_complete(self) -> CompleteStep[WorkT, OutputsT] | None:
        """Remove and return a step whose parts are all computed; None if there is none."""
        if not self._complete:
            return None
        number = self._complete.popleft()
        # A copy of one of its parts may still be computing, and has the work with it.
        step = self._steps.pop(number)
        return CompleteStep(number, step.work, [r for _, r in sorted(step.results.items())])
