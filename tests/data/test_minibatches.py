"""The order of rows depends on a seed, and on nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.communicators import create
from dtk.data import PartitionedMinibatches
from dtk.data.sharing import permutation
from dtk.errors import DisagreementError
from dtk.strategies import undistributed

from data.bodies import Twin
from support import bodies, cases

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)


def pool(workers, rows=17, **kwargs):
    """One reader per rank."""
    ranks = [Twin(rank, workers) for rank in range(workers)]
    return [PartitionedMinibatches(np.arange(rows), group, **kwargs) for group in ranks]


def read(readers, sizes, seen=()):
    """`seen` and the rows of all ranks, with the sizes taken in turn until the end."""
    joined, minibatches = list(seen), 0
    while True:
        taken = [reader.next_minibatch(sizes[minibatches % len(sizes)]) for reader in readers]
        if taken[0] is None:
            assert taken == [None] * len(readers)
            return joined
        minibatches += 1
        mine = [minibatch.data.tolist() for minibatch in taken]
        assert {minibatch.rows for minibatch in taken} == {sum(map(len, mine))}
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
        joined += [row for part in mine for row in part]
        ends = {minibatch.ends_sweep for minibatch in taken}
        assert ends == {len(joined) % 17 == 0}


def sweep_order(rows, seed, sweep):
    return np.random.RandomState([seed, sweep]).permutation(rows)


EXPECTED = [row for sweep in range(3) for row in sweep_order(17, 5, sweep)]


@settings(deadline=None)
@given(SIZES, st.integers(1, 4))
def test_the_order_does_not_depend_on_sizes_or_workers(sizes, workers):
    assert read(pool(workers, seed=5, sweeps=3), sizes) == EXPECTED


def test_every_size_and_number_of_workers_there_is():
    for size in range(1, 19):
        for workers in (1, 2, 3):
            assert read(pool(workers, seed=5, sweeps=3), [size]) == EXPECTED


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(0, 30), st.integers(1, 3), st.integers(1, 3))
def test_the_order_does_not_depend_on_where_the_job_was_stopped(before, after, stop, had, has):
    """Nor on how many workers it had before."""
    first = pool(had, seed=5, sweeps=3)
    taken = [
        part
        for step in range(stop)
        for part in [reader.next_minibatch(before[step % len(before)]) for reader in first]
        if part is not None
    ]
    seen = [row for part in taken for row in part.data.tolist()]
    state = json.loads(json.dumps(first[0].get_state()))
    again = pool(has, seed=9, sweeps=3)
    for reader in again:
        reader.set_state(state)
        assert reader.position == len(seen)
    assert read(again, after, seen) == EXPECTED


# What CNTK's tests say of its readers, in microsoft/CNTK: Tests/UnitTests/ReaderTests/
# ReaderLibTests.cpp (R), Tests/UnitTests/V2LibraryTests/MinibatchSourceTest.cpp (M), and
# bindings/python/cntk/io/tests/io_tests.py (P).


@pytest.mark.parametrize(
    "rows, sweeps, size, expected",
    [
        (10, 2, 3, [3, 3, 3, 1] * 2),  # R, TestRandomization_TwoSweeps
        (10, 2, 7, [7, 3] * 2),
        (10, 2, 21, [10] * 2),
        (447, 1, 128, [128] * 3 + [63]),  # R, CheckEpochBoundarySingleWorker
        (603, 1, 603, [603]),  # M, TestEndOfSweepFlag
        (603, 1, 1000, [603]),
        (603, 1, 100, [100] * 6 + [3]),
        (4, 1, 100, [4]),  # P, test_one_sweep
        # P, test_max_sweeps, but there 5, 5, 2: `next_minibatch` lets a minibatch cross the end of
        # a sweep, which CNTK's readers by themselves (R) and dtk do not.
        (4, 3, 5, [4] * 3),
    ],
)
def test_minibatches_have_the_lengths_of_cntk_s(rows, sweeps, size, expected):
    (reader,) = pool(1, rows, sweeps=sweeps)
    taken = list(iter(lambda: reader.next_minibatch(size), None))
    assert [minibatch.rows for minibatch in taken] == expected
    ends = (np.cumsum(expected) % rows == 0).tolist()
    assert [minibatch.ends_sweep for minibatch in taken] == ends
    assert [reader.next_minibatch(more) for more in (1, 2, 3)] == [None] * 3


@pytest.mark.parametrize("size", [64, 33, 31])
@pytest.mark.parametrize("workers", [1, 8, 16])
def test_partitions_have_the_lengths_of_cntk_s(workers, size):
    """R, CheckPackerOnDataSet: two sweeps of 1332 rows. (CNTK's go by chunks: some are empty.)"""
    readers, seen = pool(workers, 1332, sweeps=2), []
    whole = [size // workers + (size % workers > rank) for rank in range(workers)]
    while None not in (taken := [reader.next_minibatch(size) for reader in readers]):
        assert taken[0].ends_sweep or [len(one.data) for one in taken] == whole
        assert all(len(one.data) <= most for one, most in zip(taken, whole, strict=True))
        seen += [row for one in taken for row in one.data.tolist()]
    assert sorted(seen) == sorted([*range(1332)] * 2)


def test_a_second_worker_joins_after_two_minibatches():
    """M, TestMinibatchSourceWarmStart(64, 128): 10000 rows, the last 9872 of them by two."""
    (alone,) = pool(1, 10_000, sweeps=1)
    seen = [row for _ in range(2) for row in alone.next_minibatch(64).data.tolist()]
    lengths, both = [], pool(2, 10_000, sweeps=1)
    for reader in both:
        reader.set_state(alone.get_state())
    while None not in (taken := [reader.next_minibatch(64) for reader in both]):
        lengths.append([len(one.data) for one in taken])
        seen += [row for one in taken for row in one.data.tolist()]
    assert lengths == [[32, 32]] * 154 + [[8, 8]]
    assert sorted(seen) == [*range(10_000)]


def test_a_reader_goes_back_to_rows_it_has_read():
    """R, RandRollback...: fifths of three sweeps, in turn and then in another order."""
    (reader,) = pool(1, 30, seed=5)
    state = reader.get_state()

    def fifth(number):
        reader.set_state({**state, "position": 18 * number})
        return [row for _ in range(3) for row in reader.next_minibatch(6).data.tolist()]

    fifths = [fifth(number) for number in range(5)]
    assert sum(fifths, []) == [row for sweep in range(3) for row in sweep_order(30, 5, sweep)]
    assert [fifth(number) for number in (1, 3, 2, 2)] == [fifths[number] for number in (1, 3, 2, 2)]


def test_sweeps_have_orders_of_their_own_that_never_change():
    """The literal numbers are RandomState's, which numpy promises to keep."""
    assert permutation(6, 0).tolist() == [5, 2, 1, 3, 0, 4]
    (reader,) = pool(1, rows=6)
    sweeps = [reader.next_minibatch(6).data.tolist() for _ in range(2)]
    assert sweeps == [[3, 5, 4, 0, 2, 1], [0, 5, 1, 3, 2, 4]]
    (reader,) = pool(1, rows=4, shuffle=False)
    assert [reader.next_minibatch(3).data.tolist() for _ in range(4)] == [[0, 1, 2], [3]] * 2


def test_rows_of_several_arrays_stay_together():
    x, y = np.arange(20.0).reshape(10, 2), np.arange(10)
    data = {"image": (x, tf.constant(x)), "label": y}
    minibatch = PartitionedMinibatches(data, Twin(1, 3)).next_minibatch(7)
    label = minibatch.data["label"]
    assert label.tolist() == sweep_order(10, 0, 0)[3:5].tolist() and minibatch.rows == 7
    for image in minibatch.data["image"]:
        assert np.array_equal(image, x[label])


def test_a_drawn_seed_is_saved():
    np.random.seed(1)
    first = PartitionedMinibatches(np.arange(30), Twin(0, 1), seed=None)
    state = first.get_state()
    again = PartitionedMinibatches(np.arange(30), Twin(0, 1), seed=None)
    assert state["seed"] != again.get_state()["seed"]
    again.set_state(state)
    assert again.next_minibatch(30).data.tolist() == first.next_minibatch(30).data.tolist()


def test_a_dataset_goes_on_from_here_without_moving():
    (reader,) = pool(1, seed=5, sweeps=2)
    reader.next_minibatch(10)
    batches = [batch.tolist() for batch in reader.dataset(4).as_numpy_iterator()]
    assert [len(batch) for batch in batches] == [4, 3, 4, 4, 4, 4, 1]
    assert [row for batch in batches for row in batch] == EXPECTED[10:34]
    assert reader.position == 10 and reader.steps(4) == 5


@pytest.mark.parametrize(
    "data, kwargs, error, message",
    [
        ([1, 2], {}, TypeError, "not from a list"),
        (np.zeros(0), {}, ValueError, "0 rows and sweeps=None; expected at least 1"),
        (np.zeros(3), {"sweeps": 0}, ValueError, "3 rows and sweeps=0"),
    ],
)
def test_what_cannot_be_read_is_refused(data, kwargs, error, message):
    with pytest.raises(error, match=message):
        PartitionedMinibatches(data, Twin(0, 1), **kwargs)


def test_wrong_sizes_and_states_are_refused():
    (reader,) = pool(1)
    with pytest.raises(ValueError, match="rank 0: a minibatch of 0 rows; ask for 1 or more"):
        reader.next_minibatch(0)
    with pytest.raises(ValueError, match="at row 3 of data with 99 rows, and this data has 17"):
        reader.set_state({"position": 3, "rows": 99, "seed": 0})


READ_SIZES = (5, 1, 4, 9, 2, 8)


def read_alone():
    """All rows that one process reads."""
    reader = PartitionedMinibatches(np.arange(13), create("local"), seed=3)
    return [row for size in READ_SIZES for row in reader.next_minibatch(size).data.tolist()]


def read_minibatches():
    """This rank's rows by minibatch, and what is said where seeds differ."""
    strategy = bodies.strategy()
    with strategy.scope():
        reader = PartitionedMinibatches(np.arange(13), seed=3)
    mine = [reader.next_minibatch(size).data.tolist() for size in READ_SIZES]
    try:
        PartitionedMinibatches(np.arange(13), strategy, seed=strategy.rank)
    except DisagreementError as error:
        return mine, str(error)
    return mine, None


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_two_processes_read_what_one_reads(world, backend, size):
    (first, said), (second, heard) = world(backend, size).run(read_minibatches)
    assert sum([a + b for a, b in zip(first, second, strict=True)], []) == read_alone()
    assert "ranks disagree on the seed: rank 0 has 0, rank 1 has 1" in said
    assert "ranks disagree on the seed: rank 1 has 1, rank 0 has 0" in heard


def fitted_on_minibatches():
    """Weights of `fit`, and of a plain loop over the same minibatches in one process."""
    strategy = bodies.strategy()
    data = cases.rows(45)
    reader = PartitionedMinibatches(data, strategy, seed=2)
    model = cases.compiled(strategy)
    model.fit(reader.dataset(16), epochs=2, steps_per_epoch=reader.steps(16), verbose=0)
    alone = PartitionedMinibatches(data, create("local"), seed=2)
    plain = cases.compiled(None)
    for _ in range(2 * reader.steps(16)):
        with undistributed():
            plain.train_on_batch(*alone.next_minibatch(16).data)
    return [bodies.flat(m.get_weights()) for m in (model, plain)]


@pytest.mark.parametrize("backend, size", [("collective", 2)])
def test_fit_on_minibatches_is_one_process_s(world, backend, size):
    for mine, plain in world(backend, size).run(fitted_on_minibatches):
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
