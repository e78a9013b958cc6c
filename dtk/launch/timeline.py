"""A job as a trace for Perfetto and chrome://tracing: https://ui.perfetto.dev opens it.

One process of the trace is one rank, with a track for each attempt's steps, and one for input.
Inside a step nothing is shown: its graph is one call. How long a rank was in collectives, its
memory and its samples per second are counters.
"""

from __future__ import annotations

import json

from dtk.launch.events import Event, EventLog, RankName, Steps

_LAUNCHER = -1
_MARKS = {"epoch", "stall", "failure", "restart", "attempt start", "rank end", "job end"}
_MOST = 1_000_000  # events: more take a browser's memory


def trace(log: EventLog) -> str:
    """Return the trace's JSON."""
    begun = min((float(str(one["time"])) for one in log.kept), default=0.0)
    numbers: dict[RankName, int] = {}
    for _, rank in log.steps:
        numbers.setdefault(rank, rank if isinstance(rank, int) else 10_000 + len(numbers))
    found: list[Event] = [_name(_LAUNCHER, "dtk run")]
    found += [_name(pid, f"rank {rank}") for rank, pid in numbers.items()]
    for event in log.kept:
        found += _mark(event, begun, numbers)
    for (_, rank), told in log.steps.items():
        for steps in told:
            if len(found) < _MOST:
                found += _slices(steps, begun, numbers[rank])
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _name(pid: int, name: str) -> Event:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _mark(event: Event, begun: float, numbers: dict[RankName, int]) -> list[Event]:
    """Return a save as a slice, and what else has no length as an instant."""
    kind, when, rank = str(event["kind"]), float(str(event["time"])), event["rank"]
    pid = numbers.get(rank, _LAUNCHER) if isinstance(rank, int | str) else _LAUNCHER
    args = {name: value for name, value in event.items() if name not in ("time", "kind", "rank")}
    mark: Event = {"name": kind, "pid": pid, "tid": 1, "ts": _micro(when - begun), "args": args}
    if kind == "save":
        seconds = float(str(event["seconds"]))
        start = _micro(when - begun - seconds)
        return [{**mark, "ph": "X", "ts": start, "dur": _micro(seconds)}]
    return [{**mark, "ph": "i", "s": "p" if rank is not None else "g"}] if kind in _MARKS else []


def _slices(steps: Steps, begun: float, pid: int) -> list[Event]:
    since, span = steps.since - begun, steps.until - steps.since
    args = {"epoch": steps.epoch, "loss": steps.loss}
    own = {"pid": pid, "tid": 0, "ph": "X", "cat": "step"}
    if len(steps.begins) == steps.number:
        found: list[Event] = [
            {
                **own,
                "name": f"step {number}",
                "ts": _micro(since + begin / 1000),
                "dur": round(1000 * took),
                "args": args,
            }
            for number, begin, took in zip(
                range(steps.first, steps.last + 1), steps.begins, steps.took, strict=True
            )
        ]
    else:
        name = f"steps {steps.first} to {steps.last}"
        found = [{**own, "name": name, "ts": _micro(since), "dur": _micro(span), "args": args}]
    counts = {"in collectives %": 100 * steps.communicating, "bytes sent per s": steps.bytes}
    if steps.input is not None:
        counts["reading input %"] = 100 * steps.input
    if steps.samples is not None:
        counts["samples per s"] = steps.samples
    counters = {name: count / span for name, count in counts.items() if span > 0}
    for name, value in {**counters, "memory MB": steps.memory / 1e6}.items():
        args_of: Event = {"value": round(value, 3)}
        found.append({"ph": "C", "name": name, "pid": pid, "ts": _micro(since), "args": args_of})
    return found


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
