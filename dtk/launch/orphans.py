"""Ranks that outlive their launcher: those that would save a checkpoint get the time for it.

What they print has no reader any more, and Python would end them for that before they have saved.
So their pipes are kept open here, and read once the launcher is gone.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection

from dtk.launch.marked import members

_MARGIN = 1.0  # seconds: ranks that are out of patience say so themselves


class Saver:
    """Asks ranks to end, once their launcher has gone, and waits for their checkpoints."""

    def __init__(self, job: str, grace: float) -> None:
        self._job, self._grace = job, grace
        self._pipes: dict[int, list[int]] = {}

    def note(self, what: str, pid: int) -> None:
        """Note whether a rank would save a checkpoint if it were asked to end."""
        if what == "ready":
            self._pipes.setdefault(pid, _opened(pid))
        elif what == "over":
            for pipe in self._pipes.pop(pid, []):
                os.close(pipe)

    def let_save(self, serving: Collection[int] = ()) -> None:
        """Send the ranks that would save SIGTERM, and wait until they have ended or time is up."""
        asked = set(self._pipes) & set(members(self._job))
        saving = asked | set(serving)
        for pipes in self._pipes.values():
            for pipe in pipes:
                threading.Thread(target=_read_out, args=(pipe,), daemon=True).start()
        for pid in asked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 2 * self._grace + _MARGIN
        while saving and time.monotonic() < deadline:
            time.sleep(0.25)
            saving &= set(members(self._job))


def _opened(pid: int) -> list[int]:
    """Return the reading ends of what a process writes to, where these are pipes."""
    found = []
    for number in (1, 2):
        name = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            if os.readlink(name).startswith("pipe:"):
                found.append(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    for pipe in found:
        os.set_blocking(pipe, True)
    return found


def _read_out(pipe: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(pipe, 1 << 16):
            pass
