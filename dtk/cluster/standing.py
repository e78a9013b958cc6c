"""What is known of one rank: what it reports, and what is seen of its process from outside."""

from __future__ import annotations

import dataclasses

from dtk.cluster.reports import RankReport
from dtk.cluster.usage import STOPPED, Usage

# A rank that only waits uses less than this part of a core, and so many bytes a second:
# it reports, and its libraries look for messages.
_IDLE_CORE = 0.04
_IDLE_BYTES = 20_000
_LOOK = 0.5  # seconds between two looks from outside: the system counts hundredths of a second


@dataclasses.dataclass
class Standing:
    """What is known of one rank."""

    # when it last reported; None before its first report. In seconds, as all times
    heard: float | None = None
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
        told = "" if self.last is None or self.left else self.last["stack"]
        return self.stack or told

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
            if now - when < _LOOK:
                return
            seconds = now - when
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
        self.moved += seconds
        self.busy += seconds
        if self.heard is not None:
            self.heard += seconds
        if self.ran is not None:
            self.ran += seconds
        if self.used is not None:
            self.used += seconds


def _works(cpu: float, io: float, seconds: float) -> bool:
    return cpu / seconds > _IDLE_CORE or io / seconds > _IDLE_BYTES
