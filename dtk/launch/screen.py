"""Where the launcher writes: whole lines, and below them those that are being written.

On a terminal the rows of the first process are drawn anew in place. No job fails of a stream that
is full or slow, or has no Unicode.

EPIPE              the reader has gone, as with `| head`: whoever asked is told
ENOSPC, EIO, ...   is told once, and writing goes on, as there may be room again
nobody reads       waits, as the ranks would; not while the job is being ended
no such character  is written as "?"
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TextIO

from dtk.cluster.report_channel import takes_more

_UP = "\x1b[1A\x1b[2K"
_PIECE = select.PIPE_BUF  # of which a pipe that is ready for writing takes one at once
_LOOK = 200  # milliseconds between two looks at a stream that takes nothing
_PATIENCE = 1.0  # seconds for it, once the job is being ended


_CONTROL = re.compile(r"\n|\r|\x08+|\x1b\[([0-9;?]*)([A-HJKSTfhlsu])")
_TORN = re.compile(r"\x1b(\[[0-9;?]*)?$")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST = 1 << 20  # characters after which a line is broken
_MOST = 40  # rows that can be written anew
_SETTLES = 3.0  # seconds after which rows that the cursor has left are over


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
        self._stream, self._descriptor = stream, _descriptor(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
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
        if takes_more(descriptor):
            return True
        if self._is_given_up:
            return False
        self._waits_since = began = time.monotonic()
        try:
            while not takes_more(descriptor, _LOOK):
                if self._is_ending() and time.monotonic() - began > _PATIENCE:
                    self._is_given_up = True
                    return False
            return True
        finally:
            self._waits_since = None


def _descriptor(stream: TextIO | None) -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # in memory, or closed
        return stream.fileno()  # type: ignore[union-attr]
    return None


class Screen:
    """Writes to the launcher's streams, which may be one terminal."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        dumb = os.environ.get("TERM", "dumb") in ("dumb", "unknown")
        drawn = (sink for sink in sinks if sink.is_terminal and not dumb)
        self.terminal = next(drawn, None)
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


# What a terminal would show of what a process writes. Progress bars write their line again and
# again: after a carriage return, backspaces, or, where there are several, moving the cursor up.


class ShownText:
    """The finished lines of a stream, and the rows that its process may still rewrite.

    >>> text = ShownText()
    >>> text.feed(b"Epoch 1\\n 10%\\r 90%", now=0.0), text.rows
    (['Epoch 1'], [' 90%'])
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._torn = ""
        self._rows, self._at = [""], 0
        self._over: list[str] = []
        self._returned = False  # to the row's beginning
        self._back = 0
        self._moves_up: float | None = None  # when the cursor did last
        self._top: int | None = None  # the row that it moved up to
        self._past: collections.deque[str] = collections.deque(maxlen=_MOST)
        # Whether a row has been written more than once.
        self.is_redrawn = False

    @property
    def rows(self) -> list[str]:
        """The rows that may yet change."""
        rows = [row.rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def feed(self, data: bytes, now: float, final: bool = False) -> list[str]:
        """Take what was written, and return the lines that are over."""
        text = self._torn + self._decoder.decode(data, final)
        torn = None if final else _TORN.search(text)
        self._torn = text[torn.start() :] if torn else ""
        text = text[: torn.start()] if torn else text
        end = 0
        for control in _CONTROL.finditer(text):
            self._put(text[end : control.start()])
            self._control(control, now)
            end = control.end()
        self._put(text[end:])
        if final:
            self._over += self.rows
            self._rows, self._at = [""], 0
        return self._taken()

    def settle(self, now: float) -> list[str]:
        """Return the rows that the cursor has left for long."""
        if self._moves_up is not None and now - self._moves_up > _SETTLES:
            self._leave(self._at)
            if self._at == len(self._rows) - 1:
                self._moves_up = None
        return self._taken()

    def _taken(self) -> list[str]:
        over, self._over = self._over, []
        return over

    def _put(self, text: str) -> None:
        if not text:
            return
        if self._top is not None:  # what is above the first row of a picture stays
            self._leave(self._top)
            self._top = None
        before = self._rows[self._at]
        if self._returned:
            self.is_redrawn |= bool(before)
            before = ""
        elif self._back:
            self.is_redrawn = True
            before = before[: -self._back]
        self._returned, self._back = False, 0
        self._rows[self._at] = before + text
        if len(before) + len(text) > _LONGEST:
            self._end_row()

    def _control(self, control: re.Match[str], now: float) -> None:
        kind = control[2] or control[0][0]
        if kind == "\n":
            self._end_row()
        elif kind in "\rG":
            self._returned, self._back = True, 0
        elif kind == "\b":
            self._back = len(control[0])
        elif kind == "A":
            self._move_up(_number(control[1], 1))
            self._moves_up, self._top = now, self._at
        elif kind == "l" and control[1] == "?25":  # a hidden cursor is about to move up
            self._moves_up = now
        elif kind == "B":
            self._at = min(len(self._rows) - 1, self._at + _number(control[1], 1))
        elif kind == "K" and (self._returned or control[1] in ("1", "2")):
            self._rows[self._at] = ""
        elif kind == "J" and control[1] in ("", "0"):
            del self._rows[self._at + 1 :]

    def _end_row(self) -> None:
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append("")
        self._returned, self._back = True, 0
        if self._moves_up is None or self._at > _MOST:
            self._leave(self._at)

    def _move_up(self, count: int) -> None:
        """Move the cursor; finished rows that it reaches may change again."""
        for _ in range(min(count - self._at, len(self._past))):
            self._rows.insert(0, self._past.pop())
            self._at += 1
            if self._over and self._over[-1] is self._rows[0]:  # nobody has seen it end
                self._over.pop()
        self._at = max(0, self._at - count)

    def _leave(self, count: int) -> None:
        """Finish the first rows."""
        if count:
            self.is_redrawn = self._moves_up is not None
        self._over += self._rows[:count]
        self._past.extend(self._rows[:count])
        self._rows, self._at = self._rows[count:], self._at - count


class Pace:
    """Says which rows are due in a file: those that have changed, every few seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._told: list[str] = []

    def due(self, text: ShownText, now: float) -> list[str]:
        """Return the rows to write now."""
        if not (text.rows and text.is_redrawn):
            self._since, self._told = None, []
            return []
        if self._since is None:
            self._since = now
        if now - self._since < self._seconds:
            return []
        rows = [row for row in text.rows if row and row not in self._told]
        self._since, self._told = now, text.rows
        return rows


def _number(text: str, default: int) -> int:
    return int(text) if text.isdigit() else default


def clipped(text: str, width: int) -> str:
    """Return the beginning of a line that a terminal shows in one row.

    >>> clipped("abcdef", 4), clipped("\\x1b[1mabcdef", 2)
    ('abcd', '\\x1b[1mab\\x1b[0m')
    """
    if len(text) <= width and text.isascii() and "\x1b" not in text:
        return text
    row, used = "", 0
    for piece in re.findall(rf"(?s){_STYLE.pattern}|.", text):
        is_style = len(piece) > 1
        used += 0 if is_style else _width(piece)
        if is_style or used <= width:
            row += piece
    is_styled = "\x1b" in row and not row.endswith("\x1b[0m")
    return row + "\x1b[0m" if is_styled else row


def _width(character: str) -> int:
    import unicodedata  # here, since most launchers show no bar

    if unicodedata.combining(character) or not character.isprintable():
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
