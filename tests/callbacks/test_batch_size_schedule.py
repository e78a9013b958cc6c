"""The batch really changes between epochs, and every row is seen once an epoch."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import dtk
from dtk.callbacks.batch_size_schedule import parse_schedule, size_at

from callbacks.bodies import compiled, data, fails, recorder, strategy, untried

two_ranks = pytest.mark.worlds(("collective", 2))
sizes = st.integers(1, 10**6)
pairs = st.tuples(st.integers(1, 50), sizes)


@given(st.lists(pairs, min_size=1, max_size=20))
def test_pairs_stand_for_repeated_sizes(items):
    expected = [size for count, size in items for _ in range(count)]
    assert parse_schedule(items) == parse_schedule(expected) == expected


@given(st.lists(sizes | pairs | st.tuples(st.just(1), sizes).map(list), min_size=1, max_size=20))
def test_parsing_again_changes_nothing(items):
    once = parse_schedule(items)
    assert parse_schedule(once) == once
    runs = [(len(list(group)), size) for size, group in itertools.groupby(once)]
    assert parse_schedule(runs) == once


@given(st.lists(sizes, min_size=1, max_size=20), st.integers(0, 100))
def test_the_last_size_persists(items, epoch):
    expected = items[epoch] if epoch < len(items) else items[-1]
    assert size_at(parse_schedule(items), epoch) == expected


@pytest.mark.parametrize(
    "schedule", [[], 64, "64", [0], [-1], [1.5], [True], [(0, 8)], [(2, 0)], [(1, 2, 3)], [None]]
)
def test_malformed_schedules_are_refused(schedule):
    with pytest.raises(ValueError, match="batch size schedule"):
        parse_schedule(schedule)


# 24 rows at 6, 6, 12, 7, 7.
STEPS = [4, 4, 2, 4, 4]
BATCHES = [[6] * 4, [6] * 4, [12] * 2, [7, 7, 7, 3], [7, 7, 7, 3]]


def epochs_of(order, steps):
    """Rows of every step, epoch by epoch."""
    order = iter(order)
    return [[next(order) for _ in range(n)] for n in steps]


def merged(results):
    """Ranks' slices of every step put together."""
    return [sum(parts, []) for parts in zip(*(order for order, _ in results), strict=True)]


def batch_sizes(kind="world", form="arrays", initial_epoch=0):
    """Rows of every step as the model sees them, and what the progress bar is told."""
    keras.utils.set_random_seed(3)
    order = []

    class Rows(keras.layers.Layer):
        def call(self, rows):
            def note(values):
                order.append(values.numpy().ravel().astype(int).tolist())

            tf.py_function(note, [rows], [])
            return rows

    with strategy(kind).scope():
        model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    untried(model)
    x = np.arange(24.0, dtype="float32")[:, None]
    if form == "arrays":
        given = {"x": x, "y": x, "batch_size": 5, "sample_weight": x[:, 0]}
    elif form == "tensors":
        given = {"x": tf.constant(x), "y": tf.constant(x)}
    else:
        given = {"x": tf.data.Dataset.from_tensor_slices((x, x)).batch(5)}
    seen = []
    schedule = dtk.callbacks.BatchSizeSchedule([(2, 6), 12, 7])
    given |= {"epochs": 5, "initial_epoch": initial_epoch, "verbose": 0}
    model.fit(**given, callbacks=[schedule, recorder(seen)])
    return order, seen


@two_ranks
@pytest.mark.parametrize("form", ["arrays", "dataset"])
def test_two_ranks(pool, form):
    results = pool.run(batch_sizes, "world", form)
    epochs = epochs_of(merged(results), STEPS)
    assert [[len(step) for step in epoch] for epoch in epochs] == BATCHES
    assert all(sorted(sum(epoch, [])) == list(range(24)) for epoch in epochs)
    told = [steps for _, step, steps in results[0][1] if step == 0]
    # A dataset's new batches are counted while the first epoch of their size runs.
    assert told == (STEPS if form == "arrays" else [None, 4, None, None, 4])


@pytest.mark.parametrize("form", ["arrays", "tensors", "dataset"])
def test_one_process_and_the_order_is_kerass(alone, form):
    [(order, _)] = alone.run(batch_sizes, "world", form)
    epochs = epochs_of(order, STEPS)
    assert [[len(step) for step in epoch] for epoch in epochs] == BATCHES
    assert all(sorted(sum(epoch, [])) == list(range(24)) for epoch in epochs)
    # The seed decides the order of rows, whatever the size they are cut to.
    assert len({tuple(sum(epoch, [])) for epoch in epochs}) == 1


def test_sizes_belong_to_epochs_not_to_starts(alone):
    [(order, _)] = alone.run(batch_sizes, "world", "arrays", 2)
    assert [[len(step) for step in epoch] for epoch in epochs_of(order, STEPS[2:])] == BATCHES[2:]


def refused_batches():
    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return data(4)

    model = compiled("sgd")
    return fails(model.fit, Rows(), verbose=0, callbacks=[dtk.callbacks.BatchSizeSchedule([8])])


@two_ranks
def test_what_cannot_work_is_refused_before_the_first_step(pool):
    for kind, generator in pool.run(refused_batches):
        assert kind == "ValueError"
        assert "PyDatasetAdapter" in generator
        assert "arrays or a tf.data.Dataset" in generator
