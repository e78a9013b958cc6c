"""The way of a rank's reports to the launcher: a socket of their own, which no output disturbs.

    rank ── DTK_REPORTS ──> socket pair ──> launcher                                 on its machine
    rank ── DTK_REPORTS ──> socket pair ──> agent ── MARK, JSON ──> stderr of ssh ──> launcher

The launcher sends nothing: once it asks a rank to save and end, and when it is gone, a read ends.

A script may leave a line of its standard error open, as progress bars do, send it elsewhere, or
close it: what the rank reports arrives. The agent's records may stand anywhere in what the rank
writes, and are cut out of its bytes.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import socket
import stat
import time
from collections.abc import Mapping
from typing import IO

VARIABLE = "DTK_REPORTS"
# How a record of the agent's begins; the end of the line ends it. Written at once, and shorter than
# PIPE_BUF, it is never torn.
MARK = b"\x1edtk report "
_RECORD = re.compile(MARK + b"(.*)\n")
# The begin of one, at the end of what was read.
_BEGINS = b"|".join(MARK[:length] for length in range(1, len(MARK)))
_TORN = re.compile(MARK + b".*\\Z|(?:" + _BEGINS + b")\\Z")
_LARGEST = 1 << 16
_PATIENCE = 1000  # milliseconds, for a launcher that is stopped itself


def pair() -> tuple[socket.socket, socket.socket]:
    """Return where reports are read, and the end that a rank inherits."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def variables(end: socket.socket) -> dict[str, str]:
    """Return what tells a rank of its end.

    With the inode: a script may close the descriptor, and open a file of its own by that number.
    """
    return {VARIABLE: f"{end.fileno()}:{os.fstat(end.fileno()).st_ino}"}


def receive(reading: socket.socket) -> bytes:
    """Wait for a report, and return it; empty when nobody is left who could send one."""
    return reading.recv(_LARGEST)


def ask(reading: socket.socket) -> None:
    """Ask the rank at the other end to save and end; its reports are still read."""
    with contextlib.suppress(OSError):
        reading.shutdown(socket.SHUT_WR)


def split_records(data: bytes) -> tuple[bytes, list[bytes], bytes]:
    r"""Cut the agent's records out of what a remote shell wrote.

    >>> split_records(b"50%" + MARK + b"1\n|100%\n" + MARK[:4])
    (b'50%|100%\n', [b'1'], b'\x1edtk')
    """
    records, text = _RECORD.findall(data), _RECORD.sub(b"", data)
    torn = _TORN.search(text)
    begins = len(text) if torn is None else torn.start()
    return text[:begins], records, text[begins:]


def record(message: bytes) -> bytes:
    """Return a report as the agent writes it."""
    return MARK + message + b"\n"


def takes_more(pipe: int | IO[bytes] | IO[str], milliseconds: int = 0) -> bool:
    """Return whether something can be written to a pipe without waiting for its reader any more."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return bool(poll.poll(milliseconds))


def write_line(pipe: IO[bytes] | None, line: str) -> None:
    """Write a line to a process, unless it is gone, or stopped, and reads nothing any more."""
    with contextlib.suppress(OSError, ValueError):
        if pipe is not None and takes_more(pipe):
            pipe.write(f"{line}\n".encode())
            pipe.flush()


# In a rank.


@functools.cache  # each call would register one more function for forks
def keep() -> None:
    """Keep the programs and processes that this rank starts from holding its end open."""
    if (end := _end()) is not None:
        os.set_inheritable(end, False)
        os.register_at_fork(after_in_child=_close)


def tell(message: Mapping[str, object], patience: int = _PATIENCE) -> bool:
    """Send a report with the time of this process's clock; nobody may be there to read it.

    Returns whether it was taken, within so many milliseconds.
    """
    end = _end()
    if end is None or os.getsid(0) != os.getpid():  # a process that the rank has started
        return False
    with contextlib.suppress(OSError):
        takes_more(end, patience)
        sending = socket.socket(fileno=end)
        try:
            text = json.dumps({**message, "sent": time.monotonic()}).encode()
            sending.send(text, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        finally:
            sending.detach()
    return False


def can_be_asked() -> bool:
    """Return whether the launcher can ask this process to save and end."""
    return _end() is not None and os.getsid(0) == os.getpid()


def await_request() -> None:
    """Wait until the launcher asks this rank to save and end, or is gone."""
    if (end := _end()) is not None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(end)) as reading:
            reading.recv(1)


@functools.cache
def _place() -> tuple[int, int]:
    number, _, inode = os.environ.get(VARIABLE, "").partition(":")
    return (int(number), int(inode)) if number.isdigit() and inode.isdigit() else (-1, 0)


def _end() -> int | None:
    """Return this rank's end; None where there is none any more."""
    number, inode = _place()
    with contextlib.suppress(OSError):
        status = os.fstat(number)
        if stat.S_ISSOCK(status.st_mode) and status.st_ino == inode:
            return number
    return None


def _close() -> None:
    if (end := _end()) is not None:
        os.close(end)
