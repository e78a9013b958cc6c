"""One start of a job, seen to its end: what ends it, who failed first, and what can be replaced.

  ┌──────────────────────────────────────────────────────────────────────┐
  v                                                                      │
wait ──┬── a worker is lost, or stuck, that servers can spare ──> replace it
       ├── a rank fails ──> settle: the first may end last ─────> whose record is the earliest
       ├── nothing moves for the timeout ───────────────────────> who is missing; code 124
       ├── MPI's server is gone ──> 5 s for failures ───────────> whose failure, or the server
       └── all have ended well, or stop() ──────────────────────> nobody

Then all that still runs is ended, and the first failure's words come last. "Ended" is SIGTERM,
then, `grace` seconds later, SIGKILL for whatever still carries the job's mark: a rank may be stuck
inside TensorFlow, where it cannot act on SIGTERM. Of a job that is stopped, ranks that would save a
checkpoint are asked first, while all that they need still runs. `outcome` says what counts as what.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from dtk.cluster import progress, stall
from dtk.cluster.stall import RankStatus, Stall
from dtk.errors import ClusterError
from dtk.launch import job_processes
from dtk.launch.mpi_servers import Loss
from dtk.launch.outcome import SETTLE, TIE, JobOutcome, leaver_report
from dtk.launch.output import JobOutput
from dtk.launch.starter import Starter
from dtk.launch.task import JobState, Task

_TOLD = 60  # lines of a failure's report that its event has
_START = 60.0  # seconds that ranks may wait for an MPI whose server somebody holds up
LATE = 5.0  # seconds for a rank to end, where all failures so far are of its loss
_STACK = 3.0  # seconds that a rank gets to say where it is
# Seconds the chief gets to say what the loss of a parameter server means. On one machine TensorFlow
# 2.21 raises within seconds; over a network the loss takes longer to show.
_FAREWELL = 30.0


class _End(NamedTuple):
    """What ends a job: a failure, a stall or the loss of MPI's server; nothing, if it is over."""

    culprit: Task | None = None
    stall: Stall | None = None
    lost: Loss | None = None


class Supervisor:
    """Sees a job's processes to their end.

    Attributes:
        culprit: The process that failed first, once that is known.
    """

    def __init__(
        self, state: JobState, outcome: JobOutcome, output: JobOutput, starter: Starter
    ) -> None:
        self.culprit: Task | None = None
        self._stall: Stall | None = None
        self._state, self._outcome, self._output, self._starter = state, outcome, output, starter
        self._looked = 0.0
        self._told_alone = False
        self._notice = ""

    def see_to_the_end(self) -> int:
        """Wait for what ends the job, end the rest, and say why; return the job's exit code."""
        state, outcome = self._state, self._outcome
        end = self._await_end()
        culprit = end.culprit
        # Decided now: ending the others gives them exit codes too.
        code = end.lost.code if end.lost else outcome.exit_code(culprit)
        self.culprit = None if culprit is None or culprit.code is None else culprit
        report, why = self._report(end)
        if culprit is None and not end.lost:
            self._let_save()
        # What served the chief gets time to notice that it has ended.
        state.wait_for(
            lambda: state.stopping or all(rank.code is not None for rank in outcome.serving),
            state.spec.grace,
        )
        self.end_all()
        if culprit is not None and not report:
            may_restart = state.spec.max_restarts > 0
            report = outcome.failure_report(culprit, self._output.suppressed, may_restart) + why
        if report:
            self._record_failure(end, report)
            self._output.write_error(report)
        if state.error is not None:
            raise state.error
        return 128 + signal.SIGPIPE if state.broken_pipe and not report else code

    def _await_end(self) -> _End:
        """Wait for what ends the job."""
        state, outcome, mpi = self._state, self._outcome, self._starter.mpi
        while True:
            self._wait()
            if self._stall is not None:
                concerned = [state.tasks[i] for i in self._stall.missing + self._stall.waiting]
                # The missing one may have left with 0.
                running = (rank for rank in concerned if rank.code is None)
                return _End(next(running, concerned[0]), stall=self._stall)
            if mpi.lost():
                # Ranks get time to fail: a loss may be the cause of failures, or follow from one.
                state.wait_for(lambda: state.stopping or outcome.over, LATE)
                if not (outcome.over or state.stopping):
                    return _End(lost=mpi.lost())
            if state.stopping or not outcome.failures():
                return _End()
            self._settle()
            if (culprit := outcome.culprit()) is not None:
                return self._end_of_failure(culprit)

    def _end_of_failure(self, culprit: Task) -> _End:
        """Return what a failure shows: that process, or what it has lost."""
        state, ranks = self._state, self._state.tasks
        lost = None
        if culprit.is_victim and not state.stopping:
            lost = self._starter.mpi.lost()
            if state.spec.stall_timeout and not (lost or self._outcome.served):
                # Others may have lost a rank that still runs, and is only cut off.
                now = time.monotonic()
                cut_off = stall.find_cut_off(self._tasks(), now, state.spec.stall_timeout)
                if cut_off is not None:
                    return _End(ranks[cut_off.missing[0]], stall=cut_off)
        if culprit.process.role == "ps":
            self._hear_chief(culprit)
        return _End(None if state.stopping else culprit, lost=lost)

    def _record_failure(self, end: _End, report: str) -> None:
        facts: dict[str, object] = {"text": "\n".join(report.strip().splitlines()[-_TOLD:])}
        moment, who, culprit = time.monotonic(), None, end.culprit
        if culprit is not None and not end.lost:
            moment, who = culprit.failed_at or moment, culprit.process.rank_name
            if (failure := culprit.failure) is not None:
                facts |= {"error": failure.error, "message": failure.message}
                facts |= {"file": failure.file, "line": failure.line}
        self._state.events.record_at(moment, "failure", who, facts)

    def end_all(self) -> None:
        """End everything, wait for it, and let go of what the job held."""
        state, ranks = self._state, self._state.tasks
        if self._outcome.served:
            # The chief and an evaluator end while what serves them is there. Else the chief could
            # not save any more, and would say that a server is gone.
            for rank in self._outcome.essential:
                if not rank.remote and rank.code is None:
                    mark, pids = state.mark(rank.process), [rank.popen.pid]
                    job_processes.end(mark, state.spec.grace, lambda: state.hurry, pids)
        for rank in ranks:
            rank.hang_up()
        own = [rank.popen.pid for rank in ranks]
        job_processes.end(state.job_id, state.spec.grace, lambda: state.hurry, own)
        # Other hosts have the same grace, and some time to answer.
        deadline = time.monotonic() + (0.5 if state.hurry else state.spec.grace + 2.0)
        for rank in ranks:
            rank.await_agent(deadline - time.monotonic())
            rank.popen.wait()
        for rank in ranks:
            rank.read_out(2.0)
        try:
            self._output.close()
        finally:
            for rank in ranks:
                if rank.file is not None:
                    rank.file.close()
            self._starter.close()

    def _report(self, end: _End) -> tuple[str, str]:
        """Return why the job is ended where that is nobody's failure, and what caused a failure.

        Missing ranks of a stall say where they are first, if they have not; that ends them. Ask
        before others are asked to end: they may yet move.
        """
        ranks, culprit = self._state.tasks, end.culprit
        statuses = [rank.status for rank in ranks]
        # Whose data has ended before that of others, where a rank has failed of it.
        short = stall.find_short(statuses)
        if shown := end.stall or short:
            missing = [ranks[i] for i in shown.missing]
            self._ask_for_stacks([rank for rank in missing if not rank.status.has_stack])
        if end.lost:
            return f"\ndtk: {end.lost.how}; every rank needs it. The job was ended.\n", ""
        if end.stall:
            words = stall.describe(end.stall, statuses)
            self._state.events.record("stall", text=words.strip())
            return words, ""
        if short:
            return "", stall.describe_cause(short, statuses)
        # The rank that left first, where others have failed as it was gone.
        left = [rank for rank in self._outcome.essential if rank.code == 0]
        if left and culprit is not None and culprit.is_victim and not self._outcome.served:
            return "", leaver_report(min(left, key=lambda rank: rank.exited))
        return "", ""

    def _ask_for_stacks(self, ranks: Sequence[Task]) -> None:
        """Have ranks say where they are in the script; it ends them."""
        asked = [rank for rank in ranks if rank.code is None]
        for rank in asked:
            rank.dump = []
            rank.end_with_stack()
        self._state.wait_for(
            lambda: self._state.hurry or all(rank.code is not None for rank in asked), _STACK
        )
        for rank in asked:
            rank.read_out(_STACK)
            rank.status.stack = progress.stack_of_main_thread(rank.dump or [])

    def _let_save(self) -> None:
        """Ask the ranks that would save a checkpoint to end, and wait until they have.

        A rank that fails, or an interrupt, cuts it short.
        """
        state, grace = self._state, self._state.spec.save_grace
        saving = [rank for rank in state.tasks if rank.would_save]
        if not (saving and grace):
            return
        names = ", ".join(rank.process.name for rank in saving)
        self._output.say(
            f"waiting up to {grace:g} s for a checkpoint of {names}; once more ends them now"
        )
        for rank in saving:
            rank.ask_to_save()
        sigterm = 128 + signal.SIGTERM
        # Ranks that are out of patience say so themselves: hence the margin.
        is_writing, until = False, time.monotonic() + SETTLE + grace
        with state.changed:
            while any(rank.is_saving for rank in saving) and not state.hurry:
                if not is_writing and any(rank.saving == "begun" for rank in saving):
                    is_writing, until = True, time.monotonic() + grace
                if time.monotonic() > until:
                    break
                failed = any(one.failed and one.code != sigterm for one in state.tasks)
                if failed and not is_writing:
                    return
                state.changed.wait(0.1)
            else:
                return
        # Not with the lock: who writes may find that nobody reads any more, and then needs it.
        what = f"no step ended within {grace:g} s, so nothing was saved"
        if is_writing:
            what = f"the checkpoint was not written within {grace:g} s; the one before it is the "
            what += "newest"
        self._output.say(f"{what}: give --save-grace more seconds")

    # --- until something ends the job ---

    def _wait(self) -> None:
        """Wait for the end, and meanwhile replace what can be."""
        state, outcome = self._state, self._outcome
        # Nothing notifies of a job that does not move.
        period = min(1.0, state.spec.stall_timeout / 10) or 1.0
        while True:
            stuck: dict[int, str] = {}
            with state.changed:
                while not (
                    self._is_over() or self._notice or outcome.lost() or (stuck := self._stuck())
                ):
                    state.changed.wait(period)
                # Where many die at once, the chief may be among them: hence the moment.
                if state.changed.wait_for(self._is_over, TIE):
                    return
                lost = outcome.lost()
            # Release the lock: noting ends needs it, and a slow terminal must not hold it.
            if self._notice:
                self._output.say(self._notice)
                self._notice = ""
            for index, why in stuck.items():
                state.tasks[index].stuck = why
                self._end_stuck(state.tasks[index])
            for rank in lost:
                self._replace(rank)
            if lost and (heard := outcome.chief.status.heard) is not None:
                # The chief may be silent while TensorFlow looks for the successor.
                outcome.chief.status.delay(time.monotonic() - heard)

    def _is_over(self) -> bool:
        over = self._state.stopping or self._outcome.over or self._is_stuck()
        return bool(over or self._starter.mpi.lost())

    def _is_stuck(self) -> bool:
        """Look whether a job has stopped moving, and why; none of its processes has failed."""
        if not (timeout := self._state.spec.stall_timeout):
            return False
        now = time.monotonic()
        self._allow_for_sleep(now)
        for rank in self._state.tasks:
            rank.status.left = rank.code == 0
            if rank.code is None:
                rank.observe()
        if self._outcome.served:
            self._stall = stall.find_served(self._tasks(), now, timeout)
        else:
            statuses = [rank.status for rank in self._state.tasks]
            self._note_alone(statuses, now)
            held_up = self._not_started(statuses, now)
            self._stall = held_up or stall.find(statuses, now, timeout)
        return self._stall is not None

    def _allow_for_sleep(self, now: float) -> None:
        """Count no time in which this process itself was stopped, or could not write."""
        slept = now - self._looked
        if not self._output.waits:  # as of a terminal after Ctrl-S, or a pager
            slept -= self._state.spec.stall_timeout / 4
        if self._looked and slept > 0:
            for rank in self._state.tasks:
                rank.status.delay(slept)
        self._looked = now

    def _note_alone(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Note once in which bound a rank must rejoin the others, while it computes alone."""
        timeout = self._state.spec.stall_timeout
        # Half as long again: a rank that does nothing is named for that by then, also where it was
        # seen reading at first, as of memory that the system had taken.
        since = now - timeout / 2
        alone = stall.find_alone(statuses, since, timeout)
        if alone and any(statuses[i].is_idle(since) for i in alone.missing):
            return
        if alone and not self._told_alone:
            self._notice = (
                f"{stall.describe_missing(alone, statuses)[0]} The others wait, and the job is "
                f"ended after {timeout * stall.ALONE:g} s of that; a larger --stall-timeout gives "
                "it more"
            )
        self._told_alone = alone is not None

    def _not_started(self, statuses: Sequence[RankStatus], now: float) -> Stall | None:
        """Return who else keeps ranks from starting that have all waited for that for a while."""
        since = now - min(_START, self._state.spec.stall_timeout)
        if all(one.last and one.last.joining and one.moved < since for one in statuses):
            why = self._starter.mpi.held_up()
            return Stall((), why, tuple(range(len(statuses)))) if why else None
        return None

    def _tasks(self) -> list[RankStatus]:
        """Return what tasks have said, of those that the job still needs."""
        idle = [id(rank) for rank in self._outcome.serving]
        return [
            rank.status if rank.code is None and id(rank) not in idle else rank.new_status()
            for rank in self._state.tasks
        ]

    # --- replacing workers and the evaluator ---

    def _stuck(self) -> dict[int, str]:
        """Return the tasks that hold others up and can be replaced, and why."""
        timeout = self._state.spec.stall_timeout
        if not timeout or not self._outcome.served:
            return {}
        stuck = stall.find_replaceable(self._tasks(), time.monotonic(), timeout)
        return {index: why for index, why in stuck.items() if not self._state.tasks[index].stuck}

    def _end_stuck(self, rank: Task) -> None:
        """End one process that is stuck, and show its stack."""
        if not (rank.status.waits or rank.status.has_stack):
            self._ask_for_stacks([rank])
        if stack := rank.status.calls:
            name = rank.process.name
            self._output.say(f"the stack of {name}, the innermost call first:\n{stack}")
        self._end(rank)
        rank.await_agent(self._state.spec.grace + 2.0)

    def _end(self, rank: Task) -> None:
        """End one process at once, and its children."""
        sessions = [] if rank.remote else [rank.popen.pid]
        job_processes.end(self._state.mark(rank.process), 0.0, sessions=sessions)
        rank.hang_up()

    def _replace(self, rank: Task) -> None:
        """Start a lost task again, or say that the job goes on without it."""
        # Its children may hold its port, or memory that its successor needs.
        self._end(rank)
        rank.read_out(2.0)
        say, lost, most = self._output.say, rank.how_lost, self._state.spec.max_restarts
        self._state.events.record("failure", rank.process.rank_name, text=lost)
        # One that failed by itself would do so again.
        if rank.signal and rank.restarts < most:
            rank.restarts += 1
            say(f"{lost}; starting it again ({rank.restarts} of {most})")
            self._state.events.record("restart", rank.process.rank_name, number=rank.restarts)
            try:
                self._starter.start_again(rank)
                return
            except ClusterError as error:
                lost = str(error)
        elif rank.signal and most:
            lost += f" ({rank.restarts} of {most} restarts used)"
        rank.given_up = True
        workers = sum(one.process.role == "worker" for one in self._state.tasks)
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
        state, began = self._state, time.monotonic()
        state.wait_for(lambda: state.stopping, TIE)
        with state.changed:
            while not state.stopping:
                if any(rank.in_trouble for rank in state.tasks):
                    until = began + SETTLE
                elif all(one.is_victim for one in self._outcome.failures()) and not (
                    self._starter.mpi.lost()
                ):
                    until = began + LATE
                else:
                    return
                if (left := until - time.monotonic()) <= 0:
                    return
                state.changed.wait(left)

    def _hear_chief(self, lost: Task) -> None:
        """Give the chief time to notice that a parameter server is gone, and to say so."""
        chief = self._outcome.speaker(lost)
        if chief.code is None:
            self._output.say(
                f"{lost.process.name} ended {lost.how}; the chief has {_FAREWELL:g} s to end by "
                "itself"
            )
            self._state.wait_for(lambda: self._state.stopping or chief.code is not None, _FAREWELL)
