"""A synchronized norm sees all workers' rows, for one message in each direction."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import moments_bodies as bodies

FLOAT = 4


@pytest.mark.worlds(("collective", 2), ("collective", 3))
@pytest.mark.parametrize("axis", [-1, 2])
def test_weights_are_those_of_one_process_whatever_is_normalized(pool, axis):
    # 16 and 16 rows, then 8; with three workers some have a row more
    found = [weights for weights, _ in pool.run(bodies.fit, True, 16, axis)]
    alone, _ = pool.run(bodies.fit, True, 16, axis, 0, True)[0]
    for weights in found:
        assert np.array_equal(weights, found[0])
    assert np.linalg.norm(found[0] - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.worlds(("local", 1))
def test_between_mirrored_devices(pool):
    ((mirrored, _),) = pool.run(bodies.fit, True, 16, -1, 2)
    ((alone, _),) = pool.run(bodies.fit, True, 16, -1, 0, True)
    assert np.linalg.norm(mirrored - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.worlds(("collective", 2))
def test_one_vector_travels_forwards_and_one_backwards(pool):
    (_, together), _ = pool.run(bodies.fit, True, 20)
    (_, apart), _ = pool.run(bodies.fit, False, 20)
    # Moving statistics of norms that are not synchronized are averaged in every step.
    statistics = 2 * bodies.CHANNELS
    vectors = 2 * (2 * bodies.CHANNELS + 1)
    assert together - apart == FLOAT * (vectors - statistics)
