"""A job as a trace for Perfetto and chrome://tracing: https://ui.perfetto.dev opens it.

One process of the trace is one rank, and `dtk run` itself another. Numbers of processes and tracks
begin at 1: viewers take 0 for an idle processor. A step is one call of its graph; about once a
second the messages inside of one are shown, each from when this rank's values were ready: what is
longer than another rank's was waiting for it. How long a rank was in collectives, its memory and
its samples per second are counters.
"""

from __future__ import annotations

import json
from typing import TypeAlias

from dtk.launch.events import Event, EventLog, Messages, RankName, Steps

_Drawn: TypeAlias = dict[str, object]
_LAUNCHER = 1
_TRACKS = {"steps": 1, "events": 2, "messages": 3}


def trace(log: EventLog) -> str:
    """Return the trace's JSON."""
    begun = log.kept[0].time
    # Numbers first, then names such as "ps 0".
    ranks = sorted({rank for _, rank in log.steps}, key=lambda one: (isinstance(one, str), one))
    numbers = {rank: _LAUNCHER + 1 + place for place, rank in enumerate(ranks)}
    names = {_LAUNCHER: "dtk run", **{pid: f"rank {rank}" for rank, pid in numbers.items()}}
    events: list[_Drawn] = []
    for pid, process in names.items():
        events.append(_name("process_name", pid, 1, process))
        tracks = ("events",) if pid == _LAUNCHER else _TRACKS
        events += [_name("thread_name", pid, _TRACKS[track], track) for track in tracks]
    marks = [one for one in log.kept[1:] if one.kind != "rank start"]
    events += [_mark(one, begun, numbers) for one in marks]
    for (_, rank), told in log.steps.items():
        for steps in told:
            events += _slices(steps, begun, numbers[rank])
    for (attempt, rank), sent in log.messages.items():
        for one in sent:
            events += _messages(one, begun, numbers[rank], attempt)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, pid: int, track: int, name: str) -> _Drawn:
    return {"ph": "M", "name": what, "pid": pid, "tid": track, "args": {"name": name}}


def _mark(event: Event, begun: float, numbers: dict[RankName, int]) -> _Drawn:
    """Return a save as a slice, and what else has no length as an instant."""
    when = event.time - begun
    pid = _LAUNCHER if event.rank is None else numbers.get(event.rank, _LAUNCHER)
    mark = {"name": event.kind, "pid": pid, "tid": _TRACKS["events"], "args": event.facts}
    if event.kind != "save":
        return {**mark, "ph": "i", "s": "p" if pid != _LAUNCHER else "g", "ts": _micro(when)}
    took = float(str(event.facts["seconds"]))
    return {**mark, "ph": "X", "ts": _micro(when - took), "dur": _micro(took)}


def _slices(steps: Steps, begun: float, pid: int) -> list[_Drawn]:
    since = steps.since - begun
    bars = [(f"steps {steps.first} to {steps.last}", 0.0, 1000 * steps.elapsed)]
    if len(steps.begins) == steps.number:
        numbered = zip(steps.begins, steps.took, strict=True)
        bars = [(f"step {n}", *one) for n, one in enumerate(numbered, int(steps.first))]
    own: _Drawn = {"ph": "X", "cat": "step", "pid": pid, "tid": _TRACKS["steps"]}
    own["args"] = {"epoch": steps.epoch, "loss": steps.loss}
    events = []
    for name, begin, took in bars:
        start = _micro(since + begin / 1000)
        events.append({**own, "name": name, "ts": start, "dur": round(1000 * took)})
    counters = {
        "in collectives %": 100 * steps.communicating / steps.elapsed,
        "reading input %": 100 * (steps.input or 0.0) / steps.elapsed,
        "samples per s": (steps.samples or 0) / steps.elapsed,
        "memory MB": steps.memory / 1e6,
    }
    for name, value in counters.items():
        counted: _Drawn = {"value": round(value, 3)}
        events.append({"ph": "C", "name": name, "pid": pid, "ts": _micro(since), "args": counted})
    return events


def _messages(sent: Messages, begun: float, pid: int, attempt: int) -> list[_Drawn]:
    """Return the messages of a step, which may overlap."""
    events, track = [], _TRACKS["messages"]
    for place, (name, begin, took) in enumerate(sent.spans):
        start = _micro(sent.time - begun + begin / 1000)
        number = f"{attempt}-{pid}-{sent.step}-{place}"
        own: _Drawn = {"cat": "collective", "pid": pid, "tid": track, "id": number}
        events.append({**own, "ph": "b", "name": name, "ts": start, "args": {"step": sent.step}})
        events.append({**own, "ph": "e", "name": name, "ts": start + round(1000 * took)})
    return events


def _micro(seconds: float) -> int:
    return round(1e6 * seconds)
