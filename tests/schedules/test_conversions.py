"""Time constants and rates per sample mean what CNTK means by them."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.schedules import (
    learning_rate_from_sample_rate,
    momentum_from_time_constant,
    sample_rate_from_learning_rate,
    time_constant_from_momentum,
)

batches = st.integers(1, 10_000)
momenta = st.floats(0.001, 0.999)
rates = st.floats(1e-6, 10.0)


@given(st.floats(10.0, 1e6), st.integers(1, 1000))
def test_momentum_forgets_by_samples(tau, batch):
    once, twice = (momentum_from_time_constant(tau, n * batch) for n in (1, 2))
    assert once**2 == pytest.approx(twice)
    assert once == pytest.approx(math.exp(-batch / tau))


@given(momenta, batches)
def test_time_constants_there_and_back(momentum, batch):
    tau = time_constant_from_momentum(momentum, batch)
    assert momentum_from_time_constant(tau, batch) == pytest.approx(momentum)


@given(rates, batches, momenta, st.booleans())
def test_rates_there_and_back(rate, batch, momentum, unit_gain):
    sample_rate = sample_rate_from_learning_rate(rate, batch, momentum, unit_gain)
    gain = 1 - momentum if unit_gain else 1
    assert sample_rate == pytest.approx(rate / batch / gain)
    again = learning_rate_from_sample_rate(sample_rate, batch, momentum, unit_gain)
    assert again == pytest.approx(rate)


def test_none_is_none():
    assert momentum_from_time_constant(0, 64) == time_constant_from_momentum(0.0, 64) == 0.0


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-4, 1e-2), st.integers(2, 32), st.floats(0.0, 5000.0), st.booleans())
def test_keras_sgd_takes_cntks_steps(sample_rate, batch, tau, unit_gain):
    """v = mu v + (1 - mu) sum g, w -= sample_rate v, against Keras with the mean of g."""
    momentum = momentum_from_time_constant(tau, batch)
    samples = np.random.default_rng(0).normal(size=(8, batch, 3))  # steps, samples, weights
    w, v = np.ones(3), np.zeros(3)
    for step in samples:
        v = momentum * v + (1 - momentum if unit_gain else 1) * step.sum(0)
        w = w - sample_rate * v
    rate = learning_rate_from_sample_rate(sample_rate, batch, momentum, unit_gain)
    optimizer, variable = keras.optimizers.SGD(rate, momentum=momentum), keras.Variable(np.ones(3))
    for step in samples:
        optimizer.apply([keras.ops.convert_to_tensor(step.mean(0), "float32")], [variable])
    np.testing.assert_allclose(variable.numpy(), w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "function, arguments, said",
    [
        (momentum_from_time_constant, (-1.0, 8), "time_constant=-1.0; expected a finite number"),
        (momentum_from_time_constant, (math.inf, 8), "time_constant=inf"),
        (momentum_from_time_constant, (10.0, 0), "batch_size=0; expected a number of samples"),
        (time_constant_from_momentum, (1.0, 8), "momentum=1.0; expected 0.0 up to but below 1.0"),
        (learning_rate_from_sample_rate, (0.1, 8, -0.5), "momentum=-0.5"),
        (sample_rate_from_learning_rate, (0.1, -8), "batch_size=-8"),
    ],
)
def test_mistakes(function, arguments, said):
    with pytest.raises(ValueError, match=said):
        function(*arguments)
