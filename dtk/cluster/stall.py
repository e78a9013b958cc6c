"""Telling a job that is stuck from one that is slow, by what its ranks report of themselves.

    silent      a rank has reported nothing for the timeout: stopped, swapped out, cut off
    missing     others are inside and wait; a rank is outside, and neither computes nor reads
    ended       the same for at most a minute, and the rank's script is over
    endless     others are inside and wait, and a rank has computed outside for twelve timeouts
    feeding     all are inside, and one has Python of its own to wait for, such as a generator
    short       all are inside, and the data of one has come to its end once more than others'
    different   all are inside, but not in the same
    nobody      all are inside the same, and none computes
    cut off     a rank is silent for less than that, and another has ended since it has lost one

A rank that joins the others at the start is inside, and may be silent. One that has not imported
dtk yet is outside, and seen from outside: see `dtk.cluster.usage`.

A job is not stuck while any rank moves, while the one that others wait for uses its processor or
reads and writes (a slow callback, a long trace, a slow save), while all compute, and while nobody
is inside: then nobody waits for anybody. See `dtk.cluster.progress`.

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
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dtk.cluster.rank_status import RankStatus

# Timeouts for which a rank may compute while others wait for it: an endless loop computes, too.
ALONE = 12
_LEFT = 60.0  # seconds that ranks wait, idle, for one whose script is over: it never comes
ADVICE = (
    "every rank must run to the end of the script. Look for sys.exit, os._exit, or data that ends "
    "earlier on one rank."
)
STUCK = 124  # exit code of a job that has stopped moving, as of timeout(1)
# Ranks report this often, or four times in the timeout: of two that seem to have stopped together,
# the silent one shall be noticed first.
_LATEST_REPORT = 5.0
_SHORT = "has come to the end of its data before the others"
# Seconds that a chief may be silent for longer, while TensorFlow waits for a worker to come back.
_REPLACING = 15.0
# What can be replaced: see `dtk.launch.watch`.
_REPLACEABLE = ("worker", "evaluator")


class Stall(NamedTuple):
    """Why a job is stuck."""

    # indices of the ranks that the others wait for; empty where none can be told
    missing: tuple[int, ...]
    why: str  # for a sentence that begins with the missing ones, or a sentence
    waiting: tuple[int, ...]  # indices of the others


def _indices(ranks: Sequence[RankStatus], are: Callable[[RankStatus], bool]) -> tuple[int, ...]:
    return tuple(index for index, rank in enumerate(ranks) if are(rank))


def find(ranks: Sequence[RankStatus], now: float, timeout: float) -> Stall | None:
    """Return why a job is stuck; None while it is not, or not for long enough."""
    if any(rank.last is None and not rank.started for rank in ranks):
        return None  # nobody knows whether they are there
    since = now - timeout
    silent = _indices(ranks, lambda rank: rank.is_silent(since))
    if silent:
        others = tuple(i for i in range(len(ranks)) if i not in silent)
        return Stall(silent, f"reported nothing for {timeout:g} s, last", others)
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
    if any(rank.moved > since for rank in there):
        return None
    if idle := _indices(ranks, lambda rank: not rank.waits and rank.is_idle(since)):
        why = f"did nothing for {timeout:g} s"
        if all(ranks[i].left for i in idle):
            why = "has left its script"
        return Stall(idle, why, waiting)
    if len(waiting) == len(ranks):
        return _mutual(ranks, since, timeout)
    return find_alone(ranks, now, timeout * ALONE)


def find_alone(ranks: Sequence[RankStatus], now: float, seconds: float) -> Stall | None:
    """Return which ranks compute, read or write while the others wait for them, for so long."""
    waiting = _indices(ranks, lambda rank: rank.waits)
    alone = _indices(ranks, lambda rank: not (rank.waits or rank.left))
    if not (waiting and alone) or any(rank.moved > now - seconds for rank in ranks):
        return None
    return Stall(alone, f"computed without the others for {seconds:g} s,", waiting)


def _mutual(ranks: Sequence[RankStatus], since: float, timeout: float) -> Stall | None:
    """Return why ranks that all wait are stuck."""
    everyone = tuple(range(len(ranks)))
    if any(rank.busy >= since for rank in ranks):
        return None
    told = [rank.last for rank in ranks if rank.last is not None]
    feeding = tuple(i for i in everyone if told[i]["feeds"])
    if 0 < len(feeding) < len(everyone):
        others = tuple(i for i in everyone if i not in feeding)
        return Stall(feeding, f"got no data for {timeout:g} s from Python", others)
    if ahead := _ahead(ranks):
        others = tuple(i for i in everyone if i not in ahead)
        return Stall(ahead, f"{_SHORT}, and waits", others)
    if len({(one["count"], one["what"]) for one in told}) > 1:
        why = "Ranks wait for each other in different places, as where the data of one ends earlier"
        return Stall((), why, everyone)
    return Stall((), f"No rank did anything for {timeout:g} s", everyone)


def _ahead(ranks: Sequence[RankStatus]) -> tuple[int, ...]:
    """Return the ranks that have come to the end of their data more often than the others."""
    loops = [0 if rank.last is None else rank.last["loops"] for rank in ranks]
    ahead = tuple(index for index, count in enumerate(loops) if count == max(loops))
    return ahead if len(ahead) < len(loops) else ()


def find_short(ranks: Sequence[RankStatus]) -> Stall | None:
    """Return whose data has ended before that of others, where a collective has shown that."""
    refused = any(rank.last is not None and rank.last["refused"] for rank in ranks)
    ahead = _ahead(ranks) if refused else ()
    return Stall(ahead, f"{_SHORT}, last", ()) if ahead else None


def find_cut_off(ranks: Sequence[RankStatus], now: float, timeout: float) -> Stall | None:
    """Return which ranks are silent, in a job of which others have lost a rank.

    TensorFlow takes a rank of which it hears nothing for lost sooner than the timeout. A rank that
    was stopped is silent, too.
    """
    seconds = 2 * min(_LATEST_REPORT, timeout / 4)
    since = now - seconds
    silent = tuple(
        index
        for index, rank in enumerate(ranks)
        if rank.heard is not None
        and (rank.is_stopped or (rank.heard < since and rank.is_unused(since)))
    )
    return Stall(silent, f"reported nothing for {seconds:g} s, last", ()) if silent else None


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
    return lines


def describe_cause(stall: Stall, ranks: Sequence[RankStatus]) -> str:
    """Return what was seen of the ranks whose doing others have failed of."""
    lines = describe_missing(stall, ranks)
    return "\n".join([f"dtk: {lines[0]}", *lines[1:], ""])


def describe(stall: Stall, ranks: Sequence[RankStatus]) -> str:
    """Return what was seen of a job that has stopped moving: who is missing, where, who waits."""
    lines = ["", "dtk: the job has stopped moving, and was ended."]
    if not stall.missing:
        lines[1] += f" {stall.why}."
    lines += describe_missing(stall, ranks)
    for rank in (ranks[index] for index in stall.waiting):
        lines.append(f"{rank.name} waits {rank.where}.")
        if not stall.missing:
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
        os.write(2, text.encode())


def find_replaceable(ranks: Sequence[RankStatus], now: float, timeout: float) -> dict[int, str]:
    """Return the workers of a job with servers, and the evaluator, that are stuck."""
    if _silent(ranks, ("ps",), now - timeout):
        return {}  # for which a worker may wait
    since = now - timeout - min(_LATEST_REPORT, timeout / 4)
    silent = _silent(ranks, _REPLACEABLE, now - timeout)
    found = dict.fromkeys(silent, f"has reported nothing for {timeout:g} s")
    held = _held(ranks)
    workers = _indices(ranks, lambda rank: rank.role == "worker")
    for index, rank in enumerate(ranks):
        if index in found or rank.last is None or rank.busy >= since:
            continue
        began = held.get(workers.index(index)) if rank.role == "worker" else None
        if began is not None and began < since:
            found[index] = f"has done nothing for {timeout:g} s, though it had work"
        if rank.role == "evaluator" and rank.last["inside"] and rank.moved < since:
            found[index] = f"has done nothing for {timeout:g} s in {rank.last['what']}"
    late = _not_started(ranks, "worker", since)
    return found | dict.fromkeys(late, f"has done nothing for {timeout:g} s since its start")


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
        return Stall(silent, why, ())
    since = now - timeout - margin
    if late := _not_started(ranks, "ps", since):
        return Stall(late, idle, (chief,))
    if its.last is None:
        waiting = _indices(ranks, lambda rank: rank.waits)
        return Stall((chief,), idle, waiting) if waiting and its.is_idle(since) else None
    if its.waits or _held(ranks):
        return None
    heard = its.heard is not None and its.heard >= now - 2 * margin
    if heard and its.moved < since and its.busy < since:
        return Stall((chief,), idle, ())
    return None


def _silent(ranks: Sequence[RankStatus], roles: Sequence[str], since: float) -> tuple[int, ...]:
    """Return the ranks with one of the roles that have reported, and have fallen silent."""
    return _indices(ranks, lambda rank: rank.role in roles and rank.is_silent(since))


def _not_started(ranks: Sequence[RankStatus], role: str, since: float) -> tuple[int, ...]:
    """Return the tasks of a role that do nothing at their start, while the chief waits."""
    (chief,) = (rank for rank in ranks if rank.role == "chief")
    if chief.last is None or not chief.last["joining"] or chief.moved >= since:
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
    return {int(worker): chief.heard - age for worker, age in chief.last["held"].items()}
