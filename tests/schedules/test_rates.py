"""Keras schedules: a warm-up multiplies any rate; every step has the rate due at its samples."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.schedules import LearningRateWarmup, by_samples, polynomial_decay, slow_start
from dtk.schedules.rates import SHAPES

STEPS = np.arange(9)
FACTORS = {
    "linear": [0.2, 0.4, 0.6, 0.8],
    "exponential": [0.2, 0.2**0.75, 0.2**0.5, 0.2**0.25],
    "constant": [0.2] * 4,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inner", [2.0, keras.optimizers.schedules.ExponentialDecay(2.0, 3, 0.5)])
def test_shapes_written_out_which_come_back_from_their_config(shape, inner):
    config = keras.optimizers.schedules.serialize(LearningRateWarmup(inner, 4, 0.2, shape))
    made = keras.optimizers.schedules.deserialize(config)
    assert keras.optimizers.schedules.serialize(made) == config
    after = inner(STEPS).numpy() if callable(inner) else np.full(9, 2.0)
    factors = np.array(FACTORS[shape] + [1.0] * 5)
    np.testing.assert_allclose(made(STEPS).numpy(), after * factors, rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.integers(0, 50), st.floats(0.01, 1.0))
def test_it_only_ever_rises_to_the_whole_rate(shape, steps, start):
    rates = LearningRateWarmup(1.0, steps, start, shape)(np.arange(60)).numpy()
    assert np.all(np.diff(rates) >= -1e-6)
    assert rates[0] == pytest.approx(start if steps else 1.0)
    np.testing.assert_array_equal(rates[steps:], 1.0)


def test_polynomial_decay_counts_from_the_first_step():
    wanted = 3.0 * (1 - np.minimum(np.arange(12), 10) / 10) ** 2
    wanted[:4] *= 0.1 + 0.9 * np.arange(4) / 4
    made = polynomial_decay(3.0, 10, warmup_steps=4, start=0.1)
    np.testing.assert_allclose(made(np.arange(12)).numpy(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((-1.0, 4), "learning_rate=-1.0; expected a number of at least 0 or a keras"),
        (("fast", 4), "learning_rate='fast'"),
        ((1.0, -1), "steps=-1; expected a number of steps, 0 or more"),
        ((1.0, 2.5), "steps=2.5"),
        ((1.0, 4, 1.5), "start=1.5; expected a factor up to 1.0"),
        ((1.0, 4, 0.0, "constant"), r"start=0.0; .* unless the shape is linear \(here constant\)"),
        ((1.0, 4, 0.1, "cubic"), "shape='cubic'; expected one of linear, exponential, constant"),
    ],
)
def test_mistakes_of_a_warm_up(arguments, said):
    with pytest.raises(ValueError, match=said):
        LearningRateWarmup(*arguments)


# Rates by samples.

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
    as_json = [list(run) for run in schedule]
    made = by_samples(as_json, size, per_sample=per_sample)
    np.testing.assert_allclose(values_of(made, 40), wanted)


def test_slow_start_is_the_recipes():
    """90 epochs of 1000 samples in batches of 300: four steps each."""
    factors = [0.5] * 40 + [0.075] * 30 + [0.01] * 15 + [0.001] * 5
    wanted = np.repeat(np.array(factors) * 0.1 * 300 / 256, 4)
    np.testing.assert_allclose(values_of(slow_start(300, 1000), 360), wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([0.1], [32, 64]), r"batch_size=\[32, 64\] changes with the epochs, .* give epoch_size"),
        (([0.1], []), "a batch size schedule needs at least one value, got none"),
        ((7, 32), r"a learning rate schedule is a list of values or \(count, value\), got 7"),
        (("12", 32), "got '12'"),
        (([0.1], 0), "a batch size schedule holds .* a value an integer of at least 1, got 0"),
        (([(0, 0.3)], 32), r"got \(0, 0.3\)"),
        (([(True, 0.3)], 32), r"got \(True, 0.3\)"),
        (([-0.1], 32), "a learning rate schedule holds .* a finite number of at least 0, got -0.1"),
        (([], 32), "a learning rate schedule needs at least one value"),
        (([0.1], 32, 0), "epoch_size=0; expected a number of samples"),
    ],
)
def test_mistakes_in_samples(arguments, said):
    with pytest.raises(ValueError, match=said):
        by_samples(*arguments)
