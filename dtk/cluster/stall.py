"""Telling a job that is stuck from one that is slow, by what its ranks report of themselves.

    silent      a rank has reported nothing for the timeout: stopped, swapped out, cut off
    missing     others are inside and wait; a rank is outside, and neither computes nor reads
    different   all are inside, but not in the same: one has left its loop early
    nobody      all are inside the same, and none computes

It is none while any rank moves, while the one that others wait for uses its processor or reads and
writes (a slow callback, a long trace, a slow save), while all compute, and while nobody is inside:
then nobody waits for anybody. See `dtk.cluster.progress`.

With parameter servers, workers and the evaluator can be replaced, and the job goes on:

    silent      a task has reported nothing for the timeout; a server or the chief ends the job
    stuck       a worker has had its work for that long, or an evaluator its evaluation, and neither
                computes nor reads
    missing     the chief neither computes, nor reads, nor waits for workers, and no worker has work
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtk.cluster.progress import Report

STUCK = 124  # exit code of a job that has stopped moving, as of timeout(1)
# Less than this part of a core, and so many bytes a second, is what a rank uses that only waits:
# it reports, and its libraries look for messages.
_IDLE_CORE = 0.04
_IDLE_BYTES = 20_000
# Ranks report this often, or four times in the timeout: of two that seem to have stopped together,
# the silent one shall be noticed first.
_LATEST_REPORT = 5.0
# Seconds that a chief may be silent for longer, while TensorFlow waits for a worker to come back.
_REPLACING = 15.0
# What can be replaced: see `dtk.launch.restarts`.
_REPLACEABLE = ("worker", "evaluator")


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
        """Whether it has done anything together with other ranks, or an evaluation."""
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

    def delay(self, seconds: float) -> None:
        """Let everything have happened later: the launcher itself was stopped meanwhile.

        Args:
            seconds: How much later.
        """
        self.moved += seconds
        self.busy += seconds
        if self.heard is not None:
            self.heard += seconds


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


def describe(
    stall: Stall, names: Sequence[str], hosts: Sequence[str], standings: Sequence[Standing]
) -> str:
    """Return what was seen of a job that has stopped moving: who is missing, where, who waits.

    Args:
        stall: Why it was ended.
        names: Of all its processes.
        hosts: Where they run.
        standings: What is known of them.

    Returns:
        Whole lines, the first of them empty.
    """
    lines = ["", "dtk: the job has stopped moving, and was ended."]
    if not stall.missing:
        lines[1] += f" {stall.why}."
    for index in stall.missing:
        last = standings[index].last
        lines.append(f"{names[index]}, host {hosts[index]}, {stall.why} {_where(last)}.")
        if last is not None and last["stack"]:
            lines += ["Its stack, the innermost call first:", *last["stack"].splitlines()]
    lines += [f"{names[index]} waits {_where(standings[index].last)}." for index in stall.waiting]
    return "\n".join([*lines, ""])


def _where(last: Report | None) -> str:
    if last is None:
        return "before it made a strategy"
    return f"{'in' if last['inside'] else 'after'} {last['what']}"


def find_replaceable(
    standings: Sequence[Standing], roles: Sequence[str], now: float, timeout: float
) -> dict[int, str]:
    """Return the workers of a job with servers, and the evaluator, that are stuck.

    Args:
        standings: Of every task.
        roles: Their roles.
        now: The time.
        timeout: Seconds that nothing may happen.

    Returns:
        Why, for a sentence, by the task's index.

    Example:
        >>> find_replaceable([Standing(), Standing()], ["chief", "worker"], 1000.0, 300.0)
        {}
    """
    if _silent(standings, ("ps",), roles, now - timeout):
        return {}  # for which a worker may wait
    since = now - timeout - min(_LATEST_REPORT, timeout / 4)
    silent = _silent(standings, _REPLACEABLE, roles, now - timeout)
    found = dict.fromkeys(silent, f"has reported nothing for {timeout:g} s")
    held = _held(standings, roles)
    workers = [index for index, role in enumerate(roles) if role == "worker"]
    for index, role in enumerate(roles):
        standing = standings[index]
        if index in found or standing.last is None or standing.busy >= since:
            continue
        began = held.get(workers.index(index)) if role == "worker" else None
        if began is not None and began < since:
            found[index] = f"has done nothing for {timeout:g} s, though it had work"
        evaluates = role == "evaluator" and standing.last["inside"]
        if evaluates and standing.moved < since:
            found[index] = f"has done nothing for {timeout:g} s in {standing.last['what']}"
    return found


def find_served(
    standings: Sequence[Standing], roles: Sequence[str], now: float, timeout: float
) -> Stall | None:
    """Return why a job with parameter servers is stuck; None while it is not, or not for long.

    Args:
        standings: Of every task.
        roles: Their roles.
        now: The time.
        timeout: Seconds that nothing may happen.

    Example:
        >>> find_served([Standing(), Standing()], ["chief", "ps"], 1000.0, 300.0) is None
        True
    """
    chief = roles.index("chief")
    its = standings[chief]
    margin = min(_LATEST_REPORT, timeout / 4)
    why = f"reported nothing for {timeout:g} s, last"
    if silent := _silent(standings, ("ps",), roles, now - timeout):
        return Stall(silent, why, () if its.last is None else (chief,))
    # TensorFlow may keep Python's lock while it asks another task for something, so a chief that
    # reports nothing may wait itself: for a worker that is replaced before.
    if silent := _silent(standings, ("chief",), roles, now - timeout - _REPLACING):
        return Stall(silent, why, ())
    since = now - timeout - margin
    if its.last is None or its.last["inside"] or _held(standings, roles):
        return None
    heard = its.heard is not None and its.heard >= now - 2 * margin
    if heard and its.moved < since and its.busy < since:
        return Stall((chief,), f"did nothing for {timeout:g} s", ())
    return None


def _silent(
    standings: Sequence[Standing], wanted: Sequence[str], roles: Sequence[str], since: float
) -> tuple[int, ...]:
    """Return those of the wanted roles that have reported once, and not any more."""
    return tuple(
        index
        for index, standing in enumerate(standings)
        if roles[index] in wanted and standing.heard is not None and standing.heard < since
    )


def _held(standings: Sequence[Standing], roles: Sequence[str]) -> Mapping[int, float]:
    """Return since when workers have had their work, by worker, as the chief last said."""
    chief = standings[roles.index("chief")]
    if chief.last is None or chief.heard is None:
        return {}
    return {int(worker): chief.heard - age for worker, age in chief.last["held"].items()}
