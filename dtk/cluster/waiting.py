"""What starts waits for others for a bounded time, and says once for whom."""

from __future__ import annotations

import contextlib
import sys
import time

AFTER = 10.0  # seconds; processes of one job often start a few seconds apart


class Wait:
    """A wait for other processes, which begins now."""

    def __init__(self, who: str, limit: float) -> None:
        self._who = who
        self.limit = limit
        self._began = time.monotonic()
        self._told = False

    @property
    def left(self) -> float:
        """Seconds until the limit; 0 after it."""
        return max(0.0, self._began + self.limit - time.monotonic())

    @property
    def quiet(self) -> float:
        """Seconds until `say` writes, or until the limit where it has, or where that is earlier."""
        due = self._began + AFTER - time.monotonic()
        return self.left if self._told else max(0.0, min(due, self.left))

    def say(self, whom: str, bound: str = "") -> None:
        """Write to standard error, once, not in the first seconds: which rank is waited for."""
        if self._told or time.monotonic() < self._began + AFTER:
            return
        self._told = True
        bound = bound or f", for {self.left:.0f} s more (DTK_START_TIMEOUT sets the limit)"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            print(f"dtk: {self._who}: waiting for {whom}{bound}", file=sys.stderr, flush=True)
