"""The launcher's output and errors: whole lines, and below them those that are being written.

On a terminal the rows of the first process are drawn anew in place. Elsewhere they are a line every
few seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence

from dtk.launch.shown_text import clipped
from dtk.launch.sink import Sink

_UP = "\x1b[1A\x1b[2K"


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
