"""Scheduler: when a step may start. One rule covers synchronous, bounded-delay and asynchronous.

Step t may start once every step before t - tau is finished (Li et al., OSDI'14): a step is finished
once its gradients are in the weights. tau=0 is one step at a time, tau=inf never waits, and in
between no worker runs more than tau steps ahead of the slowest. Two workers, the second three times
slower:

    tau=0      0   1   2   3   4   5   6   7   8
    worker 0   |-0-|           |-2-|           |-4-|
    worker 1       |-----1-----|   |-----3-----|

    tau=1      0   1   2   3   4   5   6
    worker 0   |-0-|-2-|   |-3-|-5-|   |-6-|        step 3 waits for step 1, step 6 for step 4
    worker 1   |-----1-----|-----4-----|-----7-----|

    tau=inf    0   1   2   3   4   5   6
    worker 0   |-0-|-2-|-3-|-4-|-6-|-7-|
    worker 1   |-----1-----|-----5-----|

The scheduler does not compute, wait or read the time: a caller reports what happened, under a lock
if it has threads, and asks what may start.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from dtk.parameter_server.consistency_models import Consistency


@dataclass(frozen=True)
class StepSlice:
    """Slice of a step that was handed to one worker; no two are equal."""

    step: int  # 0, 1, 2, ... in the order offered
    slice: int  # which part of the step's batch, `0 <= slice < slices`
    copy: int  # 0 for the first attempt, 1 and up for backups and for retries after a loss


@dataclass
class Staleness:
    """Age of the weights that finished steps computed with.

    A step's staleness is the number of steps before it that were not applied when it was handed out
    (the worker reads the weights a little later, and may see some of them); its lag is the distance
    to the oldest of these. Neither exceeds tau.

    Without tau, lag has no bound: it grows with a slow worker. Staleness is bounded, but not by the
    W - 1 steps of the other workers: a worker that has handed in its gradients goes on while these
    wait for the main thread to apply them. But `fit` reads no further batch while more than
    `ahead` = 2 W steps are not applied, so a step misses at most 2 W others, however slow a worker
    or the main thread is. Weights that a worker keeps from an earlier fetch (see
    `dtk.exchange.Downpour`) also miss the steps applied since.
    """

    histogram: dict[int, int] = field(default_factory=dict)  # staleness -> number of steps
    lag: int = 0  # the largest lag of a step

    def add(self, staleness: int, lag: int) -> None:
        """Count one finished step."""
        self.histogram[staleness] = self.histogram.get(staleness, 0) + 1
        self.lag = max(self.lag, lag)

    @property
    def steps(self) -> int:
        """Steps counted."""
        return sum(self.histogram.values())

    @property
    def mean(self) -> float:
        """Mean staleness of a step; 0.0 before the first."""
        return sum(age * steps for age, steps in self.histogram.items()) / max(self.steps, 1)

    @property
    def max(self) -> int:
        """Largest staleness of a step; 0 before the first."""
        return max(self.histogram, default=0)


class _Running(NamedTuple):
    """Worker that computes a piece, and the age of its weights."""

    worker: int
    staleness: int
    lag: int


@dataclass
class _Started:
    """Step that was handed out, at least in part, and is not applied."""

    missing: set[int]  # slices without a result
    copies: list[int]  # how often each slice was handed out
    staleness: int = 0
    lag: int = 0


class Schedule:
    """Queue that hands out steps, piece by piece, under one parameter: tau.

    Every slice without a result is in exactly one state: not yet handed out, lost, or running on
    one worker or more. Only started steps and running pieces are stored, so the number of workers
    bounds memory, however many steps are offered and however far a silent worker is behind.

    Example:
        Step 2 waits for step 0 when tau=1:

        >>> schedule = Schedule(tau=1)
        >>> [schedule.offer() for _ in range(3)]
        [0, 1, 2]
        >>> first, second = schedule.take(worker=0), schedule.take(worker=1)
        >>> second, schedule.take(worker=2)
        (StepSlice(step=1, slice=0, copy=0), None)
        >>> schedule.returned(first, worker=0), schedule.complete(0)
        (True, True)
        >>> schedule.applied(0)
        >>> schedule.take(worker=2)
        StepSlice(step=2, slice=0, copy=0)
    """

    def __init__(self, tau: float, slices: int = 1, spare: int = 0) -> None:
        if not (tau >= 0 and slices >= 1 and spare >= 0):
            raise ValueError(f"{tau=}, {slices=}, {spare=}; expected >= 0, >= 1 and >= 0")
        self.tau = tau  # step t may start once every step before t - tau is applied
        self.slices = slices  # results that a step needs
        self._spare = spare
        self.offered = self.finished = self.dropped = self.retried = 0
        self.statistics = Staleness()
        # Step and slice that was never handed out; all before it were.
        self.next_slice = (0, 0)
        self._lost: list[tuple[int, int]] = []  # a heap of steps and slices
        self._started: dict[int, _Started] = {}  # in step order, since steps start in order
        self._running: dict[StepSlice, _Running] = {}  # longest-running first

    @classmethod
    def of(cls, consistency: Consistency, workers: int) -> Schedule:
        """Make the schedule of a consistency; serial at first if it has a warm start."""
        tau = 0 if consistency.warm_start else consistency.tau
        return cls(tau, consistency.slices(workers), consistency.spare)

    def loosen(self, tau: float) -> None:
        """Let steps from now on start earlier than before."""
        if tau < self.tau:
            raise ValueError(f"{tau=} after {self.tau}; a bound can be loosened, not tightened")
        self.tau = tau

    @property
    def waiting(self) -> int:
        """Number of offered steps with a slice to hand out, for the first time or after a loss."""
        fresh = self.next_slice[0]
        return self.offered - fresh + len({step for step, _ in self._lost if step < fresh})

    @property
    def unfinished(self) -> int:
        """Number of offered steps that are not applied."""
        return self.offered - self.finished

    def offer(self) -> int:
        """Add the next step."""
        self.offered += 1
        return self.offered - 1

    def take(self, worker: int) -> StepSlice | None:
        """Hand out the next piece for a worker.

        Lost pieces come first, then new ones in order of step and slice, then backups.
        """
        if self._lost:
            self.retried += 1
            return self._hand_out(heapq.heappop(self._lost), worker)
        if self._may_start():
            step, part = piece = self.next_slice
            self.next_slice = (step, part + 1) if part + 1 < self.slices else (step + 1, 0)
            return self._hand_out(piece, worker)
        backup = self._backup(worker)
        return None if backup is None else self._hand_out(backup, worker)

    def returned(self, piece: StepSlice, worker: int, older: int = 0) -> bool:
        """Note that a worker has computed its piece; return whether its result is needed."""
        run = self._release(piece, worker)
        step = self._started.get(piece.step)
        if step is None or piece.slice not in step.missing:
            self.dropped += 1
            return False
        step.missing.remove(piece.slice)
        step.staleness = max(step.staleness, run.staleness + older)
        step.lag = max(step.lag, run.lag + older)
        return True

    def lost(self, piece: StepSlice, worker: int) -> None:
        """Note that a worker died with a piece; hand it out again if its result is needed."""
        self._release(piece, worker)
        step, needed = self._started.get(piece.step), (piece.step, piece.slice)
        if step is None or piece.slice not in step.missing:
            return
        if not any((other.step, other.slice) == needed for other in self._running):
            heapq.heappush(self._lost, needed)

    def complete(self, step: int) -> bool:
        """Return whether every slice of a step has a result and the step is not applied yet."""
        return step in self._started and not self._started[step].missing

    def applied(self, step: int) -> None:
        """Note that a step's gradients are in the weights: it is finished."""
        if step not in self._started:
            how = "twice" if 0 <= step < self.next_slice[0] else "before it was started"
            raise RuntimeError(f"step {step} was applied {how}")
        if missing := self._started[step].missing:
            raise RuntimeError(f"step {step} was applied without slices {sorted(missing)}")
        done = self._started.pop(step)
        self.finished += 1
        self.statistics.add(done.staleness, done.lag)

    def take_statistics(self) -> Staleness:
        """Return the staleness counted since the last call, and begin to count anew."""
        taken, self.statistics = self.statistics, Staleness()
        return taken

    def _may_start(self) -> bool:
        step = self.next_slice[0]
        oldest = next(iter(self._started), step)
        return step < self.offered and step - oldest <= self.tau

    def _backup(self, worker: int) -> tuple[int, int] | None:
        """Choose a slice of the oldest unfinished step that this worker may repeat.

        When that step completes, workers that still compute a piece of it, or of an earlier step,
        are busy for nothing. With one piece per worker there are at most `spare` of them, so N of N
        + spare workers are free for the next step. Up to `spare` silent workers, with any number of
        pieces, stop no step. The slice with the fewest copies comes first; among equals, the one
        that has run longest.
        """
        if not self._spare or not self._started:
            return None
        oldest, missing = next((step, started.missing) for step, started in self._started.items())
        busy: set[int] = set()
        copies: dict[int, list[int]] = {}  # slice -> workers
        for piece, run in self._running.items():
            if piece.step <= oldest:
                busy.add(run.worker)
            if piece.step == oldest and piece.slice in missing:
                copies.setdefault(piece.slice, []).append(run.worker)
        useful = [
            part
            for part, workers in copies.items()
            if worker not in workers and len(workers) <= self._spare
        ]
        if len(busy) - len(missing) >= self._spare or not useful:
            return None
        return oldest, min(useful, key=lambda part: len(copies[part]))

    def _hand_out(self, wanted: tuple[int, int], worker: int) -> StepSlice:
        step, part = wanted
        if step not in self._started:
            self._started[step] = _Started(set(range(self.slices)), [0] * self.slices)
        started = self._started[step]
        piece = StepSlice(step, part, started.copies[part])
        started.copies[part] += 1
        before = [other for other in self._started if other < step]
        lag = step - before[0] if before else 0
        self._running[piece] = _Running(worker, staleness=len(before), lag=lag)
        return piece

    def _release(self, piece: StepSlice, worker: int) -> _Running:
        run = self._running.get(piece)
        if run is None or run.worker != worker:
            owner = "nobody" if run is None else f"worker {run.worker}"
            raise RuntimeError(f"worker {worker} gave back {piece}, but {owner} has it")
        return self._running.pop(piece)
