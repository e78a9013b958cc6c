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


def members(job: str) -> list[int]:
    """List the processes of a job, and of jobs started inside it."""
    return sorted(_Search(job).look())


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
        pids: set[int] = set()
        stats: dict[int, list[str]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                    value = (b"\0" + file.read()).partition(self._mark)
                    if value[1] and value[2][:1] in (b"\0", b"/", b""):
                        pids.add(int(entry))
                with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                    # From "state" on, which is the third of proc(5).
                    stat = file.read().rpartition(")")[2].split()
                    if stat[0] not in "ZX":
                        stats[int(entry)] = stat
        parents = {pid: int(stat[1]) for pid, stat in stats.items()}
        sessions = {pid: int(stat[3]) for pid, stat in stats.items()}
        seen = {(pid, stat[19]) for pid, stat in stats.items()}  # with the time of its start
        pids &= stats.keys()
        pids |= {pid for pid, _ in self._seen & seen}
        self._sessions |= {one for one in pids if sessions[one] == one}
        # While its session lives, the number of an ended rank is given to no other process.
        ours = {one for one in self._sessions if one in pids or one not in stats}
        pids |= {pid for pid, session in sessions.items() if session in ours}
        before = 0
        while len(pids) > before:
            before = len(pids)
            pids |= {pid for pid, parent in parents.items() if parent in pids}
        pids.discard(os.getpid())
        self._seen = {(pid, when) for pid, when in seen if pid in pids}
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
