"""A job: its start, waiting for its end, and stopping it.

A thread supervises it, so a failure is acted upon even while the caller does not wait; that thread
alone starts and ends processes once the job runs. If this process itself is killed, a guard process
does the ending; if both are, nobody does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import uuid
from typing import TextIO

from dtk.errors import ClusterError
from dtk.launch import ssh
from dtk.launch.events import EventLog
from dtk.launch.outcome import JobOutcome
from dtk.launch.output import JobOutput
from dtk.launch.plan import JobSpec, Process
from dtk.launch.starter import Starter
from dtk.launch.supervisor import Supervisor
from dtk.launch.task import JobState

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
        spec: What is started.
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
        self.spec = spec
        # A job started by a rank of another job ends with it.
        self.job_id = "/".join(filter(None, (os.environ.get("DTK_JOB"), uuid.uuid4().hex)))
        self._state = JobState(spec, self.job_id, events or EventLog())
        outcome = JobOutcome(spec.processes, self._state.tasks)
        self._output = JobOutput(self._state, outcome, append, stdout, stderr)
        self._starter = Starter(self._state, self._output)
        self._supervisor = Supervisor(self._state, outcome, self._output, self._starter)
        self._done = threading.Event()
        self._started_by: int | None = None  # a thread
        self._left_start = threading.Event()
        self._complete = False  # whether every process was started
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
    def failure(self) -> tuple[Process, int, str] | None:
        """The first process that failed, its exit code and last output; None without a failure."""
        culprit = self._supervisor.culprit
        if culprit is None or culprit.code is None:
            return None
        return culprit.process, culprit.code, "\n".join(culprit.last_words())

    @property
    def stopped(self) -> bool:
        """Whether it was asked to end, or nobody read its output any more."""
        return self._state.stopping

    @property
    def worked_together(self) -> bool:
        """Whether the ranks did anything together.

        Known only where they report, so with a `stall_timeout`; else it is said that they did.
        """
        reports = self._state.spec.stall_timeout > 0
        return not reports or any(rank.status.worked for rank in self._state.tasks)

    @property
    def failed_before_working_together(self) -> bool:
        """Whether a process failed by itself before the ranks did anything together."""
        culprit = self._supervisor.culprit
        return culprit is not None and culprit.failed_by_itself and not self.worked_together

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

    def _beat(self) -> None:
        """Tell other hosts that this process is alive, as long as ranks there are to run."""
        while not self._done.wait(ssh.HEARTBEAT):
            self._starter.beat()

    def _supervise(self) -> None:
        self._left_start.wait()
        try:
            if self._complete:
                self._code = self._supervisor.see_to_the_end()
            else:
                self._supervisor.end_all()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            with contextlib.suppress(Exception):  # the worst is over
                text = f"the launcher itself has failed, and ends the job:\n{trace}"
                self._output.say(text.rstrip())
            with contextlib.suppress(Exception):
                self._state.stopping = True
                self._supervisor.end_all()
            culprit = self._supervisor.culprit
            self._code = (culprit and culprit.code) or _FAILED
        finally:
            self._done.set()
