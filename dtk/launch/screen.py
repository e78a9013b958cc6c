"""Where the launcher writes: whole lines, and below them those that are being written.

On a terminal the rows of the first process are drawn anew in place. No job fails of a stream that
is full or slow, or has no Unicode.

EPIPE              the reader has gone, as with `| head`: whoever asked is told
ENOSPC, EIO, ...   is told once, and writing goes on, as there may be room again
nobody reads       waits, as the ranks would; not while the job is being ended
no such character  is written as "?"
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TextIO

from dtk.launch.shown_text import clipped

_UP = "\x1b[1A\x1b[2K"
_PIECE = select.PIPE_BUF  # of which a pipe that is ready for writing takes one at once
_LOOK = 200  # milliseconds between two looks at a stream that takes nothing
_PATIENCE = 1.0  # seconds for it, once the job is being ended


class Sink:
    """A stream, or a file, of the launcher's own."""

    def __init__(
        self,
        target: TextIO | int | None,
        name: str,
        on_error: Callable[[str], None],
        on_gone: Callable[[str], None] | None = None,
        is_ending: Callable[[], bool] = bool,
    ) -> None:
        self.name = name
        self._stream = None if isinstance(target, int) else target
        self._descriptor = target if isinstance(target, int) else _descriptor(target)
        self._encoding = getattr(target, "encoding", None) or "utf-8"
        self._on_error, self._on_gone = on_error, on_gone
        self._is_ending = is_ending
        self._failed = False
        self._lock = threading.Lock()
        self._waits_since: float | None = None
        self._is_given_up = False

    @property
    def is_terminal(self) -> bool:
        """Whether somebody looks at it, and lines can be drawn anew."""
        with contextlib.suppress(ValueError, AttributeError):
            return self._stream is not None and self._stream.isatty()
        return False

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of a terminal."""
        with contextlib.suppress(OSError):
            columns, lines = os.get_terminal_size(
                -1 if self._descriptor is None else self._descriptor
            )
            if columns and lines:
                return columns, lines
        return 80, 24

    @property
    def waited(self) -> float:
        """Seconds for which it has taken nothing by now."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def write(self, text: str) -> None:
        """Write text, as far as it is taken."""
        data = text.encode(self._encoding, "replace")
        try:
            with self._lock:
                self._write(data)
        except BrokenPipeError as error:
            (self._on_gone or self._fail)(error.strerror or "Broken pipe")
        except (OSError, ValueError) as error:
            self._fail(getattr(error, "strerror", None) or str(error))

    def close(self) -> None:
        """Close the file that was given by its descriptor."""
        if self._stream is not None:
            return
        with self._lock:  # or a late line could go to a file that has got its number
            if self._descriptor is not None:
                with contextlib.suppress(OSError):  # of which writing has told
                    os.close(self._descriptor)
                self._descriptor = None

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_error(why)

    def _write(self, data: bytes) -> None:
        if self._stream is not None:
            if self._descriptor is None:
                self._stream.write(data.decode(self._encoding))
            self._stream.flush()
        elif self._descriptor is None:
            raise ValueError("it is closed")
        left = memoryview(data)
        # Not by the stream: it would keep what was not taken, and fail of it again at the exit.
        while self._descriptor is not None and left and self._is_ready(self._descriptor):
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._descriptor, left[:_PIECE]) :]

    def _is_ready(self, descriptor: int) -> bool:
        """Wait until something can be written; False if that takes too long."""
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0):
            return True
        if self._is_given_up:
            return False
        self._waits_since = began = time.monotonic()
        try:
            while not poll.poll(_LOOK):
                if self._is_ending() and time.monotonic() - began > _PATIENCE:
                    self._is_given_up = True
                    return False
            return True
        finally:
            self._waits_since = None


def _descriptor(stream: TextIO | None) -> int | None:
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None  # in memory


class Screen:
    """Writes to the launcher's streams, which may be one terminal."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        drawn = [sink for sink in sinks if sink.is_terminal and not dumb]
        self.terminal = drawn[0] if drawn else None
        self._rows: dict[Hashable, list[str]] = {}
        self._drawn = 0
        self._stale = False
        self._lock = threading.Lock()

    def draws(self, sink: Sink) -> bool:
        """Return whether rows can be drawn anew where a sink leads to."""
        return self.terminal is not None and sink.is_terminal

    def write(self, sink: Sink, text: str) -> None:
        """Write whole lines."""
        if not self.draws(sink):
            sink.write(text)
            return
        with self._lock:
            erased, drawn = self._erase(), self._draw()
            sink.write(erased + text + drawn)

    def show(self, key: Hashable, rows: list[str]) -> None:
        """Have rows drawn, in place of those of the same key, by the next `draw`."""
        with self._lock:
            if self._rows.get(key, []) != rows:
                self._rows[key] = rows
                self._stale = True

    def draw(self) -> None:
        """Draw what has changed."""
        with self._lock:
            if self._stale and self.terminal is not None:
                self.terminal.write(self._erase() + self._draw())

    def _erase(self) -> str:
        count, self._drawn = self._drawn, 0
        return "\r\x1b[2K" + _UP * (count - 1) if count else ""

    def _draw(self) -> str:
        self._stale = False
        if self.terminal is None:
            return ""
        columns, lines = self.terminal.size
        rows = [row for rows in self._rows.values() for row in rows][-(lines - 1) :]
        self._drawn = len(rows)
        return "\n".join(clipped(row, columns - 1) for row in rows)


def say(text: str) -> None:
    """Write a line of `dtk run`'s to standard error, where that takes it."""
    Sink(sys.stderr, "standard error", lambda why: None).write(f"dtk run: {text}\n")


def hold_standard_descriptors() -> None:
    """Keep the numbers 0, 1 and 2 from what is opened next, where the caller has closed them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
