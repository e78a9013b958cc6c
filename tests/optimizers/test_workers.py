"""Two workers end with the weights of one process: relative difference at most 1e-5."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from optimizers import bodies
from strategies.test_equivalence import run

plain = functools.cache(bodies.train)


def check(world, backend, size, body):
    results = run(world, backend, size, body, meanwhile=plain)
    for name, weights in plain().items():
        for result in results:
            difference = np.linalg.norm(result[name] - weights) / np.linalg.norm(weights)
            assert difference <= 1e-5, f"{name}: relative difference {difference:.2e}"
            np.testing.assert_array_equal(result[name], results[0][name])


@pytest.mark.parametrize(
    "backend, size",
    [("collective", 2), pytest.param("mirrored", 2, marks=pytest.mark.full)],
)
def test_two_workers_equal_one_process(world, backend, size):
    check(world, backend, size, bodies.train_here)


@pytest.mark.full
@pytest.mark.parametrize("backend, size", [("served", 2)])
def test_behind_parameter_servers(world, backend, size):
    check(world, backend, size, bodies.train_served)
