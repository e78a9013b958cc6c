"""A warm-up multiplies whatever rate it is given."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.schedules import LearningRateWarmup, polynomial_decay
from dtk.schedules.warmup import SHAPES

STEPS = np.arange(9)
FACTORS = {
    "linear": [0.2, 0.4, 0.6, 0.8],
    "exponential": [0.2, 0.2**0.75, 0.2**0.5, 0.2**0.25],
    "constant": [0.2] * 4,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inner", [2.0, keras.optimizers.schedules.ExponentialDecay(2.0, 3, 0.5)])
def test_shapes_written_out(shape, inner):
    made = LearningRateWarmup(inner, 4, 0.2, shape)
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


def test_an_optimizer_counts_its_steps():
    optimizer = keras.optimizers.SGD(LearningRateWarmup(1.0, 4))
    variable, seen = keras.Variable([0.0]), []
    for _ in range(6):
        seen.append(float(optimizer.learning_rate))
        optimizer.apply([keras.ops.convert_to_tensor([1.0])], [variable])
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert variable.numpy() == pytest.approx(-sum(seen))


@pytest.mark.parametrize("inner", [2.0, keras.optimizers.schedules.ExponentialDecay(2.0, 3, 0.5)])
def test_configs_come_back(inner):
    made = LearningRateWarmup(inner, 4, 0.2, "exponential")
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(made))
    assert again.get_config() == made.get_config()
    np.testing.assert_array_equal(again(STEPS).numpy(), made(STEPS).numpy())


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
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        LearningRateWarmup(*arguments)
