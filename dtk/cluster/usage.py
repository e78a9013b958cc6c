"""What a process is seen doing from outside: whether it runs at all, computes, reads or writes.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

# What another host's agent reports of a rank that the out-of-memory killer has ended.
NO_MEMORY = "no memory"
# States of proc(5): stopped by a signal, or by a debugger.
STOPPED = "Tt"


class Usage(NamedTuple):
    """What a process was doing when it was looked at."""

    state: str  # of its main thread, a letter of proc(5)
    # seconds that its main thread and the programs it has started have computed: other threads may
    # only look for messages
    cpu: float
    io: int  # bytes that the process and these programs have read from storage and written there
    total: float = 0.0  # seconds that all its threads and these programs have computed
    memory: int = 0  # bytes that it holds itself
    allowed: int = 0  # bytes that it, and all beside it, may hold


def usage_of(pid: int) -> Usage | None:
    """Look at a process of this machine; None where there is none, or one that is over."""
    try:
        main, total = _stat(f"{pid}/task/{pid}"), _stat(f"{pid}")
    except OSError:
        return None
    if total[0] in "ZX":
        return None
    seconds, moved = of_started(pid)
    held = int(total[21]) * os.sysconf("SC_PAGE_SIZE")
    own, all_of_it = _seconds(main) + seconds, _seconds(total) + seconds
    return Usage(main[0], own, io(pid) + moved, all_of_it, held, memory_allowed())


def of_started(pid: int) -> tuple[float, int]:
    """Return seconds and bytes of the programs that a process's main thread has started.

    It may wait for one, such as a `tar` that unpacks the data. Where one has ended, there may be
    less than before.
    """
    seconds, moved = 0.0, 0
    with contextlib.suppress(OSError):  # the kernel does not tell, or one has just ended
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
        for child in children:
            below = of_started(child)
            seconds += _seconds(_stat(f"{child}")) + below[0]
            moved += io(child) + below[1]
    return seconds, moved


def cpu(thread: int) -> float:
    """Return the seconds that a thread of this process has computed; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return _seconds(_stat(f"self/task/{thread}"))
    return 0.0


def _stat(process: str) -> list[str]:
    """Return what proc(5) tells of a process or thread, from its state on."""
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _seconds(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def io(pid: int | str = "self") -> int:
    """Return the bytes that a process has read from storage and written there.

    Not what goes through sockets and pipes, which ranks that wait look at all the time.
    """
    try:
        with open(f"/proc/{pid}/io") as file:
            counts = dict(line.split(":") for line in file)
    except OSError:
        return 0
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def memory() -> int:
    """Return the bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def memory_allowed(proc: str = "/proc/self", groups: str = "/sys/fs/cgroup") -> int:
    """Return the bytes that this process and those beside it may hold: a container's, or all."""
    allowed = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _groups_of("memory", proc, groups):
        for file in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                allowed.append(int(pathlib.Path(folder, file).read_text()))
    return min(allowed)


def cores_allowed(proc: str = "/proc/self", groups: str = "/sys/fs/cgroup") -> int | None:
    """Return how many cores' time this process may use, as in a container; None: all of it."""
    allowed = []
    for folder in _groups_of("cpu", proc, groups):
        # of versions 2 and 1
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                texts = [pathlib.Path(folder, file).read_text() for file in files]
                quota, period = map(int, " ".join(texts).split())
                allowed += [-(-quota // period)] if quota > 0 else []  # rounded up
    return min(allowed, default=None)


def _groups_of(controller: str, proc: str, groups: str) -> Iterator[str]:
    """Yield the folders of a process's control groups, from its own one up."""
    with contextlib.suppress(OSError), open(f"{proc}/cgroup") as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            is_named = controller in controllers.split(",")  # of version 1
            # A container may see its own group alone, as the root.
            while is_named or not controllers:
                yield f"{groups}/{controller}{path}" if is_named else f"{groups}{path}"
                if path in ("", "/"):
                    break
                path = os.path.dirname(path)


class MemoryKills:
    """Says whether the kernel's out-of-memory killer has ended processes since this was made.

    It counts those of the process's control group, such as a container, or of the groups above it
    and the whole machine where the group does not tell.
    """

    def __init__(self, pid: int, proc: str = "/proc", groups: str = "/sys/fs/cgroup"):
        folders = _groups_of("memory", f"{proc}/{pid}", groups)
        names = ("memory.events", "memory.oom_control")  # of versions 2 and 1
        files = [f"{folder}/{name}" for folder in folders for name in names]
        files.append(f"{proc}/vmstat")
        self._file = next((file for file in files if _memory_kills(file) is not None), "")
        self._before = _memory_kills(self._file) or 0

    def are_more(self) -> bool:
        """Return whether more were ended."""
        return (_memory_kills(self._file) or 0) > self._before


def _memory_kills(file: str) -> int | None:
    """Return how many processes the kernel has ended, by a file of its; None where it is silent."""
    with contextlib.suppress(OSError, ValueError, KeyError), open(file) as lines:
        return int(dict(line.split() for line in lines)["oom_kill"])
    return None
