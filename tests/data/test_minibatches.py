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
from strategies import bodies, cases

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
