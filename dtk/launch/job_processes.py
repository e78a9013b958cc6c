"""The processes that carry the mark of a job: starting, finding and ending them, on this host.

Every process of a job carries DTK_JOB in its environment, and so do its children: that mark, not a
list of process ids, decides what is ended. It finds helpers that left the process group or lost
their parent. Children that were given another environment are found as descendants, or in the
session of the rank that started them.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple


def members(job: str) -> list[int]:
    """List the processes of a job, and of jobs started inside it."""
    return sorted(_Search(job).look())


class _Process(NamedTuple):
    parent: int
    session: int
    began: str  # when; tells a process from a later one of its number
    is_marked: bool


def _running(mark: bytes) -> dict[int, _Process]:
    """Return all processes that run, and whether a mark stands in their variables."""
    processes = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        is_marked = False
        # Of a process that ends meanwhile, or that is another user's.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            _, found, rest = (b"\0" + file.read()).partition(mark)
            is_marked = bool(found) and rest[:1] in (b"\0", b"/", b"")
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            # From "state" on, which is the third of proc(5).
            state, parent, _, session, *rest_of_stat = file.read().rpartition(")")[2].split()
            if state not in "ZX":
                began = rest_of_stat[15]
                processes[int(pid)] = _Process(int(parent), int(session), began, is_marked)
    return processes


class _Search:
    """Looks for the processes of a job, again and again."""

    def __init__(self, job: str, sessions: Collection[int] = ()) -> None:
        self._mark = b"\0DTK_JOB=" + job.encode()
        self._sessions = set(sessions)
        self._seen: set[tuple[int, str]] = set()

    def look(self) -> set[int]:
        """Return the ids of those that run now.

        Once seen, a process is found again though its parents and its session's leader have ended.
        """
        running = _running(self._mark)
        pids = {
            pid
            for pid, one in running.items()
            if one.is_marked or (pid, one.began) in self._seen
        }
        self._sessions |= {pid for pid in pids if running[pid].session == pid}
        # While its session lives, the number of an ended rank is given to no other process.
        ours = {leader for leader in self._sessions if leader in pids or leader not in running}
        pids |= {pid for pid, one in running.items() if one.session in ours}
        before = 0
        while len(pids) > before:
            before = len(pids)
            pids |= {pid for pid, one in running.items() if one.parent in pids}
        pids.discard(os.getpid())
        self._seen = {(pid, running[pid].began) for pid in pids}
        return pids


def end(
    job: str, grace: float, hurry: Callable[[], bool] = bool, sessions: Collection[int] = ()
) -> None:
    """End every process of a job: SIGTERM, then SIGKILL."""
    search = _Search(job, sessions)
    pids = search.look()
    _signal(pids, signal.SIGTERM)
    # From here: on a busy machine the listing alone may take longer than a short grace.
    deadline = time.monotonic() + grace
    while pids and time.monotonic() < deadline and not hurry():
        time.sleep(0.05)
        pids = search.look()
    # Again and again: a process may fork between being listed and being killed.
    deadline = time.monotonic() + 5.0
    while pids and time.monotonic() < deadline:
        _signal(pids, signal.SIGKILL)
        time.sleep(0.02)
        pids = search.look()


def abort(pid: int) -> None:
    """End a process, even a stopped one, so that `faulthandler` writes where it was."""
    with contextlib.suppress(OSError, ValueError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))  # nobody asked for its memory
    for number in (signal.SIGABRT, signal.SIGCONT):
        _signal([pid], number)


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def bootstrapped(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which Python runs `bootstrap/sitecustomize.py` before a script.

    Unchanged where dtk cannot be found: there, what it does begins with the strategy.
    """
    spec = importlib.util.find_spec("dtk")
    for folder in (spec and spec.submodule_search_locations) or ():
        bootstrap = os.path.join(folder, "launch", "bootstrap")
        if os.path.isfile(os.path.join(bootstrap, "sitecustomize.py")):
            paths = [bootstrap, *filter(None, [environ.get("PYTHONPATH")])]
            return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
    return {**environ}


@contextlib.contextmanager
def _bound_to(cores: Collection[int]) -> Iterator[None]:
    """Let processes started inside, by this thread, use these cores only.

    Where that is not allowed, or the cores are gone since the survey, they use all there are.
    """
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError):  # a rank that is not bound is only slower
            os.sched_setaffinity(0, cores or before)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def start(
    argv: Sequence[str],
    environ: Mapping[str, str],
    job: str,
    cores: Collection[int],
    *,
    cwd: str | None = None,
    output: int | None = None,
    keeps: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process of a job, in a session of its own and without input."""
    with _bound_to(cores):
        process = subprocess.Popen(
            list(argv),
            env={**bootstrapped(environ), "DTK_JOB": job},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            start_new_session=True,
            pass_fds=keeps,
        )
    # A moment passes between loading the program, when Popen returns, and being able to read its
    # variables: `members`, and so `end`, would miss it.
    while process.poll() is None and not _shows_variables(process.pid):
        time.sleep(0.001)
    return process


def _shows_variables(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as variables:
        return bool(variables.read(1))
    return False
