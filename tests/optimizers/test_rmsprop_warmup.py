"""RMSprop becomes momentum SGD as PFN's recipe says, without its ports' jump."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.optimizers import RMSpropWarmup
from dtk.optimizers.rmsprop_warmup import sgd_share

from optimizers import problem


def share(epoch):
    if epoch < 10:
        return math.exp(2 * (epoch - 10) / 5) / 2
    return min(1.0, 0.5 + (epoch - 10) / 5)


def written_out(w, gradients, rates, steps_per_epoch, first=0):
    w, m, delta = w.astype("float64"), 0.0, 0.0
    for step, (g, rate) in enumerate(zip(gradients, rates, strict=True), first):
        sgd = share(step / steps_per_epoch)
        rmsprop = (1 - sgd) * 3e-4 / rate if rate else 0.0
        g = g.astype("float64")
        m = 0.99 * m + 0.01 * g * g
        delta = 0.9 * delta - (sgd + rmsprop / (np.sqrt(m) + 1e-8)) * g
        w = w + rate * delta
    return w


def expected(rates, steps_per_epoch, first=0):
    steps = problem.gradients(len(rates))
    return {
        name: written_out(w, [step[name] for step in steps], rates, steps_per_epoch, first)
        for name, w in problem.weights().items()
    }


@pytest.mark.parametrize("steps_per_epoch, first", [(100, 0), (2, 19), (1, 30)])
def test_the_recipe_written_out(steps_per_epoch, first):
    """In the beginning; from epoch 9.5 to 13, over the bend; as plain momentum SGD."""
    optimizer = RMSpropWarmup(0.1, steps_per_epoch)
    optimizer.iterations.assign(first)
    got = problem.taken(optimizer, problem.gradients(7))
    problem.check(got, expected([0.1] * 7, steps_per_epoch, first))


def test_it_ends_as_keras_sgd_and_a_rate_of_zero_moves_nothing():
    optimizer = RMSpropWarmup(0.1, steps_per_epoch=1)
    optimizer.iterations.assign(13)
    problem.check(problem.taken(optimizer), problem.taken(keras.optimizers.SGD(0.1, momentum=0.9)))
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.0, 0.1])
    got = problem.taken(RMSpropWarmup(schedule, 2))
    problem.check(got, expected([0.0, 0.0, 0.1, 0.1, 0.1, 0.1], 2))


def test_an_accumulation_window_counts_all_its_batches():
    steps = [step for step in problem.gradients() for _ in range(2)]
    # 12 batches in 6 windows; at 4 batches an epoch, 2 windows are one.
    got = problem.taken(RMSpropWarmup(0.1, 4, gradient_accumulation_steps=2), steps)
    problem.check(got, problem.taken(RMSpropWarmup(0.1, 2)))


epochs = st.floats(0, 100, width=32)


@settings(deadline=None)
@given(epochs, epochs)
def test_the_share_never_falls_nor_jumps(one, other):
    low, high = float(sgd_share(min(one, other))), float(sgd_share(max(one, other)))
    assert 0.0 < low <= high <= 1.0
    assert high - low <= abs(one - other) / 5 + 1e-6, "its slope is at most 1/5"


def test_the_share_at_given_epochs():
    for epoch in (0.0, 3.5, 9.99, 10.0, 11.25, 12.5, 90.0):
        assert float(sgd_share(epoch)) == pytest.approx(share(epoch), rel=1e-6)
