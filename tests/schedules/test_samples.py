"""Every step of `fit` has the rate due at the samples seen before it."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.schedules import by_samples, slow_start

rates = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0.0, 0.5, 0.25, 0.125])), min_size=1, max_size=4
)
sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=3)


def at(written, position):
    values = [value for count, value in written for _ in range(count)]
    return values[min(position, len(values) - 1)]


def values_of(schedule, steps):
    return schedule(np.arange(steps)).numpy()


@settings(max_examples=40, deadline=None)
@given(rates, sizes, st.integers(1, 50), st.booleans())
def test_epochs_of_changing_batches_with_short_tails(schedule, batches, epoch_size, per_sample):
    wanted = []
    for epoch in range(30):
        rate, size = at(schedule, epoch), at(batches, epoch)
        wanted += [rate * (size if per_sample else 1)] * math.ceil(epoch_size / size)
    made = by_samples(schedule, batches, epoch_size, per_sample)
    np.testing.assert_allclose(values_of(made, len(wanted)), wanted)


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(1, 10), st.booleans())
def test_counts_of_samples(schedule, size, per_sample):
    wanted = [at(schedule, step * size) * (size if per_sample else 1) for step in range(40)]
    made = by_samples(schedule, size, per_sample=per_sample)
    np.testing.assert_allclose(values_of(made, 40), wanted)


def test_it_is_kerass_and_comes_back_from_its_config():
    made = by_samples([(10, 0.1), 0.01], 4)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(made))
    assert values_of(again, 6).tolist() == values_of(made, 6).tolist()


def test_slow_start_is_the_recipes():
    """90 epochs of 1000 samples in batches of 300: four steps each."""
    factors = [0.5] * 40 + [0.075] * 30 + [0.01] * 15 + [0.001] * 5
    wanted = np.repeat(np.array(factors) * 0.1 * 300 / 256, 4)
    np.testing.assert_allclose(values_of(slow_start(300, 1000), 360), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([0.1], [32, 64]), r"batch_size=\[32, 64\] changes with the epochs, .* give epoch_size"),
        (([0.1], 0), "a batch size schedule holds .* got 0"),
        (([-0.1], 32), "a learning rate schedule holds .* a finite number of at least 0, got -0.1"),
        (([], 32), "a learning rate schedule needs at least one value"),
        (([0.1], 32, 0), "epoch_size=0; expected a number of samples"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        by_samples(*arguments)
