"""Where the launcher writes: whole lines, and below them the row that is being written.

On a terminal that row, of the first process, is drawn anew in place. No job fails of a stream that
is full or slow, or has no Unicode.

EPIPE              the reader has gone, as with `| head`: whoever asked is told
ENOSPC, EIO, ...   is told once, and writing goes on, as there may be room again
nobody reads       waits, as the ranks would; not while the job is being ended
no such character  is written as "?"
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from dtk.cluster.report_channel import takes_more

_PIECE = select.PIPE_BUF  # of which a pipe that is ready for writing takes one at once
_LOOK = 200  # milliseconds between two looks at a stream that takes nothing
_PATIENCE = 1.0  # seconds for it, once the job is being ended
_ERASED = "\r\x1b[2K"
_DRAWN = "\x1b[?7l{}\x1b[m\x1b[?7h"  # cut off at the terminal's edge, and not wrapped
_LONGEST = 1 << 20  # characters after which a line is broken
# Progress bars write their row again and again, after a carriage return or backspaces.
_PAST = re.compile(r"(?s).*\r(?=[^\r\b])")
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhlsu]")


class Sink:
    """A stream, or a file, of the launcher's own."""

    def __init__(
        self,
        stream: TextIO | None,
        name: str,
        on_error: Callable[[str], None],
        on_gone: Callable[[str], None] | None = None,
        is_ending: Callable[[], bool] = bool,
    ) -> None:
        self.name = name
        # Whether somebody looks at it, and lines can be drawn anew.
        self.is_terminal = False
        with contextlib.suppress(ValueError, AttributeError):  # closed, or no more than a `write`
            self.is_terminal = stream is not None and stream.isatty()
        self._stream, self._descriptor = stream, _descriptor(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._on_error, self._on_gone = on_error, on_gone
        self._is_ending = is_ending
        self._failed = False
        self._lock = threading.Lock()
        self._waits_since: float | None = None
        self._is_given_up = False

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
        """Close the file."""
        with self._lock:  # or a late line could go to a file that has got its number
            if self._stream is not None:
                with contextlib.suppress(OSError):  # of which writing has told
                    self._stream.close()
            self._stream = self._descriptor = None

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._on_error(why)

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            raise ValueError("it is closed")
        if self._descriptor is None:
            self._stream.write(data.decode(self._encoding))
        self._stream.flush()
        left = memoryview(data)
        # Not by the stream: it would keep what was not taken, and fail of it again at the exit.
        while self._descriptor is not None and left and self._is_ready(self._descriptor):
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(self._descriptor, left[:_PIECE]) :]

    def _is_ready(self, descriptor: int) -> bool:
        """Wait until something can be written; False if that takes too long."""
        self._waits_since = began = time.monotonic()
        try:
            while not takes_more(descriptor, 0 if self._is_given_up else _LOOK):
                waited = time.monotonic() - began
                if self._is_given_up or (self._is_ending() and waited > _PATIENCE):
                    self._is_given_up = True
                    return False
            return True
        finally:
            self._waits_since = None


def _descriptor(stream: TextIO | None) -> int | None:
    # A notebook's stream has a descriptor, too, but what is written there appears late.
    if isinstance(stream, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):  # in memory, or closed
            return stream.fileno()
    return None


class Screen:
    """Writes to the launcher's streams, which may be one terminal."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        self._terminal = next((one for one in sinks if one.is_terminal and not dumb), None)
        self._row = ""
        self._lock = threading.Lock()

    def draws(self, sink: Sink) -> bool:
        """Return whether a row can be drawn anew where a sink leads to."""
        return self._terminal is not None and sink.is_terminal

    def write(self, sink: Sink, text: str) -> None:
        """Write whole lines."""
        with self._lock if self.draws(sink) else contextlib.nullcontext():
            row = self._row if self.draws(sink) else ""
            sink.write(f"{_ERASED}{text}{_DRAWN.format(row)}" if row else text)

    def show(self, row: str) -> None:
        """Draw a row below all lines, in place of the one before."""
        if self._terminal is not None:
            with self._lock:
                self._row = row
                self._terminal.write(_ERASED + (_DRAWN.format(row) if row else ""))


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


class WrittenText:
    """What a process writes, as a terminal would show it: finished lines, and the row below them.

    >>> text = WrittenText()
    >>> text.feed(b"Epoch 1\\n 10%\\r 90%"), text.row
    (['Epoch 1'], ' 90%')
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = ""
        # Whether the row has been written more than once.
        self.is_redrawn = False

    @property
    def row(self) -> str:
        """The row that may yet change."""
        return _shown(self._open).rstrip()

    def feed(self, data: bytes, final: bool = False) -> list[str]:
        """Take what was written, and return the lines that are over."""
        *lines, row = (self._open + self._decoder.decode(data, final)).split("\n")
        if len(row) > _LONGEST or (final and _shown(row).strip()):
            lines.append(row)
            row = ""
        self._open = "" if final else _rewritten(row)
        is_over_another = self._open != row.lstrip("\r\b")
        self.is_redrawn = is_over_another or (self.is_redrawn and not lines)
        return [_shown(line) for line in lines]


def _rewritten(row: str) -> str:
    """Return a row without what it has written over; what ends it has written over nothing yet."""
    past = _PAST.match(row)
    text, *rest = re.split("(\b+)", row[past.end() :] if past else row)
    for back, more in zip(rest[::2], rest[1::2], strict=True):
        text = text[: -len(back)] + more if more else text + back
    return text


def _shown(line: str) -> str:
    return _MOVES.sub("", _rewritten(line)).rstrip("\r\b")
