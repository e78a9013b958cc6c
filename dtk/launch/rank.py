"""One process of a job, from its first start to its last end, and what is known about it."""

from __future__ import annotations

import collections
import contextlib
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from dtk.cluster import usage
from dtk.cluster.rank_status import RankStatus, report_of
from dtk.launch import agent, job_processes
from dtk.launch.machines import Guard
from dtk.launch.plan import Process
from dtk.launch.screen import Sink

# Errors raised for lines that another program wrote in our format.
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
_TAIL = 40  # lines shown of a rank that failed without a traceback
_TRACE = 200  # lines after which a traceback was evidently survived
_RECENT = 10.0  # seconds between a traceback and the exit it explains
# What ranks say when the connection to another one breaks.
_PEER_LOST = re.compile(
    r"Socket closed|Connection reset by peer|[Cc]onnection closed by peer|UnavailableError|"
    r"HorovodInternalError|Horovod has been shut down|"
    r"An error occurred in PMIx Event Notification|"  # MPI's server is gone
    r"whose script has ended; see what"  # dtk's own, over MPI
)
# First lines of what a rank dies of: an exception of Python's, or a crash of Python itself.
_DIES = ("Traceback (most recent call last)", "Fatal Python error: ")
# Signals that do not follow from the failure of another rank. Aborts are left out: libraries abort
# when a peer is gone.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Exit code of ssh where it could not connect, or has lost the connection.
_SSH_FAILED = 255
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


class JobState:
    """State of a job that its threads share, and the condition they wait on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.stopping = self.hurry = self.broken_pipe = False
        self.error: Exception | None = None

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


class Rank:
    """One place of a plan, and what runs there.

    A lost worker that is started again keeps its place: name, variables, address and file.
    """

    def __init__(
        self,
        process: Process,
        env: Mapping[str, str],
        remote: bool,
        popen: subprocess.Popen[bytes],
        guard: Guard | None = None,
    ) -> None:
        self.process = process
        self.env = env
        self.remote = remote
        self.guard = guard
        self.file: Sink | None = None
        self.readers: list[threading.Thread] = []
        self.restarts = 0
        self.given_up = False
        self.started(popen)

    def started(self, popen: subprocess.Popen[bytes]) -> None:
        """Note what runs here from now on, and forget what its predecessor said."""
        self.popen = popen
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self.trace: list[str] = []
        self.trace_began: float | None = None
        self.chained = False
        self.code: int | None = None
        self.signal = 0
        self.exited = 0.0
        self.status = self.new_status()
        self.status.started, self.status.moved = True, time.monotonic()
        self.dump: list[str] | None = None
        self.stuck = ""
        self.was_short_of_memory = False
        self._kills = usage.MemoryKills(popen.pid)
        self.saving: str = "over"

    def new_status(self) -> RankStatus:
        """Return the status of a rank of which nothing is known."""
        return RankStatus(self.process.name, self.process.host, self.process.role)

    def hear(self, message: bytes) -> None:
        """Take a message that has come by its `report_channel`."""
        with contextlib.suppress(*_FOREIGN):
            told = json.loads(message)
            if "progress" in told:
                self.status.take(report_of(told["progress"]), time.monotonic())
            elif "saving" in told:
                self._note_saving(str(told["saving"]))
            elif told["usage"] == usage.NO_MEMORY:
                self.was_short_of_memory = True
            else:
                state, cpu, io, total = told["usage"]
                seen = usage.Usage(str(state), float(cpu), int(io), float(total))
                self.status.observe(seen, time.monotonic())

    def _note_saving(self, saving: str) -> None:
        """Tell the guard, or the agent on another host, whether it would save a checkpoint."""
        if saving == self.saving:
            return
        self.saving = saving
        if self.remote:
            self.tell_agent("ready" if self.would_save else "over")
        elif self.guard is not None:
            self.guard.note_saving(self.popen.pid, self.would_save)

    def observe(self) -> None:
        """Look at the process from outside if it runs here; agents report those of other hosts."""
        if not self.remote:
            self.status.observe(usage.of(self.popen.pid), time.monotonic())

    def ask_for_stack(self) -> None:
        """End its process such that it writes its stack first; one that is stopped does, too."""
        self.dump = []
        if not self.remote:
            job_processes.abort(self.popen.pid)
        else:
            self.tell_agent("stack")

    @property
    def would_save(self) -> bool:
        """Whether it runs, and would save a checkpoint when it is asked to end."""
        return self.code is None and self.saving in ("ready", "begun")

    def ask_to_end(self) -> None:
        """Send SIGTERM to its process, but not to its children."""
        if not self.remote:
            self.popen.terminate()
        else:
            self.tell_agent("end")

    def tell_agent(self, line: str) -> None:
        """Send a line to the agent on another host; a rank on this machine has none."""
        pipe = self.popen.stdin
        # If the connection is lost, the remote shell ends; if it takes nothing any more, the agent
        # falls silent.
        with contextlib.suppress(OSError, ValueError):
            if pipe is not None and job_processes.takes_more(pipe):
                pipe.write(f"{line}\n".encode())
                pipe.flush()

    def hang_up(self) -> None:
        """Have the agent on another host end the process without waiting for a checkpoint."""
        self.tell_agent("over")
        if self.popen.stdin is not None:
            with contextlib.suppress(OSError):
                self.popen.stdin.close()

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

    def remember(self, line: str, stderr: bool) -> None:
        """Keep the last lines, and everything from the start of the last traceback on."""
        self.tail.append(line)
        if not stderr:
            return
        if line.startswith(_DIES) and not self.chained:
            self.trace, self.trace_began = [], time.monotonic()
        if self.trace_began is not None:
            self.trace.append(line)
            if len(self.trace) > _TRACE:
                self.trace, self.trace_began = [], None
        if line.strip():
            self.chained = line.startswith(_CHAINED)

    @property
    def failed(self) -> bool:
        """Whether it ended other than with exit code 0."""
        return self.code not in (None, 0)

    @property
    def in_trouble(self) -> bool:
        """Whether a traceback was just printed by a rank that still runs."""
        began = self.trace_began
        return self.code is None and began is not None and time.monotonic() - began < _RECENT

    @property
    def failed_at(self) -> float:
        """When it failed: a traceback comes before the exit, as shutting down takes time.

        In seconds of `time.monotonic()`.
        """
        began = self.trace_began
        return began if began is not None and self.exited - began < _RECENT else self.exited

    @property
    def is_victim(self) -> bool:
        """Whether it failed because another rank was gone, by its own last words."""
        return (
            self.failed
            and not self.signal
            and not self.lost_connection
            and any(_PEER_LOST.search(line) for line in self.last_words())
        )

    @property
    def failed_by_itself(self) -> bool:
        """Whether its own code ended it, such as an exception in the script."""
        return self.failed and not (self.signal or self.is_victim or self.lost_connection)

    @property
    def lost_connection(self) -> bool:
        """Whether the remote shell ended, and not the rank: its last words are those of ssh."""
        return self.remote and self.code == _SSH_FAILED

    @property
    def was_struck(self) -> bool:
        """Whether a signal ended it that does not follow from another rank's failure."""
        return self.signal in _FROM_OUTSIDE

    @property
    def how(self) -> str:
        """How it ended, for a sentence: "with exit code 3" or "by SIGKILL (exit code 137)"."""
        code = self.code or 0
        if self.stuck:
            return f"by the launcher, as it {self.stuck}"
        name = signal_name(code)
        if not name:
            return f"with exit code {code}"
        why = ", probably by the kernel's out-of-memory killer"
        return f"by {name} (exit code {code}){why if self.was_short_of_memory else ''}"

    def last_words(self) -> list[str]:
        """Return the traceback it died of, or else its last lines."""
        recent = self.trace_began is not None and self.failed_at == self.trace_began
        return list(self.trace if recent else self.tail)

    def trace_since(self, moment: float) -> list[str]:
        """Return the last traceback if it began after a moment, else nothing."""
        began = self.trace_began
        return list(self.trace) if began is not None and began > moment else []


def signal_name(code: int) -> str:
    """Return the name of the signal in a shell's exit code; "" when there is none."""
    known = {int(one): one.name for one in signal.Signals}
    return known.get(code - 128, "")


def killer(number: int) -> str:
    """Return the name of a signal, or "signal 40" for one that has none."""
    return signal_name(128 + number) or f"signal {number}"
