"""LAMB is the paper's, written out; Keras's Lamb is another algorithm."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.optimizers import LAMB

from optimizers import problem
from optimizers.problem import length

RATE = 0.1


def written_out(w, gradients, b1=0.9, b2=0.999, eps=1e-6, decay=0.0, adapted=True, decoupled=0.0):
    """The paper; `decoupled` decays before the step as Keras does."""
    w, m, v = w.astype("float64"), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        w = w * (1 - RATE * decoupled)
        g = g.astype("float64")
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + (decay * w if adapted else 0.0)
        ratio = length(w) / length(u) if adapted and length(w) > 0 and length(u) > 0 else 1.0
        w = w - RATE * ratio * u
    return w


def expected(start=None, skipped=("bias", "scale"), **arguments):
    start, steps = start or problem.weights(), problem.gradients()
    return {
        name: written_out(
            w, [step[name] for step in steps], adapted=name not in skipped, **arguments
        )
        for name, w in start.items()
    }


def test_the_paper_written_out():
    optimizer = LAMB(RATE, beta_1=0.8, beta_2=0.95, epsilon=1e-4, weight_decay=0.3)
    wanted = expected(b1=0.8, b2=0.95, eps=1e-4, decay=0.3)
    problem.check(problem.taken(optimizer), wanted)


def test_the_ratio_is_one_while_weights_are_zero():
    start = problem.weights()
    start["kernel"] *= 0.0
    got = problem.taken(LAMB(RATE), start=start)
    problem.check(got, expected(start))
    assert np.any(got["kernel"]), "weights of zero would stay there if the ratio were 0"


def test_the_ratio_is_one_where_the_update_is_zero():
    start = {"kernel": np.ones((4, 3), "float32")}
    step = {"kernel": np.zeros((4, 3), "float32")}
    problem.check(problem.taken(LAMB(RATE), [step] * 2, start), start)


def test_patterns_skip_variables():
    optimizer = LAMB(RATE, weight_decay=0.3, exclude=["head"])
    problem.check(problem.taken(optimizer), expected(skipped=("bias", "scale", "head"), decay=0.3))


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_a_step_is_as_long_as_the_weights_times_the_rate(weight_size, gradient_size):
    start = {"kernel": problem.weights()["kernel"] * np.float32(weight_size)}
    step = {"kernel": problem.gradients()[0]["kernel"] * np.float32(gradient_size)}
    moved = problem.taken(LAMB(RATE, weight_decay=0.3), [step], start)["kernel"] - start["kernel"]
    assert length(moved) == pytest.approx(RATE * length(start["kernel"]), rel=1e-4)


# Why dtk has its own. If one of these fails, Keras has changed: see whether LAMB is still needed.


def test_keras_is_the_same_for_matrices_without_decay():
    got = problem.taken(keras.optimizers.Lamb(RATE, epsilon=1e-6))
    wanted = problem.taken(LAMB(RATE))
    for name in ("kernel", "filters", "head"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=1e-7)


def test_keras_decays_outside_the_ratio_and_adapts_biases():
    got = problem.taken(keras.optimizers.Lamb(RATE, epsilon=1e-6, weight_decay=0.3))
    problem.check(got, expected(skipped=(), decoupled=0.3))
    own = problem.taken(LAMB(RATE, weight_decay=0.3))
    for name in problem.SHAPES:
        assert length(got[name] - own[name]) > 0.01 * length(own[name]), name


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"beta_1": 1.0}, "beta_1=1.0; expected 0.0 up to but below 1.0"),
        ({"beta_2": -0.1}, "beta_2=-0.1"),
        ({"epsilon": 0.0}, "epsilon=0.0; expected more than 0.0"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        LAMB(**arguments)
