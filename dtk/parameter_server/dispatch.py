"""Dispatch steps to workers behind parameter servers, and apply their results.

Workers only compute. Everything else happens on the main thread, inside the calls of a dispatcher,
so a callback that reads weights never sees half a step.

    main thread   submit ------------------- wait: complete --- apply --- applied ...
    workers          \\-- take, compute, hand in --/                         \\-- the next may start

A job (`jobs`, `proximal`) says what to compute and apply, the schedule when a step may start, and
the queue which worker takes which part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, cast

from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import CompleteStep, OutputsT, Result, Task, TaskQueue, WorkT
from dtk.parameter_server.worker_pool import WorkerPool


class WorkerJob(Protocol[WorkT, OutputsT]):
    """How workers compute a part of a step, and how the chief applies a complete step."""

    def compute(self, task: Task[WorkT], worker: int, schedule: Schedule) -> Result[OutputsT]:
        """Compute a part of a step; called on the worker's thread."""

    def apply(self, work: WorkT, results: Sequence[Result[OutputsT]], schedule: Schedule) -> None:
        """Apply a complete step; called on the main thread, for one step after the other."""


def _none(schedule: Schedule) -> float:
    del schedule
    return 0


def _ignore(schedule: Schedule) -> None:
    del schedule


class Dispatcher(Generic[WorkT, OutputsT]):
    """Dispatches steps to the workers of a pool, and applies them when they are complete."""

    def __init__(
        self,
        pool: WorkerPool,
        new_queue: Callable[[], TaskQueue[WorkT, OutputsT]],
        job: WorkerJob[WorkT, OutputsT],
        ahead: Callable[[Schedule], float] = _none,
        on_applied: Callable[[Schedule], None] = _ignore,
    ):
        self._pool, self._new_queue, self._job = pool, new_queue, job
        self._ahead, self._on_applied = ahead, on_applied
        self._queue = new_queue()
        self._open = contextlib.ExitStack()
        self._is_open = False

    @property
    def schedule(self) -> Schedule:
        """Schedule that decides which step may start."""
        return self._queue.schedule

    def submit(self, work: WorkT, empty: Collection[int] = ()) -> None:
        """Dispatch one step; return once at most `ahead` steps are under way."""
        self._start()
        self._pool.offer(functools.partial(self._queue.add, work, empty))
        self._apply_until(self._ahead(self.schedule))

    def run(self, works: Sequence[WorkT]) -> None:
        """Dispatch several steps; return once all are applied."""

        def add_all() -> None:
            for work in works:
                self._queue.add(work)

        self._start()
        self._pool.offer(add_all)
        self._apply_until(0)

    def drain(self) -> None:
        """Wait until every step submitted is applied."""
        if self._is_open:
            self._apply_until(0)

    def loosen(self, tau: float) -> None:
        """Let steps from now on start earlier than before; see `Schedule.loosen`."""
        self._pool.offer(functools.partial(self.schedule.loosen, tau))

    def close(self) -> None:
        """Release the workers, and forget unfinished steps, which an exception has left."""
        self._open.close()
        self._is_open = False
        if self.schedule.unfinished:
            self._queue = self._new_queue()

    def _start(self) -> None:
        if not self._is_open:
            compute = functools.partial(self._compute, self.schedule)
            self._open.enter_context(self._pool.working(self._queue, compute))
            self._is_open = True

    def _compute(self, schedule: Schedule, task: Task[WorkT], worker: int) -> Result[OutputsT]:
        return self._job.compute(task, worker, schedule)

    def _apply_until(self, allowed: float) -> None:
        """Apply steps as they become complete, until no more than `allowed` are under way."""

        def ready() -> CompleteStep[WorkT, OutputsT] | bool:
            return self._queue.next_complete() or self.schedule.unfinished <= allowed

        while True:
            # mypy infers the common base of the two types, not their union.
            found = cast(CompleteStep[WorkT, OutputsT] | bool, self._pool.wait(ready))
            if isinstance(found, bool):
                return
            with self._pool.asking_servers():
                self._job.apply(found.work, found.results, self.schedule)
            self._pool.offer(functools.partial(self.schedule.applied, found.number))
            for result in found.results:
                result.release()
            self._on_applied(self.schedule)
