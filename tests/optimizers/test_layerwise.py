"""LARS and LAMB are the papers', written out; Keras's Lamb is another algorithm."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.optimizers import LAMB, LARS

from optimizers import problem
from optimizers.problem import length

RATE = 0.1


def expected(paper, start=None, skipped=("bias", "scale"), **arguments):
    start, steps = start or problem.weights(), problem.gradients()
    return {
        name: paper(w, [step[name] for step in steps], adapted=name not in skipped, **arguments)
        for name, w in start.items()
    }


def lars(w, gradients, rates=(0.5,) * problem.STEPS, m=0.9, eta=0.001, beta=0.0, adapted=True):
    w, v = w.astype("float64"), 0.0
    for g, rate in zip(gradients, rates, strict=True):
        ratio = 1.0
        if adapted and length(w) > 0 and length(g) > 0:
            ratio = eta * length(w) / (length(g) + beta * length(w))
        v = m * v + rate * ratio * (g + (beta * w if adapted else 0.0))
        w = w - v
    return w


def lamb(w, gradients, b1=0.9, b2=0.999, eps=1e-6, decay=0.0, adapted=True, decoupled=0.0):
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


def test_steps_are_those_of_the_papers():
    optimizer = LARS(2.0, momentum=0.8, trust_coefficient=0.01, weight_decay=0.1)
    wanted = expected(lars, rates=[2.0] * problem.STEPS, m=0.8, eta=0.01, beta=0.1)
    problem.check(problem.taken(optimizer), wanted)
    optimizer = LAMB(RATE, beta_1=0.8, beta_2=0.95, epsilon=1e-4, weight_decay=0.3)
    wanted = expected(lamb, b1=0.8, b2=0.95, eps=1e-4, decay=0.3)
    problem.check(problem.taken(optimizer), wanted)
    # A schedule, with the rate inside the buffer.
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [4.0, 1.0])
    rates = [4.0, 4.0, 1.0, 1.0, 1.0, 1.0]
    problem.check(problem.taken(LARS(schedule)), expected(lars, rates=rates))


@pytest.mark.parametrize(
    "optimizer, paper, decay",
    [(LARS(0.5, weight_decay=0.1), lars, {"beta": 0.1}), (LAMB(RATE), lamb, {})],
    ids=["lars", "lamb"],
)
def test_the_ratio_is_one_while_weights_are_zero(optimizer, paper, decay):
    start = problem.weights()
    start["kernel"] *= 0.0
    got = problem.taken(optimizer, start=start)
    problem.check(got, expected(paper, start, **decay))
    assert np.any(got["kernel"]), "weights of zero would stay there if the ratio were 0"
    # And where the update is zero.
    start = {"kernel": np.ones((4, 3), "float32")}
    step = {"kernel": np.zeros((4, 3), "float32")}
    problem.check(problem.taken(LAMB(RATE), [step] * 2, start), start)


def test_patterns_skip_variables():
    skipped = ("bias", "scale", "head", "filters")
    optimizer = LARS(0.5, weight_decay=0.1, exclude=["^head$", "filt"])
    problem.check(problem.taken(optimizer), expected(lars, skipped=skipped, beta=0.1))
    optimizer = LAMB(RATE, weight_decay=0.3, exclude=["head"])
    problem.check(problem.taken(optimizer), expected(lamb, skipped=skipped[:3], decay=0.3))
    with pytest.raises(ValueError, match=r"exclude='bias' is a string; .* such as \['bias'\]"):
        LARS(0.1, exclude="bias")


def test_excluded_from_weight_decay_only_is_still_adapted():
    optimizer = LARS(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["head"])
    wanted = expected(lars, beta=0.1)
    wanted["head"] = expected(lars, beta=0.0)["head"]
    problem.check(problem.taken(optimizer), wanted)


@settings(max_examples=10, deadline=None)
@given(st.floats(1e-2, 1e2), st.floats(1e-2, 1e2))
def test_a_step_is_as_long_as_the_weights_whatever_the_gradient(weight_size, gradient_size):
    start = {"kernel": problem.weights()["kernel"] * np.float32(weight_size)}
    step = {"kernel": problem.gradients()[0]["kernel"] * np.float32(gradient_size)}
    for optimizer, rate in ((LAMB(RATE, weight_decay=0.3), RATE), (LARS(5.0), 0.005)):
        moved = problem.taken(optimizer, [step], start)["kernel"] - start["kernel"]
        assert length(moved) == pytest.approx(rate * length(start["kernel"]), rel=1e-3)


# Why dtk has its own. If one of these fails, Keras has changed: see whether LAMB is still needed.


def test_keras_is_the_same_for_matrices_without_decay():
    got = problem.taken(keras.optimizers.Lamb(RATE, epsilon=1e-6))
    wanted = problem.taken(LAMB(RATE))
    for name in ("kernel", "filters", "head"):
        np.testing.assert_allclose(got[name], wanted[name], rtol=2e-5, atol=1e-7)


def test_keras_decays_outside_the_ratio_and_adapts_biases():
    got = problem.taken(keras.optimizers.Lamb(RATE, epsilon=1e-6, weight_decay=0.3))
    problem.check(got, expected(lamb, skipped=(), decoupled=0.3))
    own = problem.taken(LAMB(RATE, weight_decay=0.3))
    for name in problem.SHAPES:
        assert length(got[name] - own[name]) > 0.01 * length(own[name]), name
