"""What a rank tells `dtk run` of its steps and files, about once a second: see docs/seeing.md.

Times are of this process's monotonic clock; `dtk.launch.events` puts those of all ranks on one.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from dtk.cluster import progress, report_channel, usage

# In a rank: "summary", or "steps" where somebody asked for each of them.
VARIABLE = "DTK_EVENTS"
_PERIOD = 1.0
# Steps of a summary that tells of each: as text they fit into a message of less than PIPE_BUF.
_MOST = 160
_MOST_MESSAGES = 50


class Recorder:
    """Counts the steps of this process, and tells of them and of other events."""

    def __init__(self, tells_each: bool) -> None:
        self.tells_each = tells_each
        self.steps = 0
        self.is_paused = True  # the time until the next step belongs to none
        # What was counted before the first of these steps, by the recorder of whichever model.
        self.counted: list[float] = []
        self._begin = self._last = time.monotonic()
        self._renew()

    def _renew(self) -> None:
        self._first, self._since, self.seconds = self.steps, self._last, 0.0
        self._begins: list[float] = []
        self._ends: list[float] = []

    def begin(self) -> None:
        """Note that a step begins."""
        self._begin = time.monotonic()
        if self.is_paused:
            self.is_paused, self._since = False, self._begin

    def end(self, count: int = 1) -> bool:
        """Note that steps have ended; return whether it is time to tell of them."""
        self._last = last = time.monotonic()
        self.steps += count
        self.seconds += last - self._begin
        if self.tells_each and len(self._begins) < _MOST:
            self._begins.append(self._begin)
            self._ends.append(last)
        return last - self._since >= _PERIOD or len(self._begins) >= _MOST

    @property
    def untold(self) -> int:
        """How many steps are still to be told of."""
        return self.steps - self._first

    @property
    def begun(self) -> float | None:
        """The sum of the times, by the system's clock, at which these steps were called for."""
        if len(self._begins) != self.untold:
            return None
        return sum(self._begins) + self.untold * (time.time() - time.monotonic())

    def tell_steps(self, facts: Mapping[str, object]) -> bool:
        """Tell of the steps since the last time, and begin anew if that was taken."""
        where = {"since": self._since, "until": self._last}
        where |= {"first": self._first + 1, "last": self.steps}
        spans = zip(self._begins, self._ends, strict=True)
        each = {
            "begins": _milliseconds(begin - self._since for begin in self._begins),
            "took": _milliseconds(end - begin for begin, end in spans),
        }
        held = {"seconds": round(self.seconds, 6), "memory": usage.memory()}
        if taken := self.tell("steps", **where, **held, **each, **facts):
            self._renew()
        return taken

    def tell_messages(self, spans: Sequence[tuple[str, float, float]]) -> None:
        """Tell what the last step has sent: names, begins and ends by the system's clock."""
        zero = time.time() - time.monotonic() + self._begin
        last = sorted((span for span in spans if span[1] >= zero), key=lambda span: span[1])
        spans_of_step = [
            (name, round(1000 * (begin - zero), 2), round(1000 * (end - begin), 2))
            for name, begin, end in last[:_MOST_MESSAGES]
        ]
        if spans_of_step:
            self.tell("messages", step=self.steps, begin=self._begin, spans=spans_of_step)

    def tell(self, kind: str, **facts: object) -> bool:
        """Tell of an event; never waits for the launcher."""
        return report_channel.tell({"event": {"kind": kind, **facts}}, patience=0)


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [round(1000 * one, 1) for one in seconds]


@functools.cache
def recorder() -> Recorder | None:
    """Return this process's recorder; None where no launcher wants to know."""
    wanted = os.environ.get(VARIABLE, "")
    return Recorder(wanted == "steps") if wanted and progress.is_launched() else None
