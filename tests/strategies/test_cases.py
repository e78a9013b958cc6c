"""Every feature of `fit`, `evaluate` and `predict` means the same under a strategy."""

from __future__ import annotations

import numpy as np
import pytest

from once import once
from strategies import bodies, cases
from strategies.test_equivalence import run

# The Adam steps of the first batches divide by tiny second moments and amplify rounding.
TOLERANCE = 2e-5
# What a float8 rounds up or down differs by 1/8.
COARSE = {"layers in float8": 2e-3}


def plain(name):
    return once(bodies.run_plain, name)


# What evaluates and predicts, which in a world of one goes another way, and what sends most.
SOME = [
    "evaluate and predict odd rows",
    "fewer rows than workers",
    "lists of inputs and positional arguments",
    "several outputs",
    "single batches",
]


# What the number of workers changes: who has rows and how many, what is summed or gathered and in
# which order, and what a worker's part is weighed by.
BY_WORKERS = [
    "curves and confusion",
    "eager steps",
    "evaluate and predict odd rows",
    "fewer rows than workers",
    "gathered rows",
    "lists of inputs and positional arguments",
    "masked sequences",
    "mean over sample weights",
    "outputs with a tail of one",
    "outputs with a tail of one eagerly",
    "own train step that logs its loss eagerly",
    "own train step that logs numbers",
    "ragged inputs and outputs",
    "sample weights",
    "several outputs",
    "single batches",
    "sparse inputs",
    "steps per execution",
    "summed loss",
]


# Of these, what goes another way between processes than between the devices of one.
BY_RANKS = [
    "eager steps",
    "evaluate and predict odd rows",
    "fewer rows than workers",
    "gathered rows",
    "outputs with a tail of one",
    "own train step that logs numbers",
    "ragged inputs and outputs",
    "single batches",
    "steps per execution",
]


@pytest.mark.parametrize(
    "backend, size, name",
    [
        *(("mirrored", 2, name) for name in cases.CASES),
        *(
            pytest.param("collective", 2, name, marks=() if name in BY_RANKS else pytest.mark.full)
            for name in cases.CASES
        ),
    ],
)
def test_the_same_as_one_process(world, backend, size, name):
    check(world, backend, size, name)


@pytest.mark.parametrize("name", BY_WORKERS)
@pytest.mark.parametrize("backend, size", [("collective", 3)])
def test_the_same_with_three_workers(world, backend, size, name):
    check(world, backend, size, name)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("backend, size", [("local", 1), ("horovod-gloo", 2)])
def test_some_elsewhere(world, backend, size, name):
    check(world, backend, size, name)


def check(world, backend, size, name):
    cases.skip_if_later(name)
    results = run(world, backend, size, bodies.run_case, name, meanwhile=lambda: plain(name))
    expected, tolerance = plain(name), COARSE.get(name, TOLERANCE)
    for result in results:
        assert result.keys() == expected.keys()
        for part, value in expected.items():
            value, got = np.asarray(value), np.asarray(result[part])
            assert got.shape == value.shape, part
            if part == "weights":
                assert np.linalg.norm(got - value) <= tolerance * np.linalg.norm(value)
            else:
                np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance, err_msg=part)
            np.testing.assert_array_equal(got, results[0][part], f"{part} differs between ranks")
