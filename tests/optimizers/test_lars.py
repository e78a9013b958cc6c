"""LARS is the paper's, written out."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.optimizers import LARS

from optimizers import problem
from optimizers.problem import length


def written_out(w, gradients, rates, m=0.9, eta=0.001, beta=0.0, adapted=True):
    w, v = w.astype("float64"), 0.0
    for g, rate in zip(gradients, rates, strict=True):
        ratio = 1.0
        if adapted and length(w) > 0 and length(g) > 0:
            ratio = eta * length(w) / (length(g) + beta * length(w))
        v = m * v + rate * ratio * (g + (beta * w if adapted else 0.0))
        w = w - v
    return w


def expected(rates, start=None, skipped=("bias", "scale"), **arguments):
    start, steps = start or problem.weights(), problem.gradients()
    return {
        name: written_out(
            w, [step[name] for step in steps], rates, adapted=name not in skipped, **arguments
        )
        for name, w in start.items()
    }


def test_the_paper_written_out():
    optimizer = LARS(2.0, momentum=0.8, trust_coefficient=0.01, weight_decay=0.1)
    wanted = expected([2.0] * problem.STEPS, m=0.8, eta=0.01, beta=0.1)
    problem.check(problem.taken(optimizer), wanted)


def test_a_schedule_with_the_rate_inside_the_buffer():
    rates = [4.0, 4.0, 1.0, 1.0, 1.0, 1.0]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [4.0, 1.0])
    problem.check(problem.taken(LARS(schedule)), expected(rates))


def test_the_ratio_is_one_while_weights_are_zero():
    start = problem.weights()
    start["kernel"] *= 0.0
    wanted = expected([0.5] * problem.STEPS, start, beta=0.1)
    problem.check(problem.taken(LARS(0.5, weight_decay=0.1), start=start), wanted)


def test_a_first_step_of_zero_weights_is_the_whole_gradient():
    start = {"kernel": np.zeros((4, 3), "float32")}
    step = {"kernel": np.ones((4, 3), "float32")}
    problem.check(problem.taken(LARS(0.5), [step], start), {"kernel": np.full((4, 3), -0.5)})


def test_patterns_skip_variables():
    optimizer = LARS(0.5, weight_decay=0.1, exclude=["^head$", "filt"])
    skipped = ("bias", "scale", "head", "filters")
    wanted = expected([0.5] * problem.STEPS, skipped=skipped, beta=0.1)
    problem.check(problem.taken(optimizer), wanted)


def test_excluded_from_weight_decay_only_is_still_adapted():
    optimizer = LARS(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["head"])
    wanted = expected([0.5] * problem.STEPS, beta=0.1)
    wanted["head"] = expected([0.5] * problem.STEPS, beta=0.0)["head"]
    problem.check(problem.taken(optimizer), wanted)


@settings(max_examples=15, deadline=None)
@given(st.floats(1e-3, 1e3))
def test_the_size_of_a_gradient_does_not_matter(factor):
    """Without weight decay; the step is eta times the rate times the weights long."""
    step = {"kernel": problem.gradients()[0]["kernel"]}
    start = {"kernel": problem.weights()["kernel"]}
    moved = [
        start["kernel"]
        - problem.taken(LARS(5.0), [{"kernel": step["kernel"] * f}], start)["kernel"]
        for f in (1.0, np.float32(factor))
    ]
    np.testing.assert_allclose(moved[1], moved[0], rtol=1e-3, atol=1e-6)
    assert length(moved[0]) == pytest.approx(0.005 * length(start["kernel"]), rel=1e-3)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"momentum": 1.0}, "momentum=1.0; expected 0.0 up to but below 1.0"),
        ({"trust_coefficient": 0.0}, "trust_coefficient=0.0; expected more than 0.0"),
        ({"exclude": "bias"}, r"exclude='bias' is a string; .* such as \['bias'\]"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        LARS(0.1, **arguments)
