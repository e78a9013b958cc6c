"""The end of a job, told from how its processes ended. Starts and ends nothing.

    all-reduce           every rank has ended with 0 ───────> over
                         one fails ─────────────────────────> over: each needs all the others

    parameter servers    chief, evaluator have ended with 0 > over: ps and workers only serve
                         a worker is killed by a signal ────> it is started again, or done without
                         a worker fails by itself ──────────> over: so would its successor
                         a ps fails ────────────────────────> over: its variables are gone
                         an evaluator is killed, or fails ──> it is started again, or done without
                         it fails before it evaluated any ──> over: the script asks too much
                         it is done without, chief ends ────> over, with the evaluator's exit code

Workers and servers are expected to end by themselves soon after the chief; their exit codes are
then no failures.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtk.launch.plan import Process
from dtk.launch.rank import Rank

# Seconds. Ends that are less than this apart have no order: a thread for each process notices.
TIE = 0.1


class Ending:
    """Says what ends a job whose ranks all need each other."""

    # The roles whose end, with exit code 0, is the job's.
    essential_roles: tuple[str, ...] = ("chief", "worker")
    # Whether the job goes on without some of its processes, and these can be started again.
    can_replace = False

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    @property
    def essential(self) -> list[Rank]:
        """The processes whose end is the job's."""
        return [rank for rank in self._ranks if rank.process.role in self.essential_roles]

    @property
    def serving(self) -> list[Rank]:
        """The processes that end by themselves once the job is over."""
        return []

    @property
    def over(self) -> bool:
        """Whether the job has succeeded or failed."""
        return all(rank.code == 0 for rank in self.essential) or bool(self.failures())

    def failures(self) -> list[Rank]:
        """Return the processes whose failure ends the job."""
        return [rank for rank in self._ranks if rank.failed]

    def failed_before(self, rank: Rank) -> bool:
        """Return whether another process has failed, whose failure this one cannot explain."""
        failures = self.failures()
        if not failures:
            return False
        first = min(failures, key=lambda one: one.exited)
        return rank is not first and rank is not self.speaker(first)

    def lost(self) -> list[Rank]:
        """Return the processes that are gone and can be replaced or done without."""
        return []

    def workers_left(self) -> list[Rank]:
        """Return the workers that a job does not have to do without."""
        return [rank for rank in self._ranks if not rank.failed]

    def speaker(self, culprit: Rank) -> Rank:
        """Return the process that can say what a failure means."""
        return culprit

    def culprit(self) -> Rank | None:
        """Return the process whose failure came first; None without a failure.

        The system reports the end of a large process some time after its peers have noticed, so
        one that a signal struck goes before those that failed by themselves, and one that lost a
        peer comes last.
        """
        return min(
            self.failures(),
            key=lambda rank: (not rank.was_struck, rank.is_victim, rank.failed_at),
            default=None,
        )


class ServedEnding(Ending):
    """Says what ends a job with parameter servers.

    The chief runs it; workers and servers serve the chief.
    """

    essential_roles = ("chief", "evaluator")
    can_replace = True

    @property
    def chief(self) -> Rank:
        """The process that runs the job."""
        return self._of("chief")[0]

    @property
    def serving(self) -> list[Rank]:
        """Workers and servers once the chief has ended, well or not."""
        return [] if self.chief.code is None else self._of("worker", "ps")

    def failures(self) -> list[Rank]:
        """Return the processes whose failure ends the job."""
        return [rank for rank in super().failures() if not self._is_borne(rank)]

    def lost(self) -> list[Rank]:
        """Return the tasks that are gone, and are still to be replaced or given up."""
        if self.chief.code is not None:
            return []  # no chief would give them work, or await them
        gone = [rank for rank in self._of("worker") if rank.signal]
        gone += [rank for rank in self._of("evaluator") if rank.failed and self._is_borne(rank)]
        return [rank for rank in gone if not rank.given_up]

    def workers_left(self) -> list[Rank]:
        """Return the workers that serve, did so to their end, or can be restarted."""
        return [w for w in self._of("worker") if not w.failed or (w.signal and not w.given_up)]

    def speaker(self, culprit: Rank) -> Rank:
        """Return the process that can say what a failure means: of a server's, the chief."""
        return self.chief if culprit.process.role == "ps" else culprit

    def culprit(self) -> Rank | None:
        """Return the process that failed first; None without a failure."""
        failures = self.failures()
        if any(rank.process.role == "ps" for rank in failures):
            # Others may print that a server is gone sooner than the system reports its end.
            return min(failures, key=lambda rank: rank.exited)
        return super().culprit()

    def _of(self, *roles: str) -> list[Rank]:
        return [rank for rank in self._ranks if rank.process.role in roles]

    def _is_borne(self, rank: Rank) -> bool:
        """Return whether the job goes on, or ended well, although this rank failed."""
        if rank.process.role == "evaluator":
            begun = rank.signal or rank.restarts or rank.status.worked
            return bool(begun) if self.chief.code is None else self.chief.code != 0
        if rank.process.role in self.essential_roles:
            return False
        if self.chief.code == 0 and rank.exited > self.chief.exited - TIE:
            return True  # there was nothing left to serve
        return bool(rank.signal) and rank.process.role == "worker" and not self._was_last(rank)

    def _was_last(self, worker: Rank) -> bool:
        if not worker.given_up or self.workers_left():
            return False
        return worker is max(self._of("worker"), key=lambda rank: rank.exited)


def choose(processes: Sequence[Process], ranks: Sequence[Rank]) -> Ending:
    """Return the rules for a plan.

    >>> type(choose([], [])).__name__
    'Ending'
    """
    served = {"chief", "ps"} <= {process.role for process in processes}
    return ServedEnding(ranks) if served else Ending(ranks)
