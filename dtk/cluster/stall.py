"""Telling a job that is stuck from one that is slow, by what is known of its ranks.

A job is not stuck while any rank moves, while the one that others wait for uses its processor or
reads and writes (a slow callback, a long trace, a slow save), while all compute, and while nobody
is inside: then nobody waits for anybody. See `dtk.cluster.progress`. Otherwise it is:

    silent      a rank has reported nothing for the timeout: stopped, swapped out, cut off
    missing     others are inside and wait; a rank is outside, and neither computes nor reads
    ended       the same for at most a minute, and the rank's script is over
    endless     others are inside, idle, and a rank has computed for twelve timeouts
    feeding     all are inside, and one has Python of its own to wait for, such as a generator
    short       all are inside, and the data of one has come to its end once more than others'; for
                seconds only, and even where one computes, if others have a batch that this one has
                never had
    different   all are inside, but not in the same
    nobody      all are inside the same, and none computes
    cut off     a rank is silent for less than that, and another has ended since it has lost one

A rank that joins the others at the start is inside, and may be silent. One that has not imported
dtk yet is outside, and seen from outside: see `dtk.cluster.usage`.

With parameter servers, workers and the evaluator can be replaced, and the job goes on:

    silent      a task has reported nothing for the timeout; a server or the chief ends the job
    stuck       a worker has had its work for that long, or an evaluator its evaluation, and neither
                computes nor reads
    missing     the chief neither computes, nor reads, nor waits for workers, and no worker has work
    starting    the chief waits for all to start, and one of them neither computes nor reads; or all
                wait for the chief
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dtk.cluster.usage import STOPPED, Usage

# Timeouts for which a rank may compute while others wait for it: an endless loop computes, too.
ALONE = 12
ADVICE = (
    "every rank must run to the end of the script. Look for a call that only the others make, such "
    "as evaluate on rank 0 alone, for sys.exit, os._exit, or data that ends earlier on one rank."
)
STUCK = 124  # exit code of a job that has stopped moving, as of timeout(1)
_LEFT = 60.0  # seconds that ranks wait, idle, for one whose script is over: it never comes
_ENDED = 5.0  # and for one that has no batch of their step, as they have one
# Ranks report this often, or four times in the timeout: of two that seem to have stopped together,
# the silent one shall be noticed first.
_LATEST_REPORT = 5.0
_SHORT = "has come to the end of its data before the others"
_SAME_DATA = (
    "Give every rank the same global data, of as many batches: look at what this rank's dataset, "
    "generator or files have less. For a part per rank there is dtk.data.shard. If a callback has "
    "set model.stop_evaluating or stop_predicting, set it on every rank, after the same batch."
)
# Seconds that a chief may be silent for longer, while TensorFlow waits for a worker to come back.
_REPLACING = 15.0
# A rank that only waits uses less than this part of a core, and so many bytes a second:
# it reports, and its libraries look for messages.
_IDLE_CORE = 0.04
_IDLE_BYTES = 20_000
_LOOK = 0.5  # seconds between two looks from outside: the system counts hundredths of a second


@dataclasses.dataclass(frozen=True)
class RankReport:
    """What a rank says of itself."""

    count: int = 0  # how often it has gone inside
    inside: bool = False
    alone: bool = False  # whether it is where others are inside, and does what needs none of them
    joining: bool = False  # whether it waits for the others to start, and may be unable to report
    loops: int = 0  # how often it has come to the end of its data
    batches: int = 0  # how many batches its steps have had
    refused: bool = False  # whether it has taken part in a collective in which others have not
    feeds: bool = False  # whether TensorFlow waits for Python of this rank's, as for a generator
    what: str = "the start"  # where it is, or was last
    still: float = 0.0  # seconds since that changed
    cpu: float = 0.0  # seconds that its process has used, without threads that poll
    io: int = 0  # bytes that it has read from storage and written there
    # its main thread's, where it has been at one place for long, and that of the thread it waits
    # for; "" else, and of a task that serves, which runs nothing of the script's
    stack: str = ""
    # of a chief: for how many seconds each worker has had its work, by the worker's number
    held: Mapping[str, float] = dataclasses.field(default_factory=dict)


_NOTHING = RankReport()


@dataclasses.dataclass
class RankStatus:
    """What is known of one rank, by itself and from outside; all times are in seconds."""

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
    # when its main thread was last busy, as seen from outside; where nobody looks, never
    ran: float = -math.inf
    # when any of its threads was, as seen from outside: in a stopped process none runs
    used: float = -math.inf
    seen: tuple[Usage, float] | None = None  # what was seen last from outside
    left: bool = False  # whether its script is over
    stack: str = ""  # its stack, where the report has none

    @property
    def said(self) -> RankReport:
        """Its last report; before its first, one of a rank that has done nothing."""
        return self.last or _NOTHING

    @property
    def worked(self) -> bool:
        """Whether it has done anything together with other ranks, or an evaluation."""
        return self.said.count > 0

    @property
    def waits(self) -> bool:
        """Whether it waits for others, or computes with them."""
        return not self.left and (self.said.inside or self.said.joining)

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal when it was last seen from outside."""
        return self.seen is not None and self.seen[0].state in STOPPED

    @property
    def has_stack(self) -> bool:
        """Whether it has said where it is, and is there still."""
        return bool(self.said.stack) and not self.is_stopped

    @property
    def calls(self) -> str:
        """Its stack, the innermost call first; "" where it is not known."""
        return self.stack or ("" if self.left else self.said.stack)

    @property
    def where(self) -> str:
        """Where in its script it is, for a sentence."""
        if self.last is None:
            return "before it made a strategy"
        is_there = self.last.inside or self.last.joining or self.last.alone
        return f"{'in' if is_there and not self.left else 'after'} {self.last.what}"

    def take(self, report: RankReport, now: float) -> None:
        """Take note of a report."""
        if self.heard is None:  # its imports were work, too
            self.busy = now
        last, when = self.measured or (report, now)
        # Reports that are read late come together: what is between them took longer.
        if now - when >= _LOOK:
            if is_at_work(report.cpu - last.cpu, report.io - last.io, now - when):
                self.busy = now
            last, when = report, now
        self.measured = last, when
        self.moved = now - report.still
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
            if is_at_work(usage.cpu - before.cpu, usage.io - before.io, seconds):
                self.ran = self.used = now
            if is_at_work(usage.total - before.total, 0, seconds):
                self.used = now
        self.seen = (usage, now)

    def is_silent(self, since: float) -> bool:
        """Return whether it reported nothing and none of its threads was seen to run."""
        if self.heard is None or self.left or (self.said.joining and not self.is_stopped):
            return False
        return self.heard < since and self.used < since

    def is_idle(self, since: float) -> bool:
        """Return whether it has neither computed, nor read nor written."""
        if self.last is None:
            return self.started and self.moved < since and self.ran < since
        return self.left or self.busy < since

    def delay(self, seconds: float) -> None:
        """Move all times later, as the launcher itself was stopped meanwhile."""
        for name in ("moved", "busy", "heard", "ran", "used"):
            if (time := getattr(self, name)) is not None:
                setattr(self, name, time + seconds)


def is_at_work(cpu: float, io: float, seconds: float) -> bool:
    """Return whether seconds of CPU and bytes, in so many seconds, are more than a wait takes."""
    return cpu / seconds > _IDLE_CORE or io / seconds > _IDLE_BYTES


class Stall(NamedTuple):
    """Why a job is stuck."""

    # indices of the ranks that the others wait for; empty where none can be told
    missing: tuple[int, ...]
    why: str  # for a sentence that begins with the missing ones, or a sentence
    waiting: tuple[int, ...] = ()  # indices of the others


def _indices(ranks: Sequence[RankStatus], are: Callable[[RankStatus], bool]) -> tuple[int, ...]:
    return tuple(index for index, rank in enumerate(ranks) if are(rank))


def _others(ranks: Sequence[RankStatus], than: Sequence[int]) -> tuple[int, ...]:
    return tuple(index for index in range(len(ranks)) if index not in than)


def find(ranks: Sequence[RankStatus], now: float, timeout: float) -> Stall | None:
    """Return why a job is stuck; None while it is not, or not for long enough."""
    if any(rank.last is None and not rank.started for rank in ranks):
        return None  # nobody knows whether they are there
    since = now - timeout
    if silent := _indices(ranks, lambda rank: rank.is_silent(since)):
        return Stall(silent, f"reported nothing for {timeout:g} s, last", _others(ranks, silent))
    if any(rank.last is not None and rank.is_stopped for rank in ranks):
        return None  # it will be silent in a moment, and its last report is out of date
    waiting = _indices(ranks, lambda rank: rank.waits)
    if not waiting:
        return None
    left = _indices(ranks, lambda rank: rank.left)
    there = [rank for rank in ranks if not rank.left]
    recently = now - min(timeout, _LEFT)
    if left and all(one.waits and max(one.moved, one.busy) <= recently for one in there):
        return Stall(left, "has left its script", waiting)
    if short := _short(ranks, now, timeout):
        return Stall(short, f"{_SHORT}, and waits", _others(ranks, short))
    if any(rank.moved > since for rank in there):
        return None
    if idle := _indices(ranks, lambda rank: not rank.waits and rank.is_idle(since)):
        all_left = all(ranks[i].left for i in idle)
        why = "has left its script" if all_left else f"did nothing for {timeout:g} s"
        return Stall(idle, why, waiting)
    if len(waiting) == len(ranks):
        return _mutual(ranks, since, timeout) or find_alone(ranks, now, timeout * ALONE)
    return find_alone(ranks, now, timeout * ALONE)


def find_alone(ranks: Sequence[RankStatus], now: float, seconds: float) -> Stall | None:
    """Return which ranks compute, read or write while the others wait for them, for so long."""
    since = now - seconds
    alone = _indices(ranks, lambda rank: not (rank.waits or rank.left))
    waiting = _indices(ranks, lambda rank: rank.waits)
    if not alone:  # all are inside
        alone = _indices(ranks, lambda rank: rank.waits and rank.busy > since)
        waiting = _indices(ranks, lambda rank: rank.waits and rank.busy <= since)
    if not (waiting and alone) or any(rank.moved > since for rank in ranks):
        return None
    return Stall(alone, f"computed without the others for {seconds:g} s,", waiting)


def _mutual(ranks: Sequence[RankStatus], since: float, timeout: float) -> Stall | None:
    """Return why ranks that all wait are stuck."""
    if any(rank.busy >= since for rank in ranks):
        return None
    feeding = _indices(ranks, lambda rank: rank.said.feeds)
    if 0 < len(feeding) < len(ranks):
        why = f"got no data for {timeout:g} s from Python"
        return Stall(feeding, why, _others(ranks, feeding))
    if ahead := _ahead(ranks):
        return Stall(ahead, f"{_SHORT}, and waits", _others(ranks, ahead))
    why = f"No rank did anything for {timeout:g} s"
    if len({(one.said.count, one.said.what) for one in ranks}) > 1:
        why = "Ranks wait for each other in different places, as where the data of one ends earlier"
    return Stall((), why, _others(ranks, ()))


def _ahead(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """Return the ranks that have come to the end of their data more often than the others."""
    most = max(rank.said.loops for rank in ranks)
    ahead = _indices(ranks, lambda rank: rank.said.loops == most)
    return ahead if len(ahead) < len(ranks) else ()


def _short(ranks: Sequence[RankStatus], now: float, timeout: float) -> tuple[int, ...]:
    """Return the ranks whose data has ended before a batch that others have, while all wait."""
    soon, late = now - min(timeout, _ENDED), now - timeout

    def may_move(rank: RankStatus) -> bool:
        # A thread of the script's may compute all the time.
        return rank.moved > soon or (rank.busy > soon and rank.moved > late)

    if any(not one.waits or may_move(one) for one in ranks):
        return ()
    ahead = _ahead(ranks)
    most = max((ranks[index].said.batches for index in ahead), default=0)
    return ahead if any(rank.said.batches > most for rank in ranks) else ()


def find_short(ranks: Sequence[RankStatus]) -> Stall | None:
    """Return whose data has ended before that of others, where a collective has shown that."""
    if any(rank.said.refused for rank in ranks) and (ahead := _ahead(ranks)):
        return Stall(ahead, f"{_SHORT}, last")
    return None


def find_cut_off(ranks: Sequence[RankStatus], now: float, timeout: float) -> Stall | None:
    """Return which ranks are silent, in a job of which others have lost a rank.

    TensorFlow takes a rank of which it hears nothing for lost sooner than the timeout. A rank that
    was stopped is silent, too.
    """
    seconds = 2 * min(_LATEST_REPORT, timeout / 4)
    since = now - seconds

    def is_cut_off(rank: RankStatus) -> bool:
        heard = rank.heard
        return heard is not None and (rank.is_stopped or (heard < since and rank.used < since))

    silent = _indices(ranks, is_cut_off)
    return Stall(silent, f"reported nothing for {seconds:g} s, last") if silent else None


# With parameter servers.


def find_replaceable(ranks: Sequence[RankStatus], now: float, timeout: float) -> dict[int, str]:
    """Return the workers of a job with servers, and the evaluator, that are stuck, and why."""
    if _silent(ranks, ("ps",), now - timeout):
        return {}  # for which a worker may wait
    since = now - timeout - min(_LATEST_REPORT, timeout / 4)
    silent = _silent(ranks, ("worker", "evaluator"), now - timeout)
    stuck = dict.fromkeys(silent, f"has reported nothing for {timeout:g} s")
    held = _held(ranks)
    workers = _indices(ranks, lambda rank: rank.role == "worker")
    for index, rank in enumerate(ranks):
        if index in stuck or rank.last is None or rank.busy >= since:
            continue
        began = held.get(workers.index(index)) if rank.role == "worker" else None
        if began is not None and began < since:
            stuck[index] = f"has done nothing for {timeout:g} s, though it had work"
        if rank.role == "evaluator" and rank.last.inside and rank.moved < since:
            stuck[index] = f"has done nothing for {timeout:g} s in {rank.last.what}"
    late = _not_started(ranks, "worker", since)
    return stuck | dict.fromkeys(late, f"has done nothing for {timeout:g} s since its start")


def find_served(ranks: Sequence[RankStatus], now: float, timeout: float) -> Stall | None:
    """Return why a job with parameter servers is stuck; None while it is not, or not for long."""
    (chief,) = _indices(ranks, lambda rank: rank.role == "chief")
    its = ranks[chief]
    margin = min(_LATEST_REPORT, timeout / 4)
    why, idle = f"reported nothing for {timeout:g} s, last", f"did nothing for {timeout:g} s"
    if silent := _silent(ranks, ("ps",), now - timeout):
        return Stall(silent, why, () if its.last is None else (chief,))
    # TensorFlow may keep Python's lock while it asks another task for something, so a chief that
    # reports nothing may wait itself: for a worker that is replaced before.
    if silent := _silent(ranks, ("chief",), now - timeout - _REPLACING):
        return Stall(silent, why)
    since = now - timeout - margin
    if late := _not_started(ranks, "ps", since):
        return Stall(late, idle, (chief,))
    if its.last is None:
        waiting = _indices(ranks, lambda rank: rank.waits)
        return Stall((chief,), idle, waiting) if waiting and its.is_idle(since) else None
    if its.waits or _held(ranks):
        return None
    heard = its.heard is not None and its.heard >= now - 2 * margin
    return Stall((chief,), idle) if heard and max(its.moved, its.busy) < since else None


def _silent(ranks: Sequence[RankStatus], roles: Sequence[str], since: float) -> tuple[int, ...]:
    """Return the ranks with one of the roles that have reported, and have fallen silent."""
    return _indices(ranks, lambda rank: rank.role in roles and rank.is_silent(since))


def _not_started(ranks: Sequence[RankStatus], role: str, since: float) -> tuple[int, ...]:
    """Return the tasks of a role that do nothing at their start, while the chief waits."""
    (chief,) = (rank for rank in ranks if rank.role == "chief")
    if chief.last is None or not chief.last.joining or chief.moved >= since:
        return ()

    def does_nothing(rank: RankStatus) -> bool:
        idle = not rank.waits and rank.moved < since and rank.is_idle(since)
        return rank.role == role and idle

    return _indices(ranks, does_nothing)


def _held(ranks: Sequence[RankStatus]) -> Mapping[int, float]:
    """Return since when workers have had their work, by worker, as the chief last said."""
    (chief,) = (rank for rank in ranks if rank.role == "chief")
    if chief.last is None or chief.heard is None:
        return {}
    return {int(worker): chief.heard - age for worker, age in chief.last.held.items()}


# What is said of it.


def describe_missing(stall: Stall, ranks: Sequence[RankStatus]) -> list[str]:
    """Return the lines that say who is missing, and where in its script."""
    lines = []
    for rank in (ranks[index] for index in stall.missing):
        text = f"{rank.name}, host {rank.host}, {stall.why} {rank.where}."
        if rank.is_stopped:
            text += " It is stopped, as by SIGSTOP."
        if rank.left:
            text = f"{text[:-1]}, and {ADVICE}"
        lines += [text, *_stack(rank)]
    return [*lines, _SAME_DATA] if stall.why.startswith(_SHORT) else lines


def describe_cause(stall: Stall, ranks: Sequence[RankStatus]) -> str:
    """Return what was seen of the ranks whose doing others have failed of."""
    return "\n".join(["dtk: " + "\n".join(describe_missing(stall, ranks)), ""])


def describe(stall: Stall, ranks: Sequence[RankStatus]) -> str:
    """Return what was seen of a job that has stopped moving: who is missing, where, who waits."""
    lines = ["", "dtk: the job has stopped moving, and was ended."]
    if not stall.missing:
        lines[1] += f" {stall.why}."
    lines += describe_missing(stall, ranks)
    for rank in (ranks[index] for index in stall.waiting):
        lines.append(f"{rank.name} waits {rank.where}.")
        if all(ranks[index].left for index in stall.missing):
            lines += _stack(rank)
    return "\n".join([*lines, ""])


def _stack(rank: RankStatus) -> list[str]:
    calls = rank.calls.splitlines()
    return ["Its stack, the innermost call first:", *calls] if calls else []


def say_last(text: str) -> None:
    """Write to standard error, as the last thing that this process does."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text.lstrip()}".encode())  # a progress bar may stand in the line
