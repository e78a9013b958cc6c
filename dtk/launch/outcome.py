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

import signal
from collections.abc import Sequence

from dtk.cluster import stall
from dtk.cluster.stall import STUCK
from dtk.errors import advice_on_files
from dtk.launch.plan import Process
from dtk.launch.task import Task

# Seconds. Ends that are less than this apart have no order: a thread for each process notices.
TIE = 0.1
SETTLE = 1.0  # seconds a rank that has told of what ends it gets to exit by itself
# What to do about a rank that somebody, or the system, has killed.
_NEXT = (
    "dtk: a script with dtk.callbacks.Checkpoint(directory, resume=True) goes on from its last "
    "checkpoint when it is started again; `dtk run --max-restarts 3 ...` does so by itself."
)
_KILLED = (
    "dtk: SIGKILL comes from outside: mostly from the kernel, a container or Slurm, for want of "
    "memory (`dmesg`, or their logs, say so); else from `kill -9` or a limit of time."
)
_LESS = (
    "dtk: fewer ranks on that host, a smaller batch, or data that is read from files in place of "
    "held arrays need less memory."
)


class JobOutcome:
    """Says what ends a job, by how its ranks have ended so far.

    Attributes:
        served: Whether there are parameter servers. The chief runs such a job, workers and servers
            serve it, and some processes can be replaced; else ranks all need each other.
    """

    def __init__(self, processes: Sequence[Process], ranks: Sequence[Task]) -> None:
        self._ranks = ranks
        self.served = {"chief", "ps"} <= {process.role for process in processes}

    def _of(self, *roles: str) -> list[Task]:
        return [rank for rank in self._ranks if rank.process.role in roles]

    @property
    def essential(self) -> list[Task]:
        """The processes whose end, with exit code 0, is the job's."""
        return self._of("chief", "evaluator" if self.served else "worker")

    @property
    def chief(self) -> Task:
        """The process that runs a job with servers."""
        return self._of("chief")[0]

    @property
    def serving(self) -> list[Task]:
        """The processes that end by themselves once the chief has ended, well or not."""
        over = self.served and self.chief.code is not None
        return self._of("worker", "ps") if over else []

    @property
    def over(self) -> bool:
        """Whether the job has succeeded or failed."""
        return all(rank.code == 0 for rank in self.essential) or bool(self.failures())

    def failures(self) -> list[Task]:
        """Return the processes whose failure ends the job."""
        return [rank for rank in self._ranks if rank.failed and not self._is_borne(rank)]

    def _is_borne(self, rank: Task) -> bool:
        """Return whether the job goes on, or ended well, although this rank failed."""
        role = rank.process.role
        if not self.served or role == "chief":
            return False
        if role == "evaluator":
            begun = rank.signal or rank.restarts or rank.status.worked
            return bool(begun) if self.chief.code is None else self.chief.code != 0
        if self.chief.code == 0 and rank.exited > self.chief.exited - TIE:
            return True  # there was nothing left to serve
        if not rank.signal or role != "worker":
            return False
        if not rank.given_up or self.workers_left():
            return True
        return rank is not max(self._of("worker"), key=lambda one: one.exited)  # the last one

    def lost(self) -> list[Task]:
        """Return the tasks that are gone, and are still to be replaced or given up."""
        if not self.served or self.chief.code is not None:
            return []  # no chief would give them work, or await them
        gone = [rank for rank in self._of("worker") if rank.signal]
        gone += [rank for rank in self._of("evaluator") if rank.failed and self._is_borne(rank)]
        return [rank for rank in gone if not rank.given_up]

    def workers_left(self) -> list[Task]:
        """Return the workers that serve, did so to their end, or can be restarted."""
        return [w for w in self._of("worker") if not w.failed or (w.signal and not w.given_up)]

    def failed_before(self, rank: Task) -> bool:
        """Return whether another process has failed, whose failure this one cannot explain."""
        first = min(self.failures(), key=lambda one: one.exited, default=None)
        return first is not None and rank is not first and rank is not self.speaker(first)

    def speaker(self, culprit: Task) -> Task:
        """Return the process that can say what a failure means: of a server's, the chief."""
        return self.chief if self.served and culprit.process.role == "ps" else culprit

    def culprit(self) -> Task | None:
        """Return the process whose failure came first; None without a failure.

        The system reports the end of a large process some time after its peers have noticed, so
        one that a signal struck goes before those that failed by themselves, and one that lost a
        peer comes last. Where a server is gone, others may say that sooner than the system reports
        its end.
        """
        failures = self.failures()
        if any(rank.process.role == "ps" for rank in failures):
            return min(failures, key=lambda rank: rank.exited)
        return min(
            failures,
            key=lambda rank: (not rank.was_struck, rank.is_victim, rank.failed_at),
            default=None,
        )

    def exit_code(self, culprit: Task | None) -> int:
        """Return the exit code of a job whose end has come; ask before the others are ended."""
        if culprit is None:
            stopped = any(rank.code != 0 for rank in self.essential)
            return 128 + signal.SIGTERM if stopped else 0
        if culprit.code is None or culprit.stuck:
            return STUCK
        speaker = self.speaker(culprit)
        return (speaker.code if speaker.failed else culprit.code) or 0

    def failure_report(self, rank: Task, left_out: int = 0, restarts: bool = True) -> str:
        """Return the first failing process's last output, so that it is what stands last."""
        count, speaker = len(self._ranks), self.speaker(rank)
        text = f"dtk: {rank.process.name}, host {rank.process.host}, failed first, {rank.how}"
        text += "" if rank.failure is None else rank.failure.place
        text += "." if count == 1 else "; the others were ended."
        if rank.file is not None:
            text += f" All it wrote is in {rank.file.name}."
        if left_out:
            where = "beside that" if rank.file is not None else "kept by --output-dir"
            text += f" What others said of it later is left out here: {left_out} lines, {where}."
        words = rank.last_words()
        if speaker is not rank:
            # A server that was killed could not say why, but its last lines may help.
            later = speaker.failure is not None and speaker.failed_at > rank.exited - SETTLE
            verdict = speaker.last_words() if later else []
            own = [] if verdict and rank.signal else words
            lines = []
            for one, said in ((speaker, verdict), (rank, own)):
                if said:
                    lines += [f"dtk: the last output of {one.process.name}:", *said]
            lines.append(text)
        else:
            text += " Its last output:" if words else " It wrote nothing."
            lines = [text, *words]
            if count > 1 and (advice := advice_on_files(words, rank.process.rank)):
                lines.append(advice)
        if rank.signal == signal.SIGKILL and not rank.stuck:
            # Above, as the last words are to stand last; what to do about it stands below them.
            lines.insert(len(lines) if rank.was_short_of_memory else 0, _of_the_kill(rank))
            lines += [] if restarts or self.served else [_NEXT]
        return "\n".join(["", *lines, ""])


def _of_the_kill(rank: Task) -> str:
    """Return what SIGKILL mostly means, beside the memory that a rank was last seen to hold."""
    text, seen = _LESS if rank.was_short_of_memory else _KILLED, rank.status.seen
    if seen is not None and seen[0].memory:
        held, allowed = seen[0].memory / 1e9, seen[0].allowed / 1e9
        name = rank.process.name
        text += f" When last seen, {name} held {held:.1f} of the {allowed:.1f} GB of its host."
    return text


def leaver_report(left: Task) -> str:
    """Return the line about a rank that left its script while others needed it."""
    last = left.status.last
    where = f" after {last.what}" if last else ""
    return (
        f"dtk: {left.process.name}, host {left.process.host}, left its script{where}, with exit "
        f"code 0, and the others failed because of it: {stall.ADVICE}\n"
    )
