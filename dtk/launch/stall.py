"""Telling a job that is stuck from one that is slow, by what its ranks report of themselves.

    silent      a rank has reported nothing for the timeout: stopped, swapped out, cut off
    missing     others are inside and wait; a rank is outside, and neither computes nor reads
    different   all are inside, but not in the same: one has left its loop early
    nobody      all are inside the same, and none computes

It is none while any rank moves, while the one that others wait for uses its processor or reads and
writes (a slow callback, a long trace, a slow save), while all compute, and while nobody is inside:
then nobody waits for anybody. See `dtk.cluster.progress`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from dtk.cluster.progress import Report

# Less than this part of a core, and so many bytes a second, is what a rank uses that only waits:
# it reports, and its libraries look for messages.
_IDLE_CORE = 0.04
_IDLE_BYTES = 20_000


@dataclasses.dataclass
class Standing:
    """What is known of one rank.

    Attributes:
        heard: When it last reported; None before its first report. In seconds, as all times.
        moved: When it last went inside or came out.
        busy: When it was last seen computing, reading or writing.
        last: Its last report.
    """

    heard: float | None = None
    moved: float = 0.0
    busy: float = 0.0
    last: Report | None = None

    @property
    def worked(self) -> bool:
        """Whether it has done anything together with other ranks."""
        return self.last is not None and self.last["count"] > 0

    def take(self, report: Report, now: float) -> None:
        """Take note of a report.

        Args:
            report: What the rank says.
            now: When.
        """
        if self.last is not None and self.heard is not None:
            seconds = max(now - self.heard, 1e-3)
            used = (report["cpu"] - self.last["cpu"]) / seconds
            moved = (report["io"] - self.last["io"]) / seconds
            if used > _IDLE_CORE or moved > _IDLE_BYTES:
                self.busy = now
        self.moved = now - report["still"]
        self.heard, self.last = now, report


class Stall(NamedTuple):
    """Why a job is stuck.

    Attributes:
        missing: Indices of the ranks that the others wait for; empty where none can be told.
        why: For a sentence that begins with the missing ones, or a sentence.
        waiting: Indices of the others.
    """

    missing: tuple[int, ...]
    why: str
    waiting: tuple[int, ...]


def find(standings: Sequence[Standing], now: float, timeout: float) -> Stall | None:
    """Return why a job is stuck; None while it is not, or not for long enough.

    Args:
        standings: Of every rank.
        now: The time.
        timeout: Seconds that nothing may happen.

    Example:
        >>> find([Standing()], now=1000.0, timeout=300.0) is None
        True
    """
    reports = [standing.last for standing in standings]
    if any(report is None for report in reports):
        return None  # not all have made a strategy
    told = [report for report in reports if report is not None]
    since = now - timeout
    everyone = range(len(standings))
    silent = tuple(i for i in everyone if (standings[i].heard or 0.0) < since)
    if silent:
        others = tuple(i for i in everyone if i not in silent)
        return Stall(silent, f"reported nothing for {timeout:g} s, last", others)
    if any(standing.moved > since for standing in standings):
        return None
    inside = [i for i in everyone if told[i]["inside"]]
    if not inside:
        return None
    outside = [i for i in everyone if i not in inside]
    if outside:
        idle = tuple(i for i in outside if standings[i].busy < since)
        return Stall(idle, f"did nothing for {timeout:g} s", tuple(inside)) if idle else None
    if any(standing.busy >= since for standing in standings):
        return None
    if len({(one["count"], one["what"]) for one in told}) > 1:
        why = "Ranks wait for each other in different places, as where the data of one ends earlier"
        return Stall((), why, tuple(everyone))
    return Stall((), f"No rank did anything for {timeout:g} s", tuple(everyone))
