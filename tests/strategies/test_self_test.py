"""A few rows both ways: what the kinds of losses make of training, and that nothing is changed."""

from __future__ import annotations

import numpy as np
import pytest

from once import once
from strategies import self_tested

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])


def assert_equal(mine, plain):
    assert np.linalg.norm(mine[0] - plain[0]) <= 1e-5 * np.linalg.norm(plain[0])
    for name, values in plain[1].items():
        np.testing.assert_allclose(mine[1][name], values, 1e-5, 1e-6, err_msg=name)


def plain(name):
    return self_tested.trained(name, plain=True)


@TWO
@pytest.mark.parametrize("name", ["scalar", "summed", "mixed"])
def test_losses_of_ones_own(world, backend, size, name):
    """Breaks as sums that count with a replica's share, or as a mean that counts twice."""
    for mine in world(backend, size).run(self_tested.trained, name):
        assert_equal(mine, once(plain, name))


@pytest.mark.parametrize("backend, size, devices", [("mirrored", 2, 2)])
def test_on_two_devices(world, backend, size, devices):
    (mine,) = world("local", 1).run(self_tested.trained, "mixed", True, devices)
    assert_equal(mine, once(plain, "mixed"))


@TWO
def test_without_it_a_mean_is_right_and_a_sum_is_not(world, backend, size):
    """What the test is for: the sum would be trained on by half, without a word."""
    mine, _ = world(backend, size).run(self_tested.trained, "scalar", False)
    assert_equal(mine, once(plain, "scalar"))
    mine, _ = world(backend, size).run(self_tested.trained, "summed", False)
    with pytest.raises(AssertionError):
        assert_equal(mine, once(plain, "summed"))


@TWO
def test_what_it_prints(world, backend, size):
    """Its cost, and what it found; on rank 0 only."""
    (_, _, said), (_, _, other) = world(backend, size).run(self_tested.trained, "summed")
    assert said.startswith("dtk: self-test of model 'sequential")
    assert "(loss summed): 5 rows as a whole and in 2 parts agree to" in said
    assert "loss 0 is a sum (" in said and said.endswith(" s)\n")
    assert other == ""


@TWO
def test_it_changes_nothing(world, backend, size):
    for same, verdict in world(backend, size).run(self_tested.changed_nothing):
        assert same
        assert verdict.difference < 1e-4 and verdict.wrong is None and verdict.notes == []
