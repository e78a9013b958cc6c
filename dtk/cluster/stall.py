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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtk.cluster.standing import Standing

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
# What can be replaced: see `dtk.launch.restarts`.
_REPLACEABLE = ("worker", "evaluator")


class Stall(NamedTuple):
    """Why a job is stuck."""

    # indices of the ranks that the others wait for; empty where none can be told
    missing: tuple[int, ...]
    why: str  # for a sentence that begins with the missing ones, or a sentence
    waiting: tuple[int, ...]  # indices of the others


def find(standings: Sequence[Standing], now: float, timeout: float) -> Stall | None:
    """Return why a job is stuck; None while it is not, or not for long enough.

    Example:
        >>> find([Standing()], now=1000.0, timeout=300.0) is None
        True
    """
    if any(standing.last is None and not standing.started for standing in standings):
        return None  # nobody knows whether they are there
    since = now - timeout
    everyone = range(len(standings))
    silent = tuple(i for i in everyone if standings[i].is_silent(since))
    if silent:
        others = tuple(i for i in everyone if i not in silent)
        return Stall(silent, f"reported nothing for {timeout:g} s, last", others)
    if any(standing.last is not None and standing.is_stopped for standing in standings):
        return None  # it will be silent in a moment, and its last report is out of date
    waiting = tuple(i for i in everyone if standings[i].waits)
    if waiting and (ended := _ended(standings, now - min(timeout, _LEFT))):
        return Stall(ended, "has left its script", waiting)
    if not waiting or any(standing.moved > since for standing in standings if not standing.left):
        return None
    idle = tuple(i for i in everyone if i not in waiting and standings[i].is_idle(since))
    if idle:
        left = all(standings[i].left for i in idle)
        why = "has left its script" if left else f"did nothing for {timeout:g} s"
        return Stall(idle, why, waiting)
    if len(waiting) == len(standings):
        return _mutual(standings, since, timeout)
    return find_alone(standings, now, timeout * ALONE)


def find_alone(standings: Sequence[Standing], now: float, seconds: float) -> Stall | None:
    """Return which ranks compute, read or write while the others wait for them, for so long.

    Example:
        >>> find_alone([Standing(started=True), Standing(started=True)], 1000.0, 300.0) is None
        True
    """
    waiting = tuple(i for i, one in enumerate(standings) if one.waits)
    alone = tuple(i for i, one in enumerate(standings) if not (one.waits or one.left))
    if not (waiting and alone) or any(one.moved > now - seconds for one in standings):
        return None
    return Stall(alone, f"computed without the others for {seconds:g} s,", waiting)


def _ended(standings: Sequence[Standing], since: float) -> tuple[int, ...]:
    """Return the ranks whose scripts are over, where all others have waited idly since a time."""
    others = [one for one in standings if not one.left]
    if any(not one.waits or max(one.moved, one.busy) > since for one in others):
        return ()
    return tuple(i for i, one in enumerate(standings) if one.left)


def _mutual(standings: Sequence[Standing], since: float, timeout: float) -> Stall | None:
    """Return why ranks that all wait are stuck."""
    everyone = tuple(range(len(standings)))
    if any(standing.busy >= since for standing in standings):
        return None
    told = [standing.last for standing in standings if standing.last is not None]
    feeding = tuple(i for i in everyone if told[i]["feeds"])
    if 0 < len(feeding) < len(everyone):
        others = tuple(i for i in everyone if i not in feeding)
        return Stall(feeding, f"got no data for {timeout:g} s from Python", others)
    if ahead := _ahead(standings):
        others = tuple(i for i in everyone if i not in ahead)
        return Stall(ahead, f"{_SHORT}, and waits", others)
    if len({(one["count"], one["what"]) for one in told}) > 1:
        why = "Ranks wait for each other in different places, as where the data of one ends earlier"
        return Stall((), why, everyone)
    return Stall((), f"No rank did anything for {timeout:g} s", everyone)


def _ahead(standings: Sequence[Standing]) -> tuple[int, ...]:
    """Return the ranks that have come to the end of their data more often than the others."""
    loops = [0 if standing.last is None else standing.last["loops"] for standing in standings]
    ahead = tuple(index for index, count in enumerate(loops) if count == max(loops))
    return ahead if len(ahead) < len(loops) else ()


def find_short(standings: Sequence[Standing]) -> Stall | None:
    """Return whose data has ended before that of others, where a collective has shown that."""
    refused = any(one.last is not None and one.last["refused"] for one in standings)
    ahead = _ahead(standings) if refused else ()
    return Stall(ahead, f"{_SHORT}, last", ()) if ahead else None


def describe_missing(
    stall: Stall, names: Sequence[str], hosts: Sequence[str], standings: Sequence[Standing]
) -> list[str]:
    """Return the lines that say who is missing, and where in its script."""
    lines = []
    for index in stall.missing:
        text = f"{names[index]}, host {hosts[index]}, {stall.why} {_where(standings[index])}."
        if standings[index].is_stopped:
            text += " It is stopped, as by SIGSTOP."
        if standings[index].left:
            text = f"{text[:-1]}, and {ADVICE}"
        lines += [text, *_stack(standings[index])]
    return lines


def find_cut_off(standings: Sequence[Standing], now: float, timeout: float) -> Stall | None:
    """Return which ranks are silent, in a job of which others have lost a rank.

    TensorFlow takes a rank of which it hears nothing for lost sooner than the timeout. A rank that
    was stopped is silent, too.

    Example:
        >>> find_cut_off([Standing(), Standing(heard=900.0)], now=1000.0, timeout=300.0).missing
        (1,)
    """
    seconds = 2 * min(_LATEST_REPORT, timeout / 4)
    silent = tuple(
        index
        for index, standing in enumerate(standings)
        if standing.heard is not None
        and (
            standing.is_stopped
            or (standing.heard < now - seconds and standing.is_unused(now - seconds))
        )
    )
    return Stall(silent, f"reported nothing for {seconds:g} s, last", ()) if silent else None


def describe(
    stall: Stall, names: Sequence[str], hosts: Sequence[str], standings: Sequence[Standing]
) -> str:
    """Return what was seen of a job that has stopped moving: who is missing, where, who waits."""
    lines = ["", "dtk: the job has stopped moving, and was ended."]
    if not stall.missing:
        lines[1] += f" {stall.why}."
    lines += describe_missing(stall, names, hosts, standings)
    for index in stall.waiting:
        lines.append(f"{names[index]} waits {_where(standings[index])}.")
        if not stall.missing:
            lines += _stack(standings[index])
    return "\n".join([*lines, ""])


def _stack(standing: Standing) -> list[str]:
    calls = standing.calls.splitlines()
    return ["Its stack, the innermost call first:", *calls] if calls else []


def _where(standing: Standing) -> str:
    last = standing.last
    if last is None:
        return "before it made a strategy"
    is_there = not standing.left and (last["inside"] or last["joining"] or last["alone"])
    return f"{'in' if is_there else 'after'} {last['what']}"


def find_replaceable(
    standings: Sequence[Standing], roles: Sequence[str], now: float, timeout: float
) -> dict[int, str]:
    """Return the workers of a job with servers, and the evaluator, that are stuck.

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
    late = _not_started(standings, ("worker",), roles, since)
    return found | dict.fromkeys(late, f"has done nothing for {timeout:g} s since its start")


def find_served(
    standings: Sequence[Standing], roles: Sequence[str], now: float, timeout: float
) -> Stall | None:
    """Return why a job with parameter servers is stuck; None while it is not, or not for long.

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
    if late := _not_started(standings, ("ps",), roles, since):
        return Stall(late, f"did nothing for {timeout:g} s", (chief,))
    if its.last is None:
        waiting = tuple(index for index, standing in enumerate(standings) if standing.waits)
        stuck = bool(waiting) and its.is_idle(since)
        return Stall((chief,), f"did nothing for {timeout:g} s", waiting) if stuck else None
    if its.waits or _held(standings, roles):
        return None
    heard = its.heard is not None and its.heard >= now - 2 * margin
    if heard and its.moved < since and its.busy < since:
        return Stall((chief,), f"did nothing for {timeout:g} s", ())
    return None


def _silent(
    standings: Sequence[Standing], wanted: Sequence[str], roles: Sequence[str], since: float
) -> tuple[int, ...]:
    """Return those of the wanted roles that have reported, and have fallen silent."""
    return tuple(
        index
        for index, standing in enumerate(standings)
        if roles[index] in wanted and standing.is_silent(since)
    )


def _not_started(
    standings: Sequence[Standing], wanted: Sequence[str], roles: Sequence[str], since: float
) -> tuple[int, ...]:
    """Return those of the wanted roles that do nothing at their start, while the chief waits."""
    chief = standings[roles.index("chief")]
    if chief.last is None or not chief.last["joining"] or chief.moved >= since:
        return ()
    return tuple(
        index
        for index, standing in enumerate(standings)
        if roles[index] in wanted
        and not standing.waits
        and standing.moved < since
        and standing.is_idle(since)
    )


def _held(standings: Sequence[Standing], roles: Sequence[str]) -> Mapping[int, float]:
    """Return since when workers have had their work, by worker, as the chief last said."""
    chief = standings[roles.index("chief")]
    if chief.last is None or chief.heard is None:
        return {}
    return {int(worker): chief.heard - age for worker, age in chief.last["held"].items()}
