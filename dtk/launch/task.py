"""One process of a job, from its first start to its last end, and what is known about it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from dtk.cluster import failures, report_channel, usage
from dtk.cluster.failures import Failure
from dtk.cluster.messages import record_of
from dtk.cluster.stall import RankReport, RankStatus
from dtk.errors import PEER_LOST
from dtk.launch import agent, ssh
from dtk.launch.agent import Order
from dtk.launch.events import EventLog
from dtk.launch.plan import JobSpec, Process
from dtk.launch.screen import Sink

# Errors raised for lines that another program wrote in our format.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
# Lines shown of a rank that has told of no exception: the last ones, or all of a crash.
_TAIL, _CRASH = 40, 200
_CRASHES = "Fatal Python error: "
_LONGEST = 1 << 14  # characters of a traceback
_RECENT = 10.0  # seconds between the begin of a crash, or an exception, and the exit it explains
# Signals that do not follow from the failure of another rank. Aborts are left out: libraries abort
# when a peer is gone.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_NO_MEMORY = ", probably by the kernel's out-of-memory killer"
_OF_SAVING = ("ready", "waits", "begun", "over")  # see `dtk.cluster.progress`
# Exit code of ssh where it could not connect, or has lost the connection.
SSH_FAILED = 255


@dataclasses.dataclass
class JobState:
    """What the parts of the launcher share of a job, and the condition its threads wait on."""

    spec: JobSpec
    job_id: str = ""
    events: EventLog = dataclasses.field(default_factory=EventLog)
    tasks: list[Task] = dataclasses.field(default_factory=list)
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    stopping: bool = False
    hurry: bool = False
    broken_pipe: bool = False
    error: Exception | None = None

    def stop(self, error: Exception | None = None, broken_pipe: bool = False) -> None:
        """Ask for the end of the job."""
        with self.changed:
            self.error = self.error or error
            self.broken_pipe |= broken_pipe
            self.stopping = True
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until something that threads note is true, or the time is over."""
        with self.changed:
            self.changed.wait_for(condition, seconds)

    def mark(self, process: Process) -> str:
        """Return the mark of one process and its children: they end at different times."""
        return f"{self.job_id}/{process.name.replace(' ', '-')}"


class Task:
    """One place of a plan, and what runs there.

    A lost worker that is started again keeps its place: name, variables, address and file.
    """

    def __init__(
        self,
        process: Process,
        env: Mapping[str, str],
        remote: bool,
        popen: subprocess.Popen[bytes],
        guard: ssh.Guard | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.process, self.env, self.remote, self.guard = process, env, remote, guard
        self._events = events or EventLog()
        self.file: Sink | None = None
        self.open: list[threading.Event] = []  # set once it has ended, and all is read
        self.restarts = 0
        self.given_up = False
        self.started(popen)

    def started(self, popen: subprocess.Popen[bytes]) -> None:
        """Note what runs here from now on, and forget what its predecessor said."""
        self.popen = popen
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.crashed = -math.inf  # when it began to say where it crashes
        self.failure: Failure | None = None  # in this process's time
        self._traceback = ""
        self.code: int | None = None
        self.signal = 0
        self.exited = 0.0
        self.status = self.new_status()
        self.status.started, self.status.moved = True, time.monotonic()
        self.dump: list[str] | None = None
        self.stuck = ""
        self.was_short_of_memory = False
        self._kills = usage.MemoryKills(popen.pid)
        self.saving = "over"
        self._waits = False  # for a request, as no SIGTERM would have it save
        self.reports: socket.socket | None = None
        # Seconds that its clock is behind this process's, and a message was under way: the least.
        self._lag = math.inf if self.remote else 0.0
        self._record("rank start", host=self.process.host, pid=popen.pid)

    def _record(self, kind: str, **facts: object) -> None:
        self._events.record(kind, self.process.rank_name, **facts)

    def new_status(self) -> RankStatus:
        """Return the status of a rank of which nothing is known."""
        return RankStatus(self.process.name, self.process.host, self.process.role)

    # --- what it says, and is told ---

    def hear(self, message: bytes) -> None:
        """Take a message that has come by its `report_channel`."""
        with contextlib.suppress(*_MALFORMED):
            report = json.loads(message)
            if self.remote and "sent" in report:
                self._lag = min(self._lag, time.monotonic() - float(report["sent"]))
            if "event" in report:
                self._events.hear(self.process.rank_name, report["event"], self._lag)
            elif "failure" in report:
                self.failure = failures.read(report["failure"], self._lag)
            elif "traceback" in report:
                if len(self._traceback) < _LONGEST:
                    self._traceback += str(report["traceback"])
            elif "progress" in report:
                self.status.take(record_of(RankReport, report["progress"]), time.monotonic())
            elif "saving" in report:
                self._note_saving(str(report["saving"]))
            elif report["usage"] == usage.NO_MEMORY:
                self.was_short_of_memory = True
            else:
                state, cpu, io, total, *memory = report["usage"]
                held = map(int, memory)
                seen = usage.Usage(str(state), float(cpu), int(io), float(total), *held)
                self.status.observe(seen, time.monotonic())

    def observe(self) -> None:
        """Look at the process from outside if it runs here; agents report those of other hosts."""
        if not self.remote:
            self.status.observe(usage.usage_of(self.popen.pid), time.monotonic())

    def ask_to_save(self) -> None:
        """Ask it to save a checkpoint and end, in the way that it has named; not its children."""
        self._order(Order.ASK if self._waits else Order.END)

    def end_with_stack(self) -> None:
        """End it such that it writes its stack first, also if it is stopped."""
        self._order(Order.STACK)

    def _order(self, order: Order) -> None:
        if self.remote:
            report_channel.write_line(self.popen.stdin, order)
        elif self.reports is not None:
            agent.obey(order, self.popen, self.reports)

    def _note_saving(self, saving: str) -> None:
        """Take what it says of saving, and have its agent, or the guard, know it too."""
        if saving == self.saving or saving not in _OF_SAVING:
            return
        self.saving = saving
        self._waits = saving == "waits" or (self._waits and saving != "ready")
        if self.remote:
            report_channel.write_line(self.popen.stdin, saving)
        elif self.guard is not None:
            self.guard.note_saving(saving, self.popen.pid)

    def hang_up(self) -> None:
        """Have the agent on another host end the process without waiting for a checkpoint."""
        if self.remote:
            report_channel.write_line(self.popen.stdin, "over")
            ssh.hang_up(self.popen)

    def await_agent(self, seconds: float) -> None:
        """Give the agent on another host time to end, then end the connection to it."""
        if self.remote:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(max(0.0, seconds))
            self.popen.kill()

    def read_out(self, seconds: float) -> None:
        """Wait until it has ended, and all is read that it has written."""
        for over in self.open:
            over.wait(seconds)

    def remember(self, line: str, stderr: bool) -> None:
        """Keep the last lines, and all from the begin of a crash on."""
        if stderr and line.startswith(_CRASHES):
            self.crashed = time.monotonic()
            self.tail = collections.deque(maxlen=_CRASH)
        self.tail.append(line)

    def last_words(self) -> list[str]:
        """Return the traceback of the exception that has ended it, or else its last lines."""
        return self._traceback.splitlines() or list(self.tail)

    @property
    def would_save(self) -> bool:
        """Whether it runs, and would save a checkpoint when it is asked to end."""
        return self.code is None and self.saving != "over"

    @property
    def is_saving(self) -> bool:
        """Whether it has still to save, and to end; or not to end, where `fit` is in a thread."""
        return self.code is None and not (self._waits and self.saving == "over")

    # --- how it ended ---

    def ended(self, returncode: int) -> None:
        """Note how it ended."""
        self.exited = time.monotonic()
        self.signal = max(0, -returncode)
        if self.remote:
            # The agent over there reports codes as a shell does. A signal to the remote shell on
            # this side says nothing about the rank.
            self.signal = returncode - 128 if signal_name(returncode) else 0
        self.code = agent.shell_code(returncode)
        if self.stuck:
            self.signal = signal.SIGKILL
        elif self.signal == signal.SIGKILL and not self.remote:
            self.was_short_of_memory = self._kills.are_more()
        self._record("rank end", code=self.code, how=self.how)

    @property
    def failed(self) -> bool:
        """Whether it ended other than with exit code 0."""
        return self.code not in (None, 0)

    @property
    def in_trouble(self) -> bool:
        """Whether it still runs, and has just told of what ends it."""
        return self.code is None and time.monotonic() - self._told_at < _RECENT

    @property
    def _told_at(self) -> float:
        return self.crashed if self.failure is None else self.failure.time

    @property
    def failed_at(self) -> float:
        """When it failed, of `time.monotonic()`: shutting down takes time after an exception."""
        if self.failure is not None:
            return self.failure.time
        return self.crashed if self.exited - self.crashed < _RECENT else self.exited

    @property
    def is_victim(self) -> bool:
        """Whether it failed because another rank was gone."""
        if self.failure is not None:
            return self.failure.lost_peer
        by_itself = self.failed and not (self.signal or self.lost_connection)
        return by_itself and any(PEER_LOST.search(line) for line in self.last_words())

    @property
    def failed_by_itself(self) -> bool:
        """Whether its own code ended it, such as an exception in the script."""
        return self.failed and not (self.signal or self.is_victim or self.lost_connection)

    @property
    def lost_connection(self) -> bool:
        """Whether the remote shell ended, and not the rank: its last words are those of ssh."""
        return self.remote and self.code == SSH_FAILED

    @property
    def was_struck(self) -> bool:
        """Whether a signal ended it that does not follow from another rank's failure."""
        return self.failure is None and self.signal in _FROM_OUTSIDE

    @property
    def how(self) -> str:
        """How it ended, for a sentence: "with exit code 3" or "by SIGKILL (exit code 137)"."""
        code = self.code or 0
        if self.stuck:
            return f"by the launcher, as it {self.stuck}"
        if not (name := signal_name(code)):
            return f"with exit code {code}"
        return f"by {name} (exit code {code}){_NO_MEMORY if self.was_short_of_memory else ''}"

    @property
    def how_lost(self) -> str:
        """How a task was lost that may be replaced: a sentence without its end."""
        name = self.process.name
        if self.process.role == "worker":
            name += f" (worker {self.process.rank - 1})"  # the chief is rank 0
        if self.stuck:
            return f"{name} {self.stuck}, and was ended"
        if not self.signal:
            return f"{name} ended {self.how}"
        why = _NO_MEMORY if self.was_short_of_memory else ""
        return f"{name} was killed by {killer(self.signal)}{why}"


def signal_name(code: int) -> str:
    """Return the name of the signal in a shell's exit code; "" when there is none."""
    with contextlib.suppress(ValueError):
        return signal.Signals(code - 128).name
    return ""


def killer(number: int) -> str:
    """Return the name of a signal, or "signal 40" for one that has none."""
    return signal_name(128 + number) or f"signal {number}"
