"""N workers equal one process: our reason to exist.

Tolerance: relative difference of all weights <= 1e-5 after 50 shuffled steps in float32, and every
logged number within 1e-5 of the single process's and identical on all ranks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from once import once
from strategies import bodies

TOLERANCE = 1e-5

WORLDS = [
    (backend, size)
    for backend in ("collective", "horovod-gloo", "horovod-mpi", "mirrored")
    for size in (1, 2, 3)
]
RECIPES = list(itertools.product(bodies.OPTIMIZERS, bodies.CLIPS, bodies.TAILS))


def pairs(world, recipe):
    """Whatever two things meet where a recipe runs in a world; one process is each for itself."""
    backend, size = world
    parts = [backend, *recipe] if size == 1 else [backend, size, *recipe]
    return set(itertools.combinations(parts, 2))


def covering(worlds, recipes):
    """36 recipes of 75, each in one of the 12 worlds, most with two workers, so that every pair of
    backend, number of workers (2, 3), optimizer, clipping and tail is met somewhere.
    """
    met, chosen = set(), {}
    for world in sorted(worlds, key=lambda world: world[1] != 2):  # most choice first
        for _ in range({1: 1, 2: 5, 3: 3}[world[1]]):
            left = [recipe for recipe in recipes if recipe not in chosen]
            recipe = max(left, key=lambda recipe, w=world: len(pairs(w, recipe) - met))
            met |= pairs(world, recipe)
            chosen[recipe] = world
    picks = [(world, recipe) for recipe, world in chosen.items()]
    return sorted(picks, key=lambda pick: worlds.index(pick[0]))


COVERING = covering(WORLDS, RECIPES)
WHOLE = [pair for pair in itertools.product(WORLDS, RECIPES) if pair not in COVERING]
BY_MPI = list(itertools.product([("mpi-wheel", 2), ("mpi-wheel", 3)], RECIPES))


def test_the_subset_covers_every_pair():
    met = set().union(*(pairs(world, recipe) for world, recipe in COVERING))
    wanted = set().union(*(pairs(world, recipe) for world, recipe in [*WHOLE, *COVERING]))
    assert not wanted - met
    assert len(COVERING) == len(set(COVERING)) == 36


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


def identify(value):
    return "-".join(str(part) for part in value).replace(" ", "_")


@pytest.mark.parametrize(
    "backend, size, recipe",
    [(backend, size, recipe) for (backend, size), recipe in COVERING],
    ids=lambda v: identify(v) if isinstance(v, tuple) else str(v),
)
def test_n_workers_equal_one_process(world, backend, size, recipe):
    check(world, backend, size, recipe)


@pytest.mark.full
@pytest.mark.parametrize(
    "backend, size, recipe",
    [(backend, size, recipe) for (backend, size), recipe in [*WHOLE, *BY_MPI]],
    ids=lambda v: identify(v) if isinstance(v, tuple) else str(v),
)
def test_n_workers_equal_one_process_whole_matrix(world, backend, size, recipe):
    check(world, backend, size, recipe)


@pytest.mark.parametrize("backend, size", [("collective", 2), ("horovod-gloo", 2), ("mirrored", 2)])
def test_a_model_built_outside_the_scope(world, backend, size):
    recipe = ("ema", "global clipnorm", "tail of one")
    check(world, backend, size, recipe, bodies.train_built_outside)
