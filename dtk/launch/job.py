"""Seeing a job to its end.

    start ──> ranks run ──┬── the training has ended with 0 ──> the rest is ended ──> code 0
                 ^   │    ├── one fails ──> settle ──> the others are ended ──> its words and code
                 └───┘    └── stop() ─────────────────> all are ended
          a lost worker that
          servers can spare

`outcome` says what counts as which, `watch` waits for it. "Ended" is SIGTERM, then, `grace` seconds
later, SIGKILL for whatever still carries the job's mark: a rank may be stuck inside TensorFlow,
where it cannot act on SIGTERM. Of a job that is stopped, ranks that would save a checkpoint are
asked first, while all that they need still runs. A thread watches, so a failure is acted upon even
while the caller does not wait; it alone starts and ends processes once the job runs. If this
process itself is killed, a guard process does the ending.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
import traceback
import uuid
from typing import TextIO

from dtk.cluster import progress
from dtk.errors import ClusterError
from dtk.launch import job_processes, ssh
from dtk.launch.events import EventLog
from dtk.launch.outcome import JobOutcome
from dtk.launch.output import JobOutput
from dtk.launch.plan import JobSpec, Process
from dtk.launch.starter import Starter
from dtk.launch.task import JobState, Task
from dtk.launch.watch import Watch

_TOLD = 60  # lines of a failure's report that its event has
_FAILED = 70  # exit code where the launcher itself fails, as of sysexits(3)


class Job:
    """The processes of a job, started and supervised once.

    Args:
        spec: What to start, with `processes`.
        events: What takes the events of the job; none are kept where it is None.
        append: Whether files in `output_dir` are continued, as of a job that is started again.
        stdout: Where the ranks' standard output goes; `sys.stdout` when None.
        stderr: Where the ranks' standard error goes; `sys.stderr` when None.

    Attributes:
        spec: What is started, with the variables that ranks get.
        job_id: The mark (DTK_JOB) every process of the job carries.

    >>> import sys
    >>> from dtk.launch.plan import JobSpec, assign
    >>> processes = tuple(assign([sys.executable, "-c", "print('hello')"], workers=1))
    >>> with Job(JobSpec(processes=processes)) as job:
    ...     job.wait(timeout=60)
    [0] hello
    0
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        events: EventLog | None = None,
        append: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        if not spec.processes:
            raise ClusterError("a job needs at least one process; `JobRun` plans them")
        timeout = {progress.VARIABLE: f"{spec.stall_timeout:g}"}  # ranks that are watched report
        processes = tuple(process.with_env(timeout) for process in spec.processes)
        self.spec = spec = dataclasses.replace(spec, processes=processes)
        # A job started by a rank of another job ends with it.
        self.job_id = "/".join(filter(None, (os.environ.get("DTK_JOB"), uuid.uuid4().hex)))
        self._state = JobState(spec, self.job_id, events or EventLog())
        self._outcome = JobOutcome(processes, self._state.tasks)
        self._output = JobOutput(self._state, self._outcome, append, stdout, stderr)
        self._starter = Starter(self._state, self._output)
        self._watch = Watch(self._state, self._outcome, self._output, self._starter)
        self._done = threading.Event()
        self._started_by: int | None = None  # a thread
        self._left_start = threading.Event()
        self._complete = False  # whether every process was started
        self._culprit: Task | None = None
        self._code = 0

    def start(self) -> Job:
        """Start every process; may be called from any thread.

        Returns:
            The job itself.

        Raises:
            ClusterError: A process cannot be started, a port is taken, or `output_dir` is unusable.
            CommunicatorError: Horovod or MPI is asked for and not installed, or does not start.
        """
        if self._started_by is not None:
            raise ClusterError("this job was started before; make a new Job")
        # First: signals interrupt the thread that calls this, even while it ends what it started.
        # They never interrupt the new one.
        threading.Thread(target=self._supervise, name="dtk job", daemon=True).start()
        try:
            self._started_by = threading.get_ident()
            self._output.open()
            self._starter.prepare()
            for process in self.spec.processes:
                self._starter.start(process)
            if any(rank.remote for rank in self._state.tasks):
                threading.Thread(target=self._beat, name="dtk heartbeats", daemon=True).start()
            self._complete = True
            self._left_start.set()
        except BaseException:
            self.stop(hurry=True)
            raise
        return self

    def wait(self, timeout: float | None = None) -> int:
        """Wait until every process has ended.

        Args:
            timeout: Seconds; None waits for ever.

        Returns:
            0, or the exit code of the first process that failed: 128 + signal if a signal ended
            it, 143 after `stop()`. If the chief fails because it has lost a parameter server, the
            chief's code.

        Raises:
            TimeoutError: Processes still run (and go on running).
        """
        if self._started_by is None:
            raise ClusterError("this job was not started; call start() first")
        if not self._done.wait(timeout):
            names = ", ".join(rank.process.name for rank in self._state.tasks if rank.code is None)
            raise TimeoutError(f"after {timeout} s still running: {names}; wait longer or stop()")
        return self._code

    def stop(self, hurry: bool = False) -> None:
        """End every process and wait for it; an interrupt meanwhile cuts the grace short.

        Args:
            hurry: Give no grace at all. Once all have ended there is nothing left to do.
        """
        self._state.hurry |= hurry
        interrupt: BaseException | None = None
        while True:
            try:
                self._state.stop()
                if self._started_by == threading.get_ident():
                    self._left_start.set()
                # Python overlooks a signal that comes just before a wait, until the wait is over.
                while self._started_by is not None and not self._done.wait(0.25):
                    pass
                break
            except BaseException as error:
                # Going on to wait: leaving now would leave processes behind.
                interrupt = interrupt or error
                self._state.hurry = True
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> Job:
        return self.start() if self._started_by is None else self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def returncodes(self) -> dict[str, int | None]:
        """Exit code of every process by name; None while it runs."""
        return {rank.process.name: rank.code for rank in self._state.tasks}

    @property
    def failure(self) -> tuple[Process, int, str] | None:
        """The first process that failed, its exit code and last output; None without a failure."""
        if self._culprit is None or self._culprit.code is None:
            return None
        words = "\n".join(self._culprit.last_words())
        return self._culprit.process, self._culprit.code, words

    @property
    def stopped(self) -> bool:
        """Whether it was asked to end, or nobody read its output any more."""
        return self._state.stopping

    @property
    def failed_before_working_together(self) -> bool:
        """Whether a process failed by itself before the ranks did anything together.

        Known only where they report, so with a `stall_timeout`.
        """
        culprit = self._culprit
        return (
            culprit is not None
            and culprit.failed_by_itself
            and self._state.spec.stall_timeout > 0
            and not any(rank.status.worked for rank in self._state.tasks)
        )

    @property
    def states(self) -> dict[int | str, tuple[str, str]]:
        """Host of every process, and where it is in its script, or how it ended."""
        return {
            rank.process.rank_name: (
                rank.process.host,
                rank.status.where if rank.code is None else f"ended {rank.how}",
            )
            for rank in list(self._state.tasks)
        }

    @property
    def pids(self) -> dict[str, int]:
        """Process id by name (the remote shell's for a process on another host)."""
        return {rank.process.name: rank.popen.pid for rank in self._state.tasks}

    def _beat(self) -> None:
        """Tell other hosts that this process is alive, as long as ranks there are to run."""
        while not self._done.wait(ssh.HEARTBEAT):
            self._starter.beat()

    def _supervise(self) -> None:
        self._left_start.wait()
        try:
            if self._complete:
                self._see_to_the_end()
            else:
                self._end_all()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            with contextlib.suppress(Exception):  # the worst is over
                text = f"the launcher itself has failed, and ends the job:\n{trace}"
                self._output.say(text.rstrip())
            with contextlib.suppress(Exception):
                self._state.stopping = True
                self._end_all()
            self._code = (self._culprit and self._culprit.code) or _FAILED
        finally:
            self._done.set()

    def _see_to_the_end(self) -> None:
        state, outcome = self._state, self._outcome
        culprit = self._watch.culprit()
        # Decided now: ending the others gives them exit codes too.
        code = outcome.exit_code(culprit)
        self._culprit = None if culprit is None or culprit.code is None else culprit
        report, why = self._watch.report(culprit)
        if self._watch.gone:
            code = self._watch.gone.code
        if culprit is None:
            self._watch.let_save()
        # What served the chief gets time to notice that it has ended.
        state.wait_for(
            lambda: state.stopping or all(rank.code is not None for rank in outcome.serving),
            state.spec.grace,
        )
        self._end_all()
        self._code = 128 + signal.SIGPIPE if state.broken_pipe and not culprit else code
        if culprit is not None and not report:
            may_restart = state.spec.max_restarts > 0
            report = outcome.failure_report(culprit, self._output.suppressed, may_restart) + why
        if culprit is not None or self._watch.gone:
            self._record_failure(culprit, report)
        if report:
            self._output.write_error(report)
        if state.error is not None:
            raise state.error

    def _record_failure(self, culprit: Task | None, report: str) -> None:
        facts: dict[str, object] = {"text": "\n".join(report.strip().splitlines()[-_TOLD:])}
        moment, who = time.monotonic(), None
        if culprit is not None and not self._watch.gone:
            moment, who = culprit.failed_at or moment, culprit.process.rank_name
            if (failure := culprit.failure) is not None:
                facts |= {"error": failure.error, "message": failure.message}
                facts |= {"file": failure.file, "line": failure.line}
        self._state.events.record_at(moment, "failure", who, facts)

    def _end_all(self) -> None:
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
        job_processes.end(self.job_id, state.spec.grace, lambda: state.hurry, own)
        # Other hosts have the same grace, and some time to answer.
        deadline = time.monotonic() + (0.5 if state.hurry else state.spec.grace + 2.0)
        for rank in ranks:
            rank.await_agent(deadline - time.monotonic())
            rank.popen.wait()
        for rank in ranks:
            rank.read_out(2.0)
        self._output.close()
        for rank in ranks:
            if rank.file is not None:
                rank.file.close()
        self._starter.close()
