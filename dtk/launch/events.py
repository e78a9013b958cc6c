"""What happens in a job, as one stream of events on one clock: see docs/seeing.md.

    ranks ── report_channel ──> hear ──┐
    launcher ─────────────────> record ┴─> JSON lines, written by a thread of their own
                                         └> kept: for `dtk top`, --timeline and --report

Who waited for whom is found here, from what the ranks tell of the same steps. A rank is in a
collective from when its own values are ready, so the one that is ready last is there for the
shortest time: what others are there longer, they wait for it.
"""

from __future__ import annotations

import collections
import errno
import functools
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from dtk.errors import ClusterError

RankName: TypeAlias = int | str  # of processes without a rank: "ps 0"
Event: TypeAlias = dict[str, object]
_T = TypeVar("_T")

LITTLE = 0.02  # part of the time that ranks may wait without one of them being called slow
_CLOSES = 10.0  # seconds in which a slow disk takes the last lines
_MOST = 4000  # summaries of a rank, or of waiting, after which each two become one


class Steps(NamedTuple):
    """Steps of one rank, as it has told of them; times are in seconds since 1970."""

    since: float
    until: float
    first: int
    last: int
    seconds: float  # in steps; the rest went to callbacks and the script
    communicating: float  # in collectives, waiting for others included
    bytes: int
    memory: int
    epoch: int
    between: float = 0.0  # of those in collectives, between steps
    input: float | None = None  # waiting for a batch
    samples: int | None = None  # of all ranks
    loss: float | None = None
    rate: float | None = None
    batch: float | None = None
    begins: tuple[float, ...] = ()  # milliseconds after `since`
    took: tuple[float, ...] = ()

    @property
    def number(self) -> int:
        """How many steps they are."""
        return self.last - self.first + 1

    def share(self, first: int, last: int) -> float:
        """Return which part of them has numbers in a range."""
        return max(0, min(last, self.last) - max(first, self.first) + 1) / self.number


class Waiting(NamedTuple):
    """How long each rank waited for others in a range of steps."""

    time: float
    first: int
    last: int
    elapsed: float
    seconds: dict[int, float]

    @property
    def slowest(self) -> int:
        """The rank that the others waited for."""
        return min(self.seconds, key=lambda rank: self.seconds[rank])


class _Comparison:
    """Compares what the ranks of one attempt tell of the same steps."""

    def __init__(self, ranks: int) -> None:
        self._untold: list[collections.deque[Steps]] = [collections.deque() for _ in range(ranks)]
        self._next = 1

    def add(self, rank: int, steps: Steps) -> Waiting | None:
        """Take what a rank tells; return who waited, for steps that all have told of."""
        if rank >= len(self._untold) or len(self._untold) == 1:
            return None
        self._untold[rank].append(steps)
        if not all(self._untold):
            return None
        first, last = self._next, min(told[-1].last for told in self._untold)
        if last < first:
            return None
        within = {
            rank: sum(one.communicating * one.share(first, last) for one in told)
            for rank, told in enumerate(self._untold)
        }
        if not any(within.values()):  # TensorFlow has no clock in deterministic graphs
            within = self._early(first, last)
        least = min(within.values(), default=0.0)
        elapsed = max(
            sum((one.until - one.since) * one.share(first, last) for one in told)
            for told in self._untold
        )
        for told in self._untold:
            while len(told) > 1 and told[0].last <= last:
                told.popleft()
        self._next = last + 1
        seconds = {rank: round(value - least, 4) for rank, value in within.items()}
        return Waiting(steps.until, first, last, round(elapsed, 4), seconds)

    def _early(self, first: int, last: int) -> dict[int, float]:
        """Return how much earlier ranks began these steps than the last rank, in all."""
        begun = [
            {
                step: one.since + begin / 1000
                for one in told
                for step, begin in zip(range(one.first, one.last + 1), one.begins, strict=False)
                if first <= step <= last
            }
            for told in self._untold
        ]
        common = set.intersection(*map(set, begun))
        latest = {step: max(one[step] for one in begun) for step in common}
        return {
            rank: sum(latest[step] - one[step] for step in common) for rank, one in enumerate(begun)
        }


class EventLog:
    """Takes the events of a job, through all its attempts.

    Attributes:
        attempt: How often the job was started before.
        kept: All events but those of steps and waiting.
        steps: What each rank has told of its steps, by attempt and rank.
        waiting: Who waited, by attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.kept: list[Event] = []
        self.steps: dict[tuple[int, RankName], list[Steps]] = {}
        self.waiting: dict[int, list[Waiting]] = {}
        self._comparison = _Comparison(0)
        self._zero = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._writer: _Writer | None = None

    def write_to(self, file: str, say: Callable[[str], None]) -> None:
        """Write all events to a file, from now on."""
        self._writer = _Writer(file, say)

    def begin_attempt(self, number: int, hosts: Mapping[str, str], ranks: int) -> None:
        """Note that processes are started on hosts; so many ranks will train together."""
        self.attempt, self._comparison = number, _Comparison(ranks)
        self.record("attempt start", processes=hosts)

    def record(self, kind: str, rank: RankName | None = None, **facts: object) -> None:
        """Note what happens now."""
        event = {**self._head(self._zero + time.monotonic(), rank, kind), **facts}
        with self._lock:
            self.kept.append(event)
            self._write(event)

    def hear(self, rank: RankName, told: Mapping[str, object], lag: float) -> None:
        """Take an event of a rank, whose clock is so many seconds behind this process's."""
        facts = dict(told)
        kind = str(facts.pop("kind"))
        if kind != "steps":
            self.record(kind, rank, **facts)
            return
        steps = _steps(facts, self._zero + lag)
        with self._lock:
            where = (self.attempt, rank)
            _keep(self.steps.setdefault(where, []), steps, _together)
            facts = {name: value for name, value in steps._asdict().items() if value is not None}
            self._write({**self._head(steps.until, rank, kind), **facts})
            waited = self._comparison.add(rank, steps) if isinstance(rank, int) else None
            if waited is not None:
                _keep(self.waiting.setdefault(self.attempt, []), waited, _both)
                facts = {**waited._asdict(), "slowest": waited.slowest}
                self._write({**self._head(waited.time, None, "waiting"), **facts})

    def _head(self, when: float, rank: RankName | None, kind: str) -> Event:
        return {"time": round(when, 4), "attempt": self.attempt, "rank": rank, "kind": kind}

    def _write(self, event: Event) -> None:
        if self._writer is not None:
            self._writer.put(json.dumps(_finite(event)))

    def recent(self, attempt: int, rank: RankName, seconds: float) -> Steps | None:
        """Return the steps of a rank in the last seconds in which it told of some, as one."""
        with self._lock:
            told = list(self.steps.get((attempt, rank), ()))
        if not told:
            return None
        return functools.reduce(
            _together, (one for one in told if one.until > told[-1].until - seconds)
        )

    def waited(self, attempt: int, seconds: float = math.inf) -> dict[int, float]:
        """Return which part of the time each rank of an attempt has waited for others."""
        with self._lock:
            told = list(self.waiting.get(attempt, ()))
        recent = [one for one in told if one.time > told[-1].time - seconds]
        if not recent:
            return {}
        whole = functools.reduce(_both, recent)
        return {rank: waited / (whole.elapsed or 1.0) for rank, waited in whole.seconds.items()}

    def slowest(self, attempt: int | None = None) -> int | None:
        """Return the rank of an attempt that others have waited for; None if hardly for any."""
        waited = self.waited(self.attempt if attempt is None else attempt)
        if max(waited.values(), default=0.0) < LITTLE:
            return None
        return min(waited, key=lambda rank: waited[rank])

    def close(self) -> None:
        """Wait until all is written."""
        if self._writer is not None:
            self._writer.close()


class _Writer:
    """Writes lines beside all else: a disk that hangs keeps nobody from hearing the ranks."""

    def __init__(self, file: str, say: Callable[[str], None]) -> None:
        self._name, self._say = file, say
        try:
            self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ClusterError(
                f"--events {file} cannot be written: {error.strerror}; name another file"
            ) from None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dtk events", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        self._lines.put(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(_CLOSES)

    def _run(self) -> None:
        told, torn = False, b""
        while (line := self._lines.get()) is not None:
            data = torn + line.encode() + b"\n"
            try:
                written = os.write(self._file, data)
                torn = b"" if written == len(data) else b"\n"  # the next line is whole again
                why = "" if written == len(data) else os.strerror(errno.ENOSPC)
            except OSError as error:
                why = error.strerror or str(error)
            if why and not told:
                told = True
                self._say(f"--events {self._name} takes nothing: {why}. The job goes on without")
        os.close(self._file)


def _steps(told: Mapping[str, object], zero: float) -> Steps:
    """Read what a rank tells of its steps; fails with what it cannot be."""

    def number(name: str) -> float:
        return float(str(told[name]))

    def maybe(name: str) -> float | None:
        return number(name) if name in told else None

    def list_of(name: str) -> tuple[float, ...]:
        values = told[name]
        return tuple(map(float, values)) if isinstance(values, list) else ()

    steps = Steps(
        round(zero + number("since"), 4),
        round(zero + number("until"), 4),
        int(number("first")),
        int(number("last")),
        number("seconds"),
        number("communicating"),
        int(number("bytes")),
        int(number("memory")),
        int(number("epoch")),
        maybe("between") or 0.0,
        maybe("input"),
        int(number("samples")) if "samples" in told else None,
        maybe("loss"),
        maybe("rate"),
        maybe("batch"),
        list_of("begins"),
        list_of("took"),
    )
    if steps.last < steps.first:
        raise ValueError("no steps")
    return steps


def _keep(kept: list[_T], new: _T, join: Callable[[_T, _T], _T]) -> None:
    """Keep one more, and of too many each two as one."""
    kept.append(new)
    if len(kept) > _MOST:
        whole = len(kept) // 2 * 2
        kept[:] = [*map(join, kept[0:whole:2], kept[1:whole:2]), *kept[whole:]]


def _together(one: Steps, two: Steps) -> Steps:
    return two._replace(
        since=one.since,
        first=one.first,
        seconds=one.seconds + two.seconds,
        communicating=one.communicating + two.communicating,
        between=one.between + two.between,
        bytes=one.bytes + two.bytes,
        input=None if one.input is None or two.input is None else one.input + two.input,
        samples=None if one.samples is None or two.samples is None else one.samples + two.samples,
        begins=(),
        took=(),
    )


def _both(one: Waiting, two: Waiting) -> Waiting:
    return two._replace(
        first=one.first,
        elapsed=one.elapsed + two.elapsed,
        seconds={rank: one.seconds.get(rank, 0.0) + s for rank, s in two.seconds.items()},
    )


def _finite(value: object) -> object:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
