"""Starting lost workers, and the evaluator, of a parameter-server job again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dtk.errors import ClusterError
from dtk.launch import job_processes
from dtk.launch.ending import Ending
from dtk.launch.plan import Process
from dtk.launch.rank import Rank, killer
from dtk.launch.starter import Starter


class Restarts:
    """Starts workers and the evaluator again that a signal has ended, each a number of times."""

    def __init__(
        self,
        processes: Sequence[Process],
        ending: Ending,
        starter: Starter,
        start_again: Callable[[Rank], None],
        say: Callable[[str], None],
        most: int,
    ) -> None:
        self._processes = processes
        self._ending = ending
        self._starter = starter
        self._start_again = start_again
        self._say = say
        self._most = most

    def replace(self, rank: Rank) -> None:
        """Start a lost task again, or say that the job goes on without it."""
        self._clear(rank)
        lost = _how(rank)
        # One that failed by itself would do so again.
        if rank.signal and rank.restarts < self._most:
            rank.restarts += 1
            self._say(f"{lost}; starting it again ({rank.restarts} of {self._most})")
            try:
                self._start_again(rank)
                return
            except ClusterError as error:
                lost = str(error)
        elif rank.signal and self._most:
            lost += f" ({rank.restarts} of {self._most} restarts used)"
        rank.given_up = True
        if rank.process.role == "evaluator":
            self._say(f"{lost}; training goes on without it, and its exit code will be the job's")
            return
        workers = sum(process.role == "worker" for process in self._processes)
        left = len(self._ending.workers_left())
        self._say(
            f"{lost}; the job goes on with {left} of {workers} workers"
            if left
            else f"{lost}; no worker is left"
        )

    def _clear(self, rank: Rank) -> None:
        """End the children of a lost worker, and wait for its last output.

        They may hold its port, or memory that its successor needs.
        """
        mark = self._starter.mark(rank.process)
        job_processes.end(mark, grace=0.0, sessions=[rank.popen.pid])
        rank.hang_up()
        for reader in rank.readers:
            reader.join(2.0)


def _how(rank: Rank) -> str:
    """Say how a task was lost, for a sentence."""
    name = rank.process.name
    if rank.process.role == "worker":
        name += f" (worker {rank.process.rank - 1})"  # the chief is rank 0
    if rank.stuck:
        return f"{name} {rank.stuck}, and was ended"
    if not rank.signal:
        return f"{name} ended {rank.how}"
    why = ", probably by the kernel's out-of-memory killer" if rank.was_short_of_memory else ""
    return f"{name} was killed by {killer(rank.signal)}{why}"
