"""What a rank is doing, told to `dtk run`, which ends a job that is stuck and names who is missing.

A rank is *inside* while it computes or waits together with the others: in a step, in a collective.
It counts how often it has gone inside, and a thread of its own reports once a second where it is:

    rank 0   inside train step 42                              waits
    rank 1   outside, after train step 41; no CPU for 300 s    is waited for

In jobs with parameter servers the chief is inside while it waits for workers, and says which of
them has work since when; the evaluator is inside while it evaluates; the others only serve.

Reports are lines of standard error that the launcher takes out. A rank that is stopped, swapped out
or cut off sends none at all.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypedDict

MARK = "\x1edtk progress "
# Seconds, of the launcher's: set in ranks that are to report. See `dtk run --stall-timeout`.
VARIABLE = "DTK_STALL_TIMEOUT"
_PERIOD = 1.0
_AT_LEAST = 5.0
_FRAMES = 15
# A line longer than a pipe takes at once could mix with another.
_LONGEST = 3000


class Report(TypedDict):
    """What a rank says of itself.

    Attributes:
        count: How often it has gone inside.
        inside: Whether it is.
        what: Where it is, or was last.
        still: Seconds since that changed.
        cpu: Seconds that its process has used, without threads that poll.
        io: Bytes that it has read from storage and written there.
        stack: Its main thread's, where it has been outside for long; "" else, and of a task that
            serves, which runs nothing of the script's meanwhile.
        held: Of a chief: for how many seconds each worker has had its work, by the worker's number.
    """

    count: int
    inside: bool
    what: str
    still: float
    cpu: float
    io: int
    stack: str
    held: dict[str, float]


class _Position(NamedTuple):
    number: int = 0
    depth: int = 0
    what: str = "the start"
    since: float = 0.0
    watched: bool = False


class _Reporter:
    """Reports the position of this process's main thread.

    Args:
        timeout: Seconds after which a job that does not move is ended.
        serves: Whether the main thread only waits for the job's end.
        send: Takes each report, in a thread of its own.
    """

    def __init__(self, timeout: float, serves: bool, send: Callable[[Report], None]) -> None:
        self.position = _Position(since=time.monotonic())
        self.held: Callable[[], dict[int, float]] = dict
        self._timeout = timeout
        self._serves = serves
        self._send = send
        self._times: collections.Counter[str] = collections.Counter()
        self._reported: tuple[_Position, float] = (self.position, 0.0)
        # As `faulthandler` writes it.
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._run, name="dtk-progress", daemon=True).start()
        atexit.register(self._tell)  # the launcher wants to know whether anything was done

    def move(self, depth: int, what: str | None = None, watched: bool = False) -> None:
        """Note that the main thread goes inside or comes out.

        Args:
            depth: 1 to go inside, -1 to come out.
            what: Where it goes.
            watched: Whether its stack is of interest there.
        """
        number, now, before, *_ = self.position
        if what is not None:
            self._times[what] += 1
            before = f"{what} {self._times[what]}"
        moment = time.monotonic()
        self.position = _Position(number + (depth > 0), now + depth, before, moment, watched)

    def _run(self) -> None:
        while True:
            position, now = self.position, time.monotonic()
            before, when = self._reported
            if position is not before or now - when >= min(_AT_LEAST, self._timeout / 4):
                self._reported = (position, now)
                self._tell()
            time.sleep(min(_PERIOD, self._timeout / 10))

    def _tell(self) -> None:
        self._send(self._report(self.position, time.monotonic()))

    def _report(self, position: _Position, now: float) -> Report:
        still = now - position.since
        held = self.held()
        late = still > self._timeout / 2 and (not position.depth or position.watched)
        late &= not self._serves
        return {
            "count": position.number,
            "inside": position.depth > 0,
            "what": position.what,
            "still": still,
            "cpu": _cpu(),
            "io": _io(),
            "stack": self._stack() if late else "",
            "held": {str(worker): now - since for worker, since in held.items()},
        }

    def _stack(self) -> str:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            threads = file.read().split("\n\n")
        mark = f"0x{self._main:016x} "
        mine = next((one for one in threads if mark in one), "")
        return "\n".join(mine.splitlines()[1 : 1 + _FRAMES])[:_LONGEST]


_reporter: _Reporter | None = None
# Threads that ask for messages all the time: they use CPU while a rank waits. System's numbers.
_polling: set[int] = set()


def start(serves: bool = False) -> None:
    """Begin to report, once, where the launcher has asked for it.

    Args:
        serves: Whether the main thread only waits for the job's end, while TensorFlow's do what
            the chief asks for.
    """
    global _reporter
    timeout = float(os.environ.get(VARIABLE) or 0)
    if _reporter is None and timeout > 0 and is_launched():
        _reporter = _Reporter(timeout, serves, _to_launcher)


def report_to(send: Callable[[Report], None], timeout: float) -> None:
    """Begin to report to others than a launcher.

    Args:
        send: Takes each report, in threads of its own.
        timeout: Seconds after which a job that does not move is ended.
    """
    global _reporter
    _reporter = _Reporter(timeout, False, send)


def is_reporting() -> bool:
    """Return whether this process reports to anyone."""
    return _reporter is not None


def is_launched() -> bool:
    """Return whether `dtk run` has started this process, and sees to it."""
    return os.environ.get("DTK_RUN") == "1"


def _to_launcher(report: Report) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(2, (MARK + json.dumps(report) + "\n").encode())


def tell_held(held: Callable[[], dict[int, float]]) -> None:
    """Report from now on which worker has work.

    Args:
        held: Returns since when, in seconds of `time.monotonic`, by the worker's number; called on
            a thread of its own.
    """
    if _reporter is not None:
        _reporter.held = held


@contextlib.contextmanager
def inside(what: str, *, watched: bool = False) -> Iterator[None]:
    """Return a context for what all ranks do together.

    Args:
        what: Names it, equally on all ranks.
        watched: Whether to report the stack there, too, once it has taken long.

    Example:
        >>> with inside("train step"):
        ...     pass
    """
    reporter = _reporter
    if reporter is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    reporter.move(1, what, watched)
    try:
        yield
    finally:
        reporter.move(-1)


@contextlib.contextmanager
def polling_threads() -> Iterator[None]:
    """Return a context whose new threads ask for messages all the time.

    What they use of the processor does not count as computing.
    """
    before = _threads()
    try:
        yield
    finally:
        _polling.update(_threads() - before)


def _threads() -> set[int]:
    try:
        return set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return set()


def _cpu() -> float:
    used = time.process_time()
    for number in _polling:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{number}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            used -= (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def _io() -> int:
    try:
        with open("/proc/self/io") as file:
            told = dict(line.split(":") for line in file)
    except OSError:
        return 0
    # Not what goes through sockets and pipes, which ranks that wait look at all the time.
    return int(told["read_bytes"]) + int(told["write_bytes"])
