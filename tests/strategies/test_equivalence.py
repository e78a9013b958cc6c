"""N workers equal one process: our reason to exist.

Tolerance: relative difference of all weights <= 1e-5 after 50 shuffled steps in float32, and every
logged number within 1e-5 of the single process's and identical on all ranks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from support import bodies
from support.once import once

TOLERANCE = 1e-5

WORLDS = [
    *itertools.product(("collective", "horovod-gloo", "horovod-mpi", "mirrored"), (1, 2, 3)),
    ("mpi-wheel", 2),
    ("mpi-wheel", 3),
]
RECIPES = list(itertools.product(bodies.OPTIMIZERS, bodies.CLIPS, bodies.TAILS))
# Without `full`: other tests have the optimizers and clippings that are not here.
HERE = {("collective", 2, ("loss scaling", "clipvalue", "tail of one"))}


def plain(*recipe):
    return once(bodies.train, *recipe)


def run(world, backend, size, function, *args, meanwhile):
    """Run on a backend; "mirrored" is one process with `size` devices."""
    if backend == "mirrored":
        args, backend, size = (*args, size), "local", 1
    return world(backend, size).run(function, *args, timeout=120, meanwhile=meanwhile)


def check(world, backend, size, recipe, body=bodies.train_here):
    results = run(world, backend, size, body, *recipe, meanwhile=lambda: plain(*recipe))
    weights, history = plain(*recipe)
    for rank_weights, rank_history in results:
        difference = np.linalg.norm(rank_weights - weights) / np.linalg.norm(weights)
        assert difference <= TOLERANCE, f"{recipe}: relative difference {difference:.2e}"
        assert rank_history == results[0][1], "ranks logged different numbers"
        for name, values in history.items():
            np.testing.assert_allclose(rank_history[name], values, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "backend, size, recipe",
    [
        pytest.param(*world, recipe, marks=() if (*world, recipe) in HERE else pytest.mark.full)
        for world in WORLDS
        for recipe in RECIPES
    ],
    ids=lambda v: "-".join(v).replace(" ", "_") if isinstance(v, tuple) else str(v),
)
def test_n_workers_equal_one_process(world, backend, size, recipe):
    check(world, backend, size, recipe)


@pytest.mark.full
@pytest.mark.parametrize("backend, size", [("collective", 2), ("horovod-gloo", 2), ("mirrored", 2)])
def test_a_model_built_outside_the_scope(world, backend, size):
    recipe = ("ema", "global clipnorm", "tail of one")
    check(world, backend, size, recipe, bodies.train_built_outside)
