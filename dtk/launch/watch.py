"""Waiting for what ends a job, telling which process failed first, replacing what can be."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence

from dtk.cluster import progress, stall
from dtk.cluster.rank_status import RankStatus
from dtk.cluster.stall import Stall
from dtk.errors import ClusterError
from dtk.launch import job_processes
from dtk.launch.mpi_places import Loss
from dtk.launch.outcome import SETTLE, TIE, JobOutcome
from dtk.launch.output import JobOutput
from dtk.launch.rank import JobState, Rank, killer
from dtk.launch.starter import Starter

_START = 60.0  # seconds that ranks may wait for an MPI whose server somebody holds up
LATE = 5.0  # seconds for a rank to end, where all failures so far are of its loss
_STACK = 3.0  # seconds that a rank gets to say where it is
# Seconds the chief gets to say what the loss of a parameter server means. On one machine TensorFlow
# 2.21 raises within seconds; over a network the loss takes longer to show.
_FAREWELL = 30.0


class Watch:
    """Watches a job's processes until it is over."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        outcome: JobOutcome,
        state: JobState,
        output: JobOutput,
        starter: Starter,
        grace: float,
        max_restarts: int,
        stall_timeout: float,
    ) -> None:
        self.stall: Stall | None = None
        self.gone: Loss | None = None
        self._ranks, self._outcome, self._state = ranks, outcome, state
        self._output, self._starter = output, starter
        self._grace, self._max_restarts, self._stall_timeout = grace, max_restarts, stall_timeout
        self._looked = 0.0
        self._told_alone = False
        self._notice = ""

    def culprit(self) -> Rank | None:
        """Wait for what ends the job, and return the process whose failure it is, if anyone's."""
        culprit = None
        while culprit is None:
            self._wait()
            if self.stall is not None:
                concerned = [self._ranks[i] for i in self.stall.missing + self.stall.waiting]
                # The missing one may have left with 0.
                return next((rank for rank in concerned if rank.code is None), concerned[0])
            if self._starter.lost():
                # Ranks get time to fail: a loss may be the cause of failures, or follow from one.
                self._state.wait_for(lambda: self._state.stopping or self._outcome.over, LATE)
                if not self._outcome.over:
                    self.gone = self._starter.lost()
            if self._state.stopping or not (self._outcome.failures() or self.gone):
                return None
            if self.gone:
                return self._ranks[0]
            self._settle()
            culprit = self._outcome.culprit()
            if culprit is not None and culprit.is_victim and not self._state.stopping:
                self.gone = self._starter.lost()
                if not (self.gone or self._outcome.can_replace) and (
                    timeout := self._stall_timeout
                ):
                    # Others may have lost a rank that still runs, and is only cut off.
                    self.stall = stall.find_cut_off(self._tasks(), time.monotonic(), timeout)
                if self.stall is not None:
                    return self._ranks[self.stall.missing[0]]
        if culprit.process.role == "ps":
            self._hear_chief(culprit)
        return None if self._state.stopping else culprit

    @property
    def short(self) -> Stall | None:
        """Whose data has ended before that of others, where a rank has failed of it."""
        return stall.find_short([rank.status for rank in self._ranks])

    @property
    def left(self) -> Rank | None:
        """The rank that left first, with exit code 0, where others have failed as it was gone."""
        left = [rank for rank in self._outcome.essential if rank.code == 0]
        if self.stall or self.gone or self._outcome.can_replace:
            return None
        return min(left, key=lambda rank: rank.exited, default=None)

    def ask_missing(self) -> None:
        """Have the missing ranks of a stall say where they are, if they have not; it ends them."""
        found = self.stall or self.short
        missing = [] if found is None else [self._ranks[i] for i in found.missing]
        self._ask_for_stacks([rank for rank in missing if not rank.status.has_stack])

    def _ask_for_stacks(self, ranks: Sequence[Rank]) -> None:
        """Have ranks say where they are in the script; it ends them."""
        asked = [rank for rank in ranks if rank.code is None]
        for rank in asked:
            rank.ask_for_stack()
        self._state.wait_for(
            lambda: self._state.hurry or all(rank.code is not None for rank in asked), _STACK
        )
        for rank in asked:
            for reader in rank.readers:
                reader.join(_STACK)
            rank.status.stack = progress.stack_of_main_thread(rank.dump or [])

    def let_save(self, grace: float) -> None:
        """Ask the ranks that would save a checkpoint to end, and wait until they have.

        A rank that fails, or an interrupt, cuts it short.
        """
        saving = [rank for rank in self._ranks if rank.would_save]
        if not (saving and grace):
            return
        names = ", ".join(rank.process.name for rank in saving)
        self._output.say(
            f"waiting up to {grace:g} s for a checkpoint of {names}; once more ends them now"
        )
        for rank in saving:
            rank.ask_to_end()
        began, writing = time.monotonic(), None
        with self._state.changed:
            while any(rank.code is None for rank in saving) and not self._state.hurry:
                now = time.monotonic()
                if writing is None and any(rank.saving == "begun" for rank in saving):
                    writing = now
                # Ranks that are out of patience say so themselves: hence the margin.
                if now > (began + SETTLE if writing is None else writing) + grace:
                    what = f"no step ended within {grace:g} s, so nothing was saved"
                    if writing is not None:
                        what = f"the checkpoint was not written within {grace:g} s"
                        what += "; the one before it is the newest"
                    self._output.say(f"{what}: give --save-grace more seconds")
                    return
                if writing is None and any(
                    rank.failed and rank.code != 128 + signal.SIGTERM for rank in self._ranks
                ):
                    return
                self._state.changed.wait(0.1)

    # --- until something ends the job ---

    def _wait(self) -> None:
        """Wait for the end, and meanwhile replace what can be."""
        changed = self._state.changed
        while True:
            stuck: dict[int, str] = {}
            with changed:
                # Nothing notifies of a job that does not move.
                period = min(1.0, self._stall_timeout / 10) or 1.0
                while not (
                    self._is_over()
                    or self._notice
                    or self._outcome.lost()
                    or (stuck := self._stuck())
                ):
                    changed.wait(period)
                # Where many die at once, the chief may be among them: hence the moment.
                if changed.wait_for(self._is_over, TIE):
                    return
                lost = self._outcome.lost()
            # Outside of the lock, which noting their ends needs, and which no slow reader may keep.
            if self._notice:
                self._output.say(self._notice)
                self._notice = ""
            for index, why in stuck.items():
                self._ranks[index].stuck = why
                self._end_stuck(self._ranks[index])
            for rank in lost:
                self._replace(rank)
            if lost:
                # The chief may be silent while TensorFlow looks for the successor.
                for rank in self._ranks:
                    if rank.process.role == "chief" and rank.status.heard is not None:
                        rank.status.delay(time.monotonic() - rank.status.heard)

    def _is_over(self) -> bool:
        over = self._state.stopping or self._outcome.over or self._is_stuck()
        return bool(over or self._starter.lost())

    def _is_stuck(self) -> bool:
        """Look whether a job has stopped moving, and why; none of its processes has failed."""
        if not self._stall_timeout:
            return False
        now = time.monotonic()
        self._allow_for_sleep(now)
        for rank in self._ranks:
            rank.status.left = rank.code == 0
            if rank.code is None:
                rank.observe()
        if self._outcome.can_replace:
            self.stall = stall.find_served(self._tasks(), now, self._stall_timeout)
        else:
            statuses = [rank.status for rank in self._ranks]
            self._note_alone(statuses, now)
            held_up = self._not_started(statuses, now)
            self.stall = held_up or stall.find(statuses, now, self._stall_timeout)
        return self.stall is not None

    def _allow_for_sleep(self, now: float) -> None:
        """Count no time in which this process itself was stopped, or could not write."""
        slept = now - self._looked - self._stall_timeout / 4
        if self._output.waits:  # as of a terminal after Ctrl-S, or a pager
            slept = now - self._looked
        if self._looked and slept > 0:
            for rank in self._ranks:
                rank.status.delay(slept)
        self._looked = now

    def _note_alone(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Note once in which bound a rank must rejoin the others, while it computes alone."""
        timeout = self._stall_timeout
        # Half as long again: a rank that does nothing is named for that by then, also where it was
        # seen reading at first, as of memory that the system had taken.
        found = stall.find_alone(statuses, now - timeout / 2, timeout)
        if found and any(statuses[i].is_idle(now - timeout / 2) for i in found.missing):
            return
        if found and not self._told_alone:
            lines = stall.describe_missing(found, statuses)
            self._notice = (
                f"{lines[0]} The others wait, and the job is ended after "
                f"{timeout * stall.ALONE:g} s of that; a larger --stall-timeout gives it more"
            )
        self._told_alone = found is not None

    def _not_started(self, statuses: Sequence[RankStatus], now: float) -> Stall | None:
        """Return who else keeps ranks from starting that have all waited for that for a while."""
        since = now - min(_START, self._stall_timeout)
        if all(one.last and one.last["joining"] and one.moved < since for one in statuses):
            why = self._starter.held_up()
            return Stall((), why, tuple(range(len(statuses)))) if why else None
        return None

    def _stuck(self) -> dict[int, str]:
        """Return the tasks that hold others up and can be replaced, and why."""
        if not self._stall_timeout or not self._outcome.can_replace:
            return {}
        found = stall.find_replaceable(self._tasks(), time.monotonic(), self._stall_timeout)
        return {index: why for index, why in found.items() if not self._ranks[index].stuck}

    def _tasks(self) -> list[RankStatus]:
        """Return what tasks have said, of those that the job still needs."""
        idle = [id(rank) for rank in self._outcome.serving]
        return [
            rank.status if rank.code is None and id(rank) not in idle else rank.new_status()
            for rank in self._ranks
        ]

    # --- replacing workers and the evaluator ---

    def _end_stuck(self, rank: Rank) -> None:
        """End one process that is stuck, and show its stack."""
        if not (rank.status.waits or rank.status.has_stack):
            self._ask_for_stacks([rank])
        if stack := rank.status.calls:
            name = rank.process.name
            self._output.say(f"the stack of {name}, the innermost call first:\n{stack}")
        sessions = [] if rank.remote else [rank.popen.pid]
        job_processes.end(self._starter.mark(rank.process), 0.0, sessions=sessions)
        if rank.remote:
            rank.hang_up()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.popen.wait(self._grace + 2.0)
            rank.popen.kill()

    def _replace(self, rank: Rank) -> None:
        """Start a lost task again, or say that the job goes on without it."""
        # Its children may hold its port, or memory that its successor needs.
        job_processes.end(self._starter.mark(rank.process), 0.0, sessions=[rank.popen.pid])
        rank.hang_up()
        for reader in rank.readers:
            reader.join(2.0)
        say, lost, most = self._output.say, _how_lost(rank), self._max_restarts
        # One that failed by itself would do so again.
        if rank.signal and rank.restarts < most:
            rank.restarts += 1
            say(f"{lost}; starting it again ({rank.restarts} of {most})")
            try:
                self._starter.start_again(rank)
                return
            except ClusterError as error:
                lost = str(error)
        elif rank.signal and most:
            lost += f" ({rank.restarts} of {most} restarts used)"
        rank.given_up = True
        workers = sum(one.process.role == "worker" for one in self._ranks)
        left = len(self._outcome.workers_left())
        if rank.process.role == "evaluator":
            say(f"{lost}; training goes on without it, and its exit code will be the job's")
        elif left:
            say(f"{lost}; the job goes on with {left} of {workers} workers")
        else:
            say(f"{lost}; no worker is left")

    # --- once a process has failed ---

    def _settle(self) -> None:
        """Wait until it shows who failed first.

        That rank may still be shutting down when its peers have already died of the broken
        connection; it gets the moment it needs to be recognised.
        """
        began = time.monotonic()
        self._state.wait_for(lambda: self._state.stopping, TIE)
        with self._state.changed:
            while not self._state.stopping:
                if any(rank.in_trouble for rank in self._ranks):
                    until = began + SETTLE
                elif all(one.is_victim for one in self._outcome.failures()) and not (
                    self._starter.lost()
                ):
                    until = began + LATE
                else:
                    return
                if (left := until - time.monotonic()) <= 0:
                    return
                self._state.changed.wait(left)

    def _hear_chief(self, lost: Rank) -> None:
        """Give the chief time to notice that a parameter server is gone, and to say so."""
        chief = self._outcome.speaker(lost)
        if chief.code is not None:
            return
        self._output.say(
            f"{lost.process.name} ended {lost.how}; the chief has {_FAREWELL:g} s to end by itself"
        )
        self._state.wait_for(lambda: self._state.stopping or chief.code is not None, _FAREWELL)


def _how_lost(rank: Rank) -> str:
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
