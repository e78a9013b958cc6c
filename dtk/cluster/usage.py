"""What a process is seen doing from outside: whether it runs at all, computes, reads or writes.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

# Lines of standard error in which another host's agent tells the launcher what it has seen.
MARK = "\x1edtk usage "
# States of proc(5): stopped by a signal, or by a debugger.
STOPPED = "Tt"


class Usage(NamedTuple):
    """What a process was doing when it was looked at.

    Attributes:
        state: Of its main thread, a letter of proc(5).
        cpu: Seconds that its main thread has computed: others may only look for messages.
        io: Bytes that the process has read from storage and written there.
    """

    state: str
    cpu: float
    io: int


def of(pid: int) -> Usage | None:
    """Look at a process of this machine.

    Args:
        pid: Its id.

    Returns:
        What it is doing; None if it is not there, or another user's.

    >>> of(os.getpid()).state
    'R'
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/stat") as file:
            stat = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return Usage(stat[0], _seconds(stat), io(pid))


def cpu(thread: int) -> float:
    """Return the seconds that a thread of this process has computed; 0 if it has ended.

    Args:
        thread: The system's number of it.
    """
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
        return _seconds(file.read().rpartition(")")[2].split())
    return 0.0


def _seconds(stat: list[str]) -> float:
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def io(pid: int | str = "self") -> int:
    """Return the bytes that a process has read from storage and written there.

    Not what goes through sockets and pipes, which ranks that wait look at all the time.

    Args:
        pid: Its id.
    """
    try:
        with open(f"/proc/{pid}/io") as file:
            told = dict(line.split(":") for line in file)
    except OSError:
        return 0
    return int(told["read_bytes"]) + int(told["write_bytes"])
