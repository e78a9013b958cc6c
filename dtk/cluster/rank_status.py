"""What is known of one rank: what it reports, and what is seen of its process from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypedDict

from dtk.cluster.usage import STOPPED, Usage

# A rank that only waits uses less than this part of a core, and so many bytes a second:
# it reports, and its libraries look for messages.
_IDLE_CORE = 0.04
_IDLE_BYTES = 20_000
_LOOK = 0.5  # seconds between two looks from outside: the system counts hundredths of a second


class RankReport(TypedDict):
    """What a rank says of itself."""

    count: int  # how often it has gone inside
    inside: bool
    alone: bool  # whether it is where others are inside, and does what needs none of them
    joining: bool  # whether it waits for the others to start, and may be unable to report
    loops: int  # how often it has come to the end of its data
    refused: bool  # whether it has taken part in a collective in which others have not
    feeds: bool  # whether TensorFlow waits for Python of this rank's, as for a generator
    what: str  # where it is, or was last
    still: float  # seconds since that changed
    cpu: float  # seconds that its process has used, without threads that poll
    io: int  # bytes that it has read from storage and written there
    # its main thread's, where it has been at one place for long, and that of the thread it waits
    # for; "" else, and of a task that serves, which runs nothing of the script's
    stack: str
    # of a chief: for how many seconds each worker has had its work, by the worker's number
    held: dict[str, float]


def report_of(message: Mapping[str, object]) -> RankReport:
    """Return a message as a report, of the types that it must have."""
    held = message["held"]
    return {
        "count": int(str(message["count"])),
        "inside": bool(message["inside"]),
        "alone": bool(message["alone"]),
        "joining": bool(message["joining"]),
        "loops": int(str(message["loops"])),
        "refused": bool(message["refused"]),
        "feeds": bool(message["feeds"]),
        "what": str(message["what"]),
        "still": float(str(message["still"])),
        "cpu": float(str(message["cpu"])),
        "io": int(str(message["io"])),
        "stack": str(message["stack"]),
        "held": {str(int(worker)): float(age) for worker, age in held.items()},  # type: ignore[attr-defined]
    }


@dataclasses.dataclass
class RankStatus:
    """What is known of one rank; all times are in seconds."""

    name: str = ""
    host: str = ""
    role: str = "worker"
    heard: float | None = None  # when it last reported; None before its first report
    # when it last went inside or came out; when it was started, before its first report
    moved: float = 0.0
    busy: float = 0.0  # when it was last seen computing, reading or writing, by its reports
    last: RankReport | None = None
    # the report since which its work is measured, and when that came
    measured: tuple[RankReport, float] | None = None
    started: bool = False  # whether somebody has seen it start, and so waits for its first report
    # when its main thread was last busy, as seen from outside; None where nobody looks
    ran: float | None = None
    # when any of its threads was, as seen from outside: in a stopped process none runs
    used: float | None = None
    seen: tuple[Usage, float] | None = None  # what was seen last from outside
    left: bool = False  # whether its script is over
    stack: str = ""  # its stack, where the report has none

    @property
    def worked(self) -> bool:
        """Whether it has done anything together with other ranks, or an evaluation."""
        return self.last is not None and self.last["count"] > 0

    @property
    def waits(self) -> bool:
        """Whether it waits for others, or computes with them."""
        last = self.last
        return last is not None and not self.left and (last["inside"] or last["joining"])

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal when it was last seen from outside."""
        return self.seen is not None and self.seen[0].state in STOPPED

    @property
    def has_stack(self) -> bool:
        """Whether it has said where it is, and is there still."""
        return self.last is not None and bool(self.last["stack"]) and not self.is_stopped

    @property
    def calls(self) -> str:
        """Its stack, the innermost call first; "" where it is not known."""
        return self.stack or ("" if self.last is None or self.left else self.last["stack"])

    @property
    def where(self) -> str:
        """Where in its script it is, for a sentence."""
        if self.last is None:
            return "before it made a strategy"
        is_there = self.last["inside"] or self.last["joining"] or self.last["alone"]
        return f"{'in' if is_there and not self.left else 'after'} {self.last['what']}"

    def take(self, report: RankReport, now: float) -> None:
        """Take note of a report."""
        last, when = self.measured or (self.last or report, self.heard or now)
        # Reports that are read late come together: what is between them took longer.
        if now - when >= _LOOK:
            if _works(report["cpu"] - last["cpu"], report["io"] - last["io"], now - when):
                self.busy = now
            last, when = report, now
        self.measured = last, when
        self.moved = now - report["still"]
        self.heard, self.last = now, report

    def observe(self, usage: Usage | None, now: float) -> None:
        """Take note of what is seen of its process from outside."""
        if usage is None:
            return
        if self.seen is None:
            self.ran = self.used = now
        else:
            before, when = self.seen
            if (seconds := now - when) < _LOOK:
                return
            if _works(usage.cpu - before.cpu, usage.io - before.io, seconds):
                self.ran = self.used = now
            if _works(usage.total - before.total, 0, seconds):
                self.used = now
        self.seen = (usage, now)

    def is_silent(self, since: float) -> bool:
        """Return whether it reported nothing and none of its threads was seen to run."""
        if self.last is None or self.heard is None or self.left or self.heard >= since:
            return False
        if self.last["joining"] and not self.is_stopped:
            return False
        return self.is_unused(since)

    def is_unused(self, since: float) -> bool:
        """Return whether no thread of it was seen to run, as of a process that is stopped."""
        return self.used is None or self.used < since

    def is_idle(self, since: float) -> bool:
        """Return whether it has neither computed, nor read nor written."""
        if self.last is None:
            return self.started and self.moved < since and (self.ran is None or self.ran < since)
        return self.left or self.busy < since

    def delay(self, seconds: float) -> None:
        """Move all times later, as the launcher itself was stopped meanwhile."""
        for name in ("moved", "busy", "heard", "ran", "used"):
            if (time := getattr(self, name)) is not None:
                setattr(self, name, time + seconds)


def _works(cpu: float, io: float, seconds: float) -> bool:
    return cpu / seconds > _IDLE_CORE or io / seconds > _IDLE_BYTES
