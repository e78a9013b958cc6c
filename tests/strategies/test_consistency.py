"""One scheduler for all consistency models: what may start when, and what counts.

First each rule by example, then the same rules on random traces: `AnyTrace` lets hypothesis choose
who asks, returns, dies and applies, in any order, and keeps its own books to compare with.
"""

from __future__ import annotations

import dataclasses
import doctest
import math
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from dtk.parameter_server import consistency_models, scheduler
from dtk.parameter_server.consistency_models import Async, BoundedDelay, Sync, ahead, parse
from dtk.parameter_server.scheduler import Schedule, StepSlice

NEVER = math.inf  # the time of a worker that takes a piece and is never heard of again

# --- what users write -----------------------------------------------------------------------------


def test_parse_takes_names_and_values():
    assert (parse("sync"), parse("async")) == (Sync(), Async())
    for value in (Sync(backup_workers=2), BoundedDelay(tau=4), Async()):
        assert parse(value) is value


@pytest.mark.parametrize("wrong", ["Sync", "bounded", "", None, 4, BoundedDelay, ["sync"], object])
def test_parse_names_what_was_given_and_what_is_accepted(wrong):
    with pytest.raises(ValueError) as error:
        parse(wrong)
    assert str(error.value).startswith(f"consistency={wrong!r}; expected ")
    for accepted in ('"sync"', '"async"', "Sync(", "BoundedDelay("):
        assert accepted in str(error.value)


# True is an int to Python, and BoundedDelay(True) would quietly train with tau=1
@pytest.mark.parametrize("wrong", [-1, True, False, 1.0, math.inf, "2", None])
@pytest.mark.parametrize("make, name", [(BoundedDelay, "tau"), (Sync, "backup_workers")])
def test_a_bad_number_is_named(make, name, wrong):
    with pytest.raises(ValueError) as error:
        make(wrong)
    assert str(error.value).startswith(f"{name}={wrong!r}; expected 0 or more")


@pytest.mark.parametrize(
    "value, tau, slices, spare",
    [
        (Sync(), 0, 3, 0),
        (Sync(backup_workers=2), 0, 1, 2),
        (BoundedDelay(0), 0, 1, 0),
        (BoundedDelay(4), 4, 1, 0),
        (Async(), math.inf, 1, 0),
    ],
)
def test_what_a_consistency_means_for_three_workers(value, tau, slices, spare):
    assert (value.tau, value.slices(3), value.spare) == (tau, slices, spare)
    schedule = Schedule.of(value, workers=3)
    schedule.offer()
    assert sum(schedule.take(worker) is not None for worker in range(5)) == slices + spare


@pytest.mark.parametrize(
    "value, workers, said",
    [
        *((value, 0, "workers=0; expected 1 or more") for value in (Sync(), BoundedDelay(4))),
        (Async(), -1, "workers=-1; expected 1 or more"),
        (Sync(2), 1, "backup_workers=2 leaves no worker of 1 "),
        (Sync(2), 2, "backup_workers=2 leaves no worker of 2 "),
    ],
)
def test_too_few_workers_are_refused(value, workers, said):
    for refuse in (Schedule.of, type(value).slices):
        with pytest.raises(ValueError, match=said):
            refuse(value, workers)


@pytest.mark.parametrize("wrong", [{"tau": -1}, {"slices": 0}, {"spare": -1}, {"tau": math.nan}])
def test_a_schedule_refuses_numbers_that_would_never_finish(wrong):
    with pytest.raises(ValueError, match="expected"):
        Schedule(**{"tau": 0, **wrong})


def test_the_examples_in_the_docstrings():
    failed, tried = doctest.testmod(scheduler)
    assert not failed
    assert tried > 5


# --- a simulation ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Ran:
    """A piece that came back: who computed it, from when to when, and whether it counted."""

    worker: int
    piece: StepSlice
    start: float
    end: float
    counted: bool


def simulate(schedule: Schedule, steps: int, durations) -> list[Ran]:
    """Run until all steps are applied or nobody can go on; steps apply as soon as complete.

    `durations` has per worker the time of a piece, or an iterator of times. Whoever is idle longest
    asks first.
    """
    times = [iter(lambda t=t: t, object()) if isinstance(t, int | float) else t for t in durations]
    idle = list(range(len(times)))
    busy: list[tuple[float, int, float, StepSlice]] = []
    ran, now = [], 0.0
    for _ in range(steps):
        schedule.offer()
    while schedule.unfinished:
        for worker in list(idle):
            if piece := schedule.take(worker):
                idle.remove(worker)
                busy.append((now + next(times[worker]), worker, now, piece))
        if not busy or min(busy)[0] == NEVER:
            break
        now = min(busy)[0]
        for entry in sorted(entry for entry in busy if entry[0] == now):
            busy.remove(entry)
            _, worker, start, piece = entry
            counted = schedule.returned(piece, worker)
            ran.append(Ran(worker, piece, start, now, counted))
            if counted and schedule.complete(piece.step):
                schedule.applied(piece.step)
            idle.append(worker)
    return ran


# --- when a step may start ------------------------------------------------------------------------


def taken(schedule: Schedule, *workers: int) -> list[tuple[int, int] | None]:
    pieces = [schedule.take(worker) for worker in workers]
    return [piece and (piece.step, piece.slice) for piece in pieces]


def finish(schedule: Schedule, piece: StepSlice | None, worker: int) -> None:
    assert piece is not None
    assert schedule.returned(piece, worker)
    if schedule.complete(piece.step):
        schedule.applied(piece.step)


def offered(schedule: Schedule, steps: int) -> Schedule:
    assert [schedule.offer() for _ in range(steps)] == list(range(steps))
    return schedule


def test_pieces_come_in_order_of_step_and_slice():
    schedule = offered(Schedule(tau=1, slices=3), 2)
    assert taken(schedule, *range(6)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_tau_more_steps_start_before_the_first_is_finished(tau):
    schedule = offered(Schedule(tau), 9)
    pieces = [schedule.take(worker) for worker in range(9)]
    assert [piece is not None for piece in pieces] == [True] * (tau + 1) + [False] * (8 - tau)


# --- several slices, and losses -------------------------------------------------------------------


def test_lost_pieces_are_first_in_line_and_in_order():
    schedule = offered(Schedule(tau=1, slices=2), 3)
    pieces = [schedule.take(worker) for worker in range(3)]
    schedule.lost(pieces[2], 2)
    schedule.lost(pieces[0], 0)
    assert [schedule.take(worker) for worker in (3, 4, 5)] == [
        StepSlice(step=0, slice=0, copy=1),
        StepSlice(step=1, slice=0, copy=1),
        StepSlice(step=1, slice=1, copy=0),
    ]
    assert schedule.retried == 2


# --- backup workers -------------------------------------------------------------------------------


def test_the_longest_running_slice_is_repeated_and_the_first_result_counts():
    schedule = offered(Schedule(tau=0, slices=2, spare=1), 2)
    slow, other = schedule.take(0), schedule.take(1)
    backup = schedule.take(2)
    assert backup == StepSlice(step=0, slice=0, copy=1)
    assert schedule.take(3) is None, "one backup at a time"
    assert schedule.returned(backup, 2)
    finish(schedule, other, 1)
    assert taken(schedule, 1, 2) == [(1, 0), (1, 1)], "the next step does not wait for worker 0"
    assert not schedule.returned(slow, 0), "its slice has counted"
    assert schedule.dropped == 1


def test_new_work_comes_before_backups():
    schedule = offered(Schedule(tau=1, slices=1, spare=1), 2)
    assert taken(schedule, 0, 1, 2) == [(0, 0), (1, 0), (0, 0)]


def test_the_slice_with_the_fewest_copies_is_repeated_first():
    schedule = offered(Schedule(tau=0, slices=2, spare=3), 1)
    assert taken(schedule, *range(6)) == [(0, 0), (0, 1), (0, 0), (0, 1), (0, 0), None]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 25), st.randoms(use_true_random=False))
def test_n_workers_are_free_when_a_step_completes(slices, spare, steps, random):
    """Limiting only the backups that still run let a step end with fewer than N workers free.

    N=2, b=1, worker 0 slow: worker 2 repeats slice 0 and comes back; a second backup, of slice 1,
    would run on into the next step next to worker 0, and leave one worker for its two slices.
    """
    workers = slices + spare
    durations = [iter(lambda: random.choice([1, 2, 3, 10, 50]), None) for _ in range(workers)]
    ran = simulate(Schedule(tau=0, slices=slices, spare=spare), steps, durations)
    ends = {one.piece.step: one.end for one in ran if one.counted}
    for one in ran:
        if one.piece.copy == 0:
            assert one.start == ends.get(one.piece.step - 1, 0), "all slices start at once"


# --- counting -------------------------------------------------------------------------------------


def as_fit_does(schedule, workers, choices):
    """Batches are offered as `fit` offers them, while workers and the main thread take any turns.

    Each choice is a worker, who hands in what it has and takes more, or the main thread, which
    applies a step that is complete, or offers one when it may.
    """
    has, complete = {}, []
    for choice in choices:
        if choice < workers:
            if (piece := has.pop(choice, None)) is not None and schedule.returned(piece, choice):
                complete.append(piece.step)
            if (piece := schedule.take(choice)) is not None:
                has[choice] = piece
        elif schedule.unfinished <= ahead(schedule.tau, workers):
            schedule.offer()
        elif complete:
            schedule.applied(complete.pop(0))
    for step in complete:
        schedule.applied(step)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.sampled_from([1, 3, math.inf]), st.data())
def test_staleness_never_exceeds_what_fit_lets_wait(workers, tau, data):
    choices = data.draw(st.lists(st.integers(0, workers), min_size=20, max_size=120))
    schedule = Schedule(tau)
    as_fit_does(schedule, workers, choices)
    assert schedule.statistics.max <= min(tau, 2 * workers)
    assert schedule.statistics.lag <= tau


def test_statistics_begin_anew_when_taken():
    """Per-epoch logs must not average over all epochs before."""
    schedule = Schedule(math.inf)
    simulate(schedule, 10, [1, 1, 1])
    first = schedule.take_statistics()
    assert (first.steps, first.max) == (10, 2)
    assert first.mean == pytest.approx((3 * 1 + 3 * 2) / 10), "0, 1, 2, 0, 1, ..."
    empty = schedule.statistics
    assert (empty.steps, empty.mean, empty.max, empty.lag, empty.histogram) == (0, 0.0, 0, 0, {})
    simulate(schedule, 4, [1])
    assert schedule.take_statistics().histogram == {0: 4}
    assert first.steps == 10, "what was taken does not change"


@pytest.mark.parametrize("durations", [[1, 2, 3], [1, 1, NEVER]])
def test_memory_stays_bounded(durations):
    """A set of the steps applied past a silent worker would grow by one entry a step."""
    schedule = Schedule(math.inf)
    sizes = []
    for _ in range(3):
        simulate(schedule, 3000, durations)
        sizes.append(len(pickle.dumps(schedule)))
        if NEVER in durations:
            durations = [1, 1]  # the silent one still has its piece
    assert schedule.finished > 8900
    assert max(sizes) < 2000
    assert sizes[2] - sizes[1] < 50, "numbers may get longer, not more"


# --- misuse ---------------------------------------------------------------------------------------


def test_only_who_has_a_piece_may_give_it_back():
    schedule = offered(Schedule(tau=0), 1)
    piece = schedule.take(3)
    for give_back in (schedule.returned, schedule.lost):
        with pytest.raises(RuntimeError, match="worker 1 gave back .*, but worker 3 has it"):
            give_back(piece, 1)
        with pytest.raises(RuntimeError, match="but nobody has it"):
            give_back(StepSlice(step=0, slice=0, copy=1), 3)
    assert schedule.returned(piece, 3)
    for give_back in (schedule.returned, schedule.lost):
        with pytest.raises(RuntimeError, match="but nobody has it"):
            give_back(piece, 3)
    assert schedule.dropped == 0, "misuse is not counted"


def test_a_step_is_applied_once_and_when_complete():
    schedule = offered(Schedule(tau=0, slices=2), 2)
    for step in (-1, 0, 1, 7):
        with pytest.raises(RuntimeError, match=f"step {step} was applied before it was started"):
            schedule.applied(step)
    pieces = [schedule.take(0), schedule.take(1)]
    assert schedule.returned(pieces[1], 1)
    with pytest.raises(RuntimeError, match=r"step 0 was applied without slices \[0\]"):
        schedule.applied(0)
    finish(schedule, pieces[0], 0)
    with pytest.raises(RuntimeError, match="step 0 was applied twice"):
        schedule.applied(0)
    assert schedule.finished == 1


# --- any trace ------------------------------------------------------------------------------------

MODES = st.one_of(
    st.builds(Sync, st.integers(0, 3)),
    st.builds(BoundedDelay, st.integers(0, 5)),
    st.just(Async()),
)
KNOBS = st.tuples(  # more than the modes use: several slices and backups with any tau
    st.one_of(st.just(0), st.integers(1, 5), st.just(math.inf)),
    st.integers(1, 3),
    st.integers(0, 3),
)
WORKERS = st.integers(0, 5)


class AnyTrace(RuleBasedStateMachine):
    """Workers that ask, return, die and come back in any order, against plain books."""

    @initialize(knobs=KNOBS)
    def begin(self, knobs):
        self.tau, self.slices, self.spare = knobs
        self.schedule = Schedule(*knobs)
        self.having: dict[StepSlice, tuple[int, set[int]]] = {}  # worker, steps missing when taken
        self.seen: set[StepSlice] = set()
        self.results = {}  # (step, slice) -> steps missing, of what counted
        self.applied: list[int] = []
        self.returned = self.losses = 0

    # what hypothesis chooses from

    @rule(count=st.integers(1, 4))
    def offer(self, count):
        for _ in range(count):
            assert self.schedule.offer() == self.schedule.offered - 1

    @rule(worker=WORKERS)
    def take(self, worker):
        before = self.schedule.waiting
        piece = self.schedule.take(worker)
        if piece is None:
            assert not (self.tau == math.inf and before), "async waited"
            return
        assert piece not in self.seen, "two pieces are equal"
        assert piece.step < self.schedule.offered
        assert 0 <= piece.slice < self.slices
        assert (piece.step, piece.slice) not in self.results, "work that cannot count any more"
        missing = set(range(piece.step)) - set(self.applied)
        assert all(piece.step - step <= self.tau for step in missing), "tau was exceeded"
        same = [p for p in self.having if (p.step, p.slice) == (piece.step, piece.slice)]
        if same:
            assert self.spare, "repeated without backup workers"
            assert len(same) <= self.spare
            assert worker not in {self.having[p][0] for p in same}, "repeats its own work"
            assert not set(range(piece.step)) - set(self.applied), "not the oldest step"
        self.seen.add(piece)
        self.having[piece] = (worker, missing)

    @precondition(lambda self: self.having)
    @rule(data=st.data())
    def come_back(self, data):
        self._come_back(data.draw(st.sampled_from(list(self.having))))

    @precondition(lambda self: self.having)
    @rule(data=st.data())
    def die(self, data):
        dead = data.draw(st.sampled_from(sorted({worker for worker, _ in self.having.values()})))
        for piece in [p for p, (worker, _) in self.having.items() if worker == dead]:
            del self.having[piece]
            self.schedule.lost(piece, dead)
            self.losses += 1

    @precondition(lambda self: self._complete())
    @rule(data=st.data())
    def apply(self, data):
        self._apply(data.draw(st.sampled_from(self._complete())))

    def teardown(self):
        """Whatever happened, one worker that answers finishes everything.

        As many silent ones as there are backup workers may keep their pieces for ever.
        """
        if not hasattr(self, "schedule"):
            return
        silent = sorted({worker for worker, _ in self.having.values()})[: self.spare]
        for _ in range(10_000):
            if not self.schedule.unfinished:
                break
            answering = [p for p, (worker, _) in self.having.items() if worker not in silent]
            if complete := self._complete():
                self._apply(complete[0])
            elif answering:
                self._come_back(answering[0])
            else:
                held = len(self.having)
                self.take(99)
                assert len(self.having) > held, "stuck"
        assert sorted(self.applied) == list(range(self.schedule.offered))
        if self.tau == 0:
            assert self.applied == sorted(self.applied), "not serial"
        self.check_books()

    # books

    def _complete(self):
        steps = Counter(step for step, _ in self.results)
        return [
            step
            for step, count in steps.items()
            if count == self.slices and step not in self.applied
        ]

    def _come_back(self, piece):
        worker, missing = self.having.pop(piece)
        self.returned += 1
        first = (piece.step, piece.slice) not in self.results
        assert self.schedule.returned(piece, worker) == first
        if first:
            assert piece.step not in self.applied
            self.results[piece.step, piece.slice] = missing

    def _apply(self, step):
        assert self.schedule.complete(step)
        self.schedule.applied(step)
        assert not self.schedule.complete(step)
        self.applied.append(step)

    @invariant()
    def check_books(self):
        if not hasattr(self, "schedule"):
            return
        schedule = self.schedule
        assert schedule.finished == len(self.applied) == len(set(self.applied))
        assert schedule.unfinished == schedule.offered - len(self.applied)
        assert schedule.dropped + len(self.results) == self.returned
        assert schedule.retried <= self.losses
        complete = set(self._complete())
        for step in range(schedule.offered):
            assert schedule.complete(step) == (step in complete)
        handed_out = {(p.step, p.slice) for p in self.having} | set(self.results)
        waiting = [
            step
            for step in range(schedule.offered)
            if any((step, part) not in handed_out for part in range(self.slices))
        ]
        assert schedule.waiting == len(waiting), "a slice is neither waiting, running nor counted"
        ages = {
            step: max((self.results[step, part] for part in range(self.slices)), key=len)
            for step in self.applied
        }
        assert schedule.statistics.histogram == Counter(len(age) for age in ages.values())
        lags = [step - min(age, default=step) for step, age in ages.items()]
        assert schedule.statistics.lag == max(lags, default=0)
        assert schedule.statistics.max <= schedule.statistics.lag <= self.tau


TestAnyTrace = AnyTrace.TestCase
TestAnyTrace.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_weights_fetched_earlier_make_a_step_staler():
    schedule = Schedule(math.inf)
    for _ in range(2):
        schedule.offer()
    first, second = schedule.take(0), schedule.take(1)
    for piece, worker, older in ((first, 0, 0), (second, 1, 3)):
        assert schedule.returned(piece, worker, older)
        schedule.applied(piece.step)
    assert schedule.statistics.histogram == {0: 1, 4: 1} and schedule.statistics.lag == 4


def test_a_schedule_is_loosened_and_never_tightened():
    schedule = Schedule(0)
    for _ in range(3):
        schedule.offer()
    assert schedule.take(0) is not None and schedule.take(1) is None
    schedule.loosen(1)
    assert schedule.take(1) is not None and schedule.take(2) is None
    with pytest.raises(ValueError, match="can be loosened, not tightened"):
        schedule.loosen(0)


@pytest.mark.parametrize("arguments", [{}, {"epochs": 1, "samples": 1}, {"epochs": -1}])
def test_a_warm_start_has_one_length(arguments):
    with pytest.raises(ValueError, match="expected"):
        consistency_models.SerialStart(**arguments)


def test_a_warm_start_is_over_with_the_last_serial_epoch_or_row():
    epochs, samples = (
        consistency_models.SerialStart(epochs=2),
        consistency_models.SerialStart(samples=100),
    )
    assert [epochs.is_over(epoch, 10_000) for epoch in range(4)] == [False, False, True, True]
    assert [samples.is_over(9, rows) for rows in (0, 99, 100)] == [False, False, True]


@pytest.mark.parametrize("make", [Async, lambda warm_start: BoundedDelay(2, warm_start)])
def test_the_warm_start_of_an_exchange_is_not_taken_for_a_serial_one(make):
    """It was, without a word, until it failed in the middle of `fit`."""
    from dtk.exchange import Dense, WarmStart

    assert make(warm_start=consistency_models.SerialStart(epochs=1)).warm_start.epochs == 1
    with pytest.raises(TypeError, match=r"expected dtk.strategies.SerialStart\(epochs=1\)"):
        make(warm_start=WarmStart(Dense(), samples=10))


def test_a_serial_start_is_not_taken_for_an_exchange():
    from dtk.strategies import AllReduceStrategy, parameter_server

    start = consistency_models.SerialStart(samples=64)
    with pytest.raises(TypeError, match="no exchange: .* use dtk.exchange.WarmStart"):
        AllReduceStrategy(communicator="local", exchange=start)
    with pytest.raises(TypeError, match="no exchange: .*warm_start=SerialStart"):
        parameter_server._checked(start, Async())
