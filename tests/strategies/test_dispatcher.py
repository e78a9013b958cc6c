"""Which worker gets which part of a step, and what becomes of the results; without workers."""

from __future__ import annotations

import contextlib
import functools
import math

import hypothesis.strategies as draw
import keras
import pytest
from hypothesis import given

from dtk.parameter_server.batch_jobs import Batch, in_turn
from dtk.parameter_server.consistency_models import Async, SerialStart, Sync
from dtk.parameter_server.dispatcher import Dispatcher, Result, TaskQueue
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.train_jobs import Batcher, SerialPhase

# Parts, turns and results.


@given(draw.integers(1, 4), draw.data())
def test_parts_without_rows_are_for_nobody(slices, data):
    """One that was handed out would be computed; one that was never finished, waited for."""
    empty = data.draw(draw.sets(draw.integers(0, slices - 1), max_size=slices - 1))
    queue = TaskQueue(Schedule(0, slices))
    for name in ("first", "second"):
        queue.add(name, empty)
    for name in ("first", "second"):
        tasks = list(iter(lambda: queue.take(0), None))
        assert [task.part for task in tasks] == [p for p in range(slices) if p not in empty]
        for task in reversed(tasks):
            queue.finished(task, 0, Result(task.part))
        found = queue.next_complete()
        assert found.work == name
        assert [result.outputs for result in found.in_order()] == [task.part for task in tasks]
        queue.schedule.applied(found.number)
    assert queue.next_complete() is None and not queue.schedule.unfinished


def test_workers_take_turns_where_the_rows_are_theirs():
    """A fast worker's pipeline would be read further; the others would wait for a lost one."""
    lost = set()
    queue = TaskQueue(
        Schedule(math.inf, slices=2),
        lambda worker, number, work: in_turn(worker, number, 3, lost) or work == "anyone's",
    )
    for work in ("theirs", "theirs", "theirs", "anyone's"):
        queue.add(work)
    for worker in (0, 1, 2, 0):  # also from one step to the next
        assert queue.take((worker + 1) % 3) is None and queue.take((worker + 2) % 3) is None
        assert queue.take(worker).work == "theirs"
    lost.add(1)
    assert queue.take(2).work == "theirs"
    assert queue.take(0) is None
    assert [queue.take(2).work for _ in range(3)] == ["theirs", "anyone's", "anyone's"]


def test_the_result_that_comes_second_is_released():
    """Its gradient buffer would never be used again."""
    queue, released = TaskQueue(Schedule(0, spare=1)), []
    queue.add(None)
    first, backup = queue.take(0), queue.take(1)
    queue.finished(backup, 1, Result("backup", release=lambda: released.append("backup")))
    queue.finished(first, 0, Result("first", release=lambda: released.append("first")))
    assert [result.outputs for result in queue.next_complete().in_order()] == ["backup"]
    assert released == ["first"]


# The dispatcher.


class OneThread:
    """A pool whose two workers compute in turn, and only while the main thread waits."""

    def __init__(self):
        self.entries, self.turn = [], 0

    @contextlib.contextmanager
    def working(self, take):
        self.entries.append(take)
        yield
        self.entries.pop()

    def offer(self, change):
        change()

    @contextlib.contextmanager
    def asking_servers(self):
        yield

    def wait(self, until):
        while not (found := until()):
            self.turn = 1 - self.turn
            if piece := self.entries[-1](self.turn):
                piece.compute()()
        return found


@pytest.fixture
def recorded():
    """A dispatcher, and what happens to its work; it fails to apply the work "bad"."""
    events = []

    def compute(task, worker, schedule):
        release = functools.partial(events.append, f"release {task.work}.{task.part}")
        return Result((task.work, task.part), release=release)

    def apply(work, outputs, schedule):
        if work == "bad":
            raise KeyError(work)
        assert outputs == [(work, 0), (work, 1)]
        events.append(f"apply {work}, {schedule.finished} before")

    def new_queue():
        return TaskQueue(Schedule(math.inf, slices=2))

    return events, Dispatcher(OneThread(), new_queue, compute, apply)


def test_a_step_is_applied_before_its_buffers_are_free(recorded):
    """A buffer that is used again too early holds another step's gradient when it is applied."""
    events, dispatcher = recorded
    dispatcher.submit("a")
    assert events == ["apply a, 0 before", "release a.0", "release a.1"]
    assert dispatcher.schedule.finished == 1


@pytest.mark.parametrize("ahead", [0, 1, 3, math.inf])
def test_no_more_steps_are_under_way_than_allowed(recorded, ahead):
    """`fit` would read ahead of its workers without a bound."""
    events, dispatcher = recorded
    for number in range(6):
        dispatcher.submit(number, ahead=ahead)
        assert dispatcher.schedule.unfinished == min(ahead, number + 1)
    dispatcher.drain()
    assert not dispatcher.schedule.unfinished
    applied = [event for event in events if event.startswith("apply ")]
    assert applied == [f"apply {number}, {number} before" for number in range(6)]


def test_what_an_exception_left_is_forgotten(recorded):
    """The next call would apply steps of the one before."""
    events, dispatcher = recorded
    dispatcher.submit("bad", ahead=2)
    dispatcher.submit("left", ahead=2)
    with pytest.raises(KeyError):
        dispatcher.drain()
    before = dispatcher.schedule
    dispatcher.close()
    assert dispatcher.schedule is not before and not dispatcher.schedule.offered
    dispatcher.submit("new")
    assert [event for event in events if event.startswith("apply")] == ["apply new, 0 before"]
    before = dispatcher.schedule
    dispatcher.close()
    assert dispatcher.schedule is before, "nothing was left: its statistics go on"


# Batches.


def batch(number, spec="spec", rows=4):
    return Batch((f"rows {number}",), (rows,), rows, spec)


def test_batches_are_collected_for_a_push():
    """Given one by one, workers would push after every batch."""
    batcher = Batcher(3)
    assert [batcher.add(batch(number)) for number in range(2)] == [[], []]
    (joined,) = batcher.add(batch(2, rows=1))
    assert joined.parts == (("rows 0", "rows 1", "rows 2"),)
    assert joined.counts == (9,) and joined.rows == 9 and joined.share_of(0) == 1.0
    assert batcher.take() == []


def test_batches_of_another_kind_go_by_themselves():
    """One traced function takes a push, which is for batches of one specification."""
    batcher = Batcher(2)
    batcher.add(batch(0))
    assert [b.parts for b in batcher.add(batch(1, "other"))] == [(("rows 0",),)]
    assert [b.parts for b in batcher.take()] == [(("rows 1",),)]
    assert [b.spec for b in Batcher(1).add(batch(0))] == ["spec"]


def test_slices_without_rows():
    given = Batch(("a", "b", "c"), (3, 0, 1), 4, "spec")
    assert given.empty == [1]
    assert [given.share_of(part) for part in range(3)] == [0.75, 0.0, 0.25]


# The serial phase.


def phase(warm_start, iterations=1):
    optimizer = keras.optimizers.SGD()
    optimizer.build([])
    optimizer.iterations.assign(iterations)
    model = keras.Sequential()
    model.optimizer = optimizer
    consistency = Async(warm_start)
    return SerialPhase(consistency, model), Schedule.of(consistency, workers=2)


def test_serial_steps_end_with_their_epochs():
    serial, schedule = phase(SerialStart(epochs=2))
    ends = []
    for serial.epoch in range(3):
        ends.append(serial.ends_before(schedule))
    assert ends == [False, False, True]
    schedule.loosen(serial.tau)
    assert not serial.ends_before(schedule), "they have ended"


@pytest.mark.parametrize(
    "batches, rows, iterations, expected",
    [
        (1, 8, 1, [False, False, True]),
        (1, 16, 1, [False, True, True]),
        # In a run that is resumed, steps that were taken before would be serial once more.
        (1, 4, 4, [False, True, True]),
        (2, 8, 4, [True, True, True]),
    ],
)
def test_serial_steps_end_with_their_rows(batches, rows, iterations, expected):
    serial, schedule = phase(SerialStart(samples=20), iterations)
    ends = []
    for _ in range(3):
        serial.count(rows, batches, schedule)
        ends.append(serial.ends_before(schedule))
    assert ends == expected


def test_without_a_serial_start_there_is_no_serial_phase():
    serial = SerialPhase(Sync(), keras.Sequential())
    assert not serial.ends_before(Schedule.of(Sync(), workers=2))
