"""Which worker gets which part of a step, and what becomes of the results; without workers."""

from __future__ import annotations

import contextlib
import functools
import math

import hypothesis.strategies as draw
import keras
import pytest
from hypothesis import given

from dtk.parameter_server.consistency_models import Async, SerialStart, Sync
from dtk.parameter_server.dispatch import Dispatcher
from dtk.parameter_server.jobs.batch_dispatch import SerialPhase
from dtk.parameter_server.jobs.batches import Batch, Batcher
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import InTurns, Result, TaskQueue

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
        assert [result.outputs for result in found.results] == [task.part for task in tasks]
        queue.schedule.applied(found.number)
    assert queue.next_complete() is None and not queue.schedule.unfinished


def test_workers_take_turns_where_the_rows_are_theirs():
    """A fast worker's pipeline would be read further than a slow one's."""
    turns = InTurns(3, set(), lambda work: work == "theirs")
    queue = TaskQueue(Schedule(math.inf, slices=2), turns)
    for work in ("theirs", "theirs", "anyone's"):
        queue.add(work)
    for worker in (0, 1, 2, 0):  # also from one step to the next
        assert queue.take((worker + 1) % 3) is None and queue.take((worker + 2) % 3) is None
        assert queue.take(worker).work == "theirs"
    assert queue.take(2).work == queue.take(2).work == "anyone's"


def test_the_turn_of_a_lost_worker_is_anyones():
    """The others would wait for one that does not come back."""
    lost = {1}
    queue = TaskQueue(Schedule(math.inf), InTurns(2, lost, lambda work: True))
    for _ in range(4):
        queue.add(None)
    assert [queue.take(0).piece.step, queue.take(0).piece.step] == [0, 1]
    lost.clear()
    assert queue.take(0).piece.step == 2 and queue.take(0) is None


def test_the_result_that_comes_second_is_released():
    """Its gradient buffer would never be used again."""
    queue, released = TaskQueue(Schedule(0, spare=1)), []
    queue.add(None)
    first, backup = queue.take(0), queue.take(1)
    queue.finished(backup, 1, Result("backup", release=lambda: released.append("backup")))
    queue.finished(first, 0, Result("first", release=lambda: released.append("first")))
    assert [result.outputs for result in queue.next_complete().results] == ["backup"]
    assert released == ["first"]


# The dispatcher.


class OneThread:
    """A pool whose two workers compute in turn, and only while the main thread waits."""

    def __init__(self):
        self.entries, self.turn = [], 0

    @contextlib.contextmanager
    def working(self, work, compute):
        self.entries.append((work, compute))
        yield self
        self.entries.pop()

    def offer(self, change):
        return change()

    @contextlib.contextmanager
    def asking_servers(self):
        yield

    def wait(self, until):
        while not (found := until()):
            work, compute = self.entries[-1]
            self.turn = 1 - self.turn
            if task := work.take(self.turn):
                work.finished(task, self.turn, compute(task, self.turn))
        return found


class Recording:
    """A job that notes what happens to the work; fails to apply the work "bad"."""

    def __init__(self):
        self.events = []

    def compute(self, task, worker, schedule):
        release = functools.partial(self.events.append, f"release {task.work}.{task.part}")
        return Result((task.work, task.part, worker), release=release)

    def apply(self, work, results, schedule):
        if work == "bad":
            raise KeyError(work)
        assert [result.outputs[:2] for result in results] == [(work, 0), (work, 1)]
        self.events.append(f"apply {work}, {schedule.finished} before")

    def applied(self, schedule):
        self.events.append(f"applied {schedule.finished}")


def recorded(ahead=0):
    job = Recording()
    dispatcher = Dispatcher(
        OneThread(),
        lambda: TaskQueue(Schedule(math.inf, slices=2)),
        job,
        lambda schedule: ahead,
        job.applied,
    )
    return job, dispatcher


def test_a_step_is_applied_before_its_buffers_are_free():
    """A buffer that is used again too early holds another step's gradient when it is applied."""
    job, dispatcher = recorded()
    dispatcher.submit("a")
    assert job.events == ["apply a, 0 before", "release a.0", "release a.1", "applied 1"]


@given(draw.integers(0, 3))
def test_no_more_steps_are_under_way_than_allowed(ahead):
    """`fit` would read ahead of its workers without a bound."""
    job, dispatcher = recorded(ahead)
    for number in range(6):
        dispatcher.submit(number)
        assert dispatcher.schedule.unfinished == min(ahead, number + 1)
    dispatcher.drain()
    assert not dispatcher.schedule.unfinished
    applied = [event for event in job.events if event.startswith("apply ")]
    assert applied == [f"apply {number}, {number} before" for number in range(6)]


def test_steps_that_are_known_are_applied_in_one_call():
    job, dispatcher = recorded()
    dispatcher.run(range(3))
    applied = [event for event in job.events if event.startswith("apply ")]
    assert applied == [f"apply {number}, {number} before" for number in range(3)]
    assert not dispatcher.schedule.unfinished


def test_what_an_exception_left_is_forgotten():
    """The next call would apply steps of the one before."""
    job, dispatcher = recorded(ahead=2)
    dispatcher.submit("bad")
    dispatcher.submit("left")
    with pytest.raises(KeyError):
        dispatcher.drain()
    before = dispatcher.schedule
    dispatcher.close()
    assert dispatcher.schedule is not before and not dispatcher.schedule.offered
    dispatcher.submit("new")
    dispatcher.drain()
    assert [event for event in job.events if event.startswith("apply")][0] == "apply new, 0 before"
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
    assert given.empty == [1] and given.holders == 2.0
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
    assert [serial.ends_before(schedule)] + [
        serial.new_epoch(epoch) or serial.ends_before(schedule) for epoch in range(3)
    ] == [False, False, False, True]
    schedule.loosen(serial.tau)
    assert not serial.ends_before(schedule), "they have ended"


def test_serial_steps_end_with_their_rows():
    serial, schedule = phase(SerialStart(samples=20))
    ends = []
    for _ in range(3):
        serial.count(8, 1, schedule)
        ends.append(serial.ends_before(schedule))
    assert ends == [False, False, True]


@pytest.mark.parametrize("batches, rows", [(1, 8), (2, 16)])
def test_rows_of_a_run_that_is_resumed_count(batches, rows):
    """Steps that were taken before would be serial once more; two batches were two steps."""
    serial, schedule = phase(SerialStart(samples=40), iterations=4)
    serial.count(rows, batches, schedule)
    assert serial.ends_before(schedule) == (3 * 8 + rows >= 40)


def test_without_a_serial_start_there_is_no_serial_phase():
    serial = SerialPhase(Sync(), keras.Sequential())
    assert not serial.ends_before(Schedule.of(Sync(), workers=2))
