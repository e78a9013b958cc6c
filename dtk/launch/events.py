"""What happens in a job, as one stream of events on one clock: see docs/seeing.md.

    ranks ── report_channel ──> hear ──┐
    launcher ─────────────────> record ┴─> JSON lines; and kept, for the other views

Who waited for whom is found here, from what the ranks tell of the same steps. A rank is in a
collective from when its own values are ready, so the one that is ready last is there for the
shortest time: what others are there longer, they wait for it.
"""

from __future__ import annotations

import collections
import functools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

from dtk.launch.screen import Sink

RankName: TypeAlias = int | str  # of processes without a rank: "ps 0"
_T = TypeVar("_T")

# Part of the time that ranks may wait without one of them being called slow.
LITTLE = 0.02
_CLOSES = 10.0  # seconds in which a slow disk takes the last lines
_MOST = 1000  # summaries of a rank, or of waiting, after which each two become one
_ADDED = ("seconds", "communicating", "bytes", "between", "input", "samples")


class Event(NamedTuple):
    """What has happened once, in seconds since 1970."""

    time: float
    attempt: int
    rank: RankName | None
    kind: str
    facts: Mapping[str, object]


class Steps(NamedTuple):
    """Steps of one rank, as it has told of them; times are in seconds since 1970."""

    since: float
    until: float
    first: float
    last: float
    seconds: float  # in steps; the rest went to callbacks and the script
    communicating: float  # in collectives, waiting for others included
    bytes: float
    memory: float
    epoch: float
    between: float | None = None  # of those in collectives, between steps
    input: float | None = None  # waiting for a batch
    samples: float | None = None  # of all ranks
    loss: float | None = None
    rate: float | None = None
    batch: float | None = None
    begins: Sequence[float] = ()  # milliseconds after `since`
    took: Sequence[float] = ()

    @property
    def number(self) -> float:
        """How many steps they are."""
        return self.last - self.first + 1

    @property
    def elapsed(self) -> float:
        """Seconds from their beginning to their end."""
        return max(self.until - self.since, 1e-9)

    @property
    def speed(self) -> float | None:
        """Samples of all ranks in a second."""
        return None if self.samples is None else self.samples / self.elapsed

    def share(self, first: float, last: float) -> float:
        """Return which part of them has numbers in a range."""
        return max(0, min(last, self.last) - max(first, self.first) + 1) / self.number

    def begun(self, first: float, last: float) -> list[float]:
        """Return when those in a range began, where that is known."""
        times = enumerate(self.begins, int(self.first))
        return [self.since + begin / 1000 for step, begin in times if first <= step <= last]

    def join(self, after: Steps) -> Steps:
        """Return these and those that follow as one."""
        mine, both = self._asdict(), after._asdict()
        for name in _ADDED:
            values = (mine[name], both[name])
            both[name] = None if None in values else sum(values)
        return Steps(**{**both, "since": self.since, "first": self.first, "begins": (), "took": ()})


class Messages(NamedTuple):
    """What a rank sent in one step."""

    time: float  # at which the step began
    step: int
    spans: Sequence[tuple[str, float, float]]  # name; begin and length, in milliseconds


class Waiting(NamedTuple):
    """How long each rank waited for others in a range of steps."""

    time: float
    first: float
    last: float
    elapsed: float
    seconds: dict[RankName, float]

    def join(self, after: Waiting) -> Waiting:
        """Return this and what follows as one."""
        seconds = {rank: self.seconds[rank] + more for rank, more in after.seconds.items()}
        elapsed = self.elapsed + after.elapsed
        return after._replace(first=self.first, elapsed=elapsed, seconds=seconds)


class _Comparison:
    """Compares what the ranks of one attempt tell of the same steps."""

    def __init__(self, ranks: int) -> None:
        self._told: list[collections.deque[Steps]] = [collections.deque() for _ in range(ranks)]
        self._next: float = 1

    def add(self, rank: RankName, steps: Steps) -> Waiting | None:
        """Take what a rank tells; return who waited, in steps that all have told of by now."""
        if len(self._told) < 2 or not isinstance(rank, int):
            return None
        self._told[rank].append(steps)
        first, last = self._next, min(told[-1].last if told else 0 for told in self._told)
        if last < first:
            return None

        def of_all(value: Callable[[Steps], float]) -> list[float]:
            return [sum(value(one) * one.share(first, last) for one in t) for t in self._told]

        inside = of_all(lambda one: one.communicating)
        begun = [[when for one in t for when in one.begun(first, last)] for t in self._told]
        in_graphs = sum(of_all(lambda one: one.communicating - (one.between or 0.0)))
        if in_graphs < 1e-5 and len(set(map(len, begun))) == 1:
            inside = [-sum(times) for times in begun]  # deterministic graphs have no clock
        elapsed = max(of_all(lambda one: one.elapsed))
        for told in self._told:
            while len(told) > 1 and told[0].last <= last:
                told.popleft()
        self._next = last + 1
        least = min(inside)
        waited: dict[RankName, float] = {i: round(v - least, 4) for i, v in enumerate(inside)}
        return Waiting(steps.until, first, last, round(elapsed, 4), waited)


class EventLog:
    """Takes the events of a job, through all its attempts.

    Attributes:
        attempt: How often the job was started before.
        kept: All events but those of steps, messages and waiting.
        steps: What each rank has told of its steps, by attempt and rank.
        messages: What each rank has sent in some of its steps, by attempt and rank.
        waiting: Who waited, by attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.kept: list[Event] = []
        self.steps: dict[tuple[int, RankName], list[Steps]] = {}
        self.messages: dict[tuple[int, RankName], list[Messages]] = {}
        self.waiting: dict[int, list[Waiting]] = {}
        self._comparison = _Comparison(0)
        self._zero = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[str] | None = None

    def write_to(self, file: str, say: Callable[[str], None]) -> None:
        """Append all events to a file, by a thread: a disk that hangs keeps nobody waiting."""
        stream = open(file, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the job
        told = f"--events {file} takes nothing: {{}}. The job goes on without"
        sink = Sink(stream, file, lambda why: say(told.format(why)))
        self._lines = lines = queue.SimpleQueue[str]()

        def write() -> None:
            while line := lines.get():
                sink.write(line)
            sink.close()

        self._writer = threading.Thread(target=write, name="dtk events", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Wait until all is written."""
        if self._lines is not None:
            self._lines.put("")
            self._writer.join(_CLOSES)

    def begin_attempt(self, number: int, hosts: Mapping[str, str], ranks: int) -> None:
        """Note that processes are started on hosts; so many ranks will train together."""
        self.attempt, self._comparison = number, _Comparison(ranks)
        self.record("attempt start", processes=hosts)

    def record(self, kind: str, rank: RankName | None = None, **facts: object) -> None:
        """Note what happens now."""
        self.record_at(time.monotonic(), kind, rank, facts)

    def record_at(
        self, moment: float, kind: str, rank: RankName | None, facts: Mapping[str, object]
    ) -> None:
        """Note what has happened at a moment of `time.monotonic()`."""
        with self._lock:
            self.kept.append(self._write(self._zero + moment, rank, kind, facts))

    def hear(self, rank: RankName, told: Mapping[str, object], lag: float) -> None:
        """Take an event of a rank, whose clock is so many seconds behind this process's."""
        facts, zero = dict(told), self._zero + lag
        kind = str(facts.pop("kind"))
        if kind == "messages":
            told_spans = cast("list[tuple[object, object, object]]", facts["spans"])
            spans = [(str(name), _number(begin), _number(took)) for name, begin, took in told_spans]
            begun = round(zero + _number(facts["begin"]), 4)
            self._hear_messages(rank, Messages(begun, int(_number(facts["step"])), spans))
        elif kind == "steps":
            values = {**Steps._field_defaults, **facts}
            steps = Steps._make(_numbers(values[name]) for name in Steps._fields)
            since, until = round(zero + steps.since, 4), round(zero + steps.until, 4)
            self._hear_steps(rank, steps._replace(since=since, until=until))
        else:
            self.record(kind, rank, **facts)

    def _hear_messages(self, rank: RankName, sent: Messages) -> None:
        with self._lock:
            kept = self.messages.setdefault((self.attempt, rank), [])
            _keep(kept, sent, lambda before, after: after)
            self._write(sent.time, rank, "messages", {"step": sent.step, "spans": sent.spans})

    def _hear_steps(self, rank: RankName, steps: Steps) -> None:
        facts = {name: value for name, value in steps._asdict().items() if value is not None}
        with self._lock:
            _keep(self.steps.setdefault((self.attempt, rank), []), steps, Steps.join)
            self._write(steps.until, rank, "steps", facts)
            if (waited := self._comparison.add(rank, steps)) is not None:
                _keep(self.waiting.setdefault(self.attempt, []), waited, Waiting.join)
                facts = {**waited._asdict(), "slowest": _least(waited.seconds)}
                self._write(waited.time, None, "waiting", facts)

    def _write(
        self, when: float, rank: RankName | None, kind: str, facts: Mapping[str, object]
    ) -> Event:
        event = Event(round(when, 4), self.attempt, rank, kind, facts)
        if self._lines is not None:
            head = {name: value for name, value in event._asdict().items() if name != "facts"}
            self._lines.put(json.dumps(_finite({**head, **facts})) + "\n")
        return event

    def recent(self, rank: RankName, seconds: float) -> Steps | None:
        """Return the steps of a rank in the last seconds in which it told of some, as one."""
        with self._lock:
            told = list(self.steps.get((self.attempt, rank), ()))
        late = [one for one in told if one.until > told[-1].until - seconds]
        return functools.reduce(Steps.join, late) if late else None

    def waited(self, attempt: int, seconds: float = math.inf) -> dict[RankName, float]:
        """Return which part of the time each rank of an attempt has waited for others."""
        with self._lock:
            told = list(self.waiting.get(attempt, ()))
        late = [one for one in told if one.time > told[-1].time - seconds]
        if not late:
            return {}
        whole = functools.reduce(Waiting.join, late)
        return {rank: waited / (whole.elapsed or 1.0) for rank, waited in whole.seconds.items()}

    def slowest(self, attempt: int) -> RankName | None:
        """Return the rank of an attempt that others have waited for; None if hardly for any."""
        waited = self.waited(attempt)
        return _least(waited) if max(waited.values(), default=0.0) >= LITTLE else None


def _keep(kept: list[_T], new: _T, join: Callable[[_T, _T], _T]) -> None:
    """Keep one more, and of too many each two as one."""
    kept.append(new)
    if len(kept) > _MOST:
        whole = len(kept) // 2 * 2
        kept[:] = [*map(join, kept[0:whole:2], kept[1:whole:2]), *kept[whole:]]


def _least(seconds: Mapping[RankName, float]) -> RankName:
    return min(seconds, key=lambda rank: seconds[rank])


def _finite(value: object) -> object:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: object) -> float:
    return value if isinstance(value, int) else float(str(value))


def _numbers(value: object) -> float | list[float] | None:
    """Return what a rank has told as numbers; fails of anything else."""
    if isinstance(value, list | tuple):
        return list(map(_number, value))
    return None if value is None else _number(value)
