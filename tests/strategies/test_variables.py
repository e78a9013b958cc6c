"""Variables made in a strategy's scope can be used as plain ones."""

from __future__ import annotations

import numpy as np
import pytest

from strategies import variable_bodies


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_variable_is_a_number(world, backend, size, devices):
    """Breaks as TypeError of `float(optimizer.learning_rate)`, which TensorFlow's mirrored raise.

    Keras's own tests of callbacks found it: `int(optimizer.iterations)` at the end of an epoch.
    """
    for inside, outside, (iterations, rate) in world(backend, size).run(
        variable_bodies.numbers, devices
    ):
        for (steps, *_), (_, learning_rate, *_), (_, total, as_complex, array) in (inside, outside):
            assert steps == iterations == 2
            assert learning_rate == rate
            assert total > 0 and as_complex == total
            assert isinstance(array, np.ndarray) and array.shape == () and array == total


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_the_largest_over_the_replicas(world, backend, size, devices):
    for found in world(backend, size).run(variable_bodies.largest, devices):
        np.testing.assert_array_equal(found, np.ones_like(found))


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_loss_called_in_the_scope_but_in_no_step_is_whole(world, backend, size, devices):
    """Breaks as half the loss with two workers: Keras divides it, as if it were summed."""
    for inside, in_replicas, outside in world(backend, size).run(
        variable_bodies.loss_in_no_step, devices
    ):
        assert inside == outside == 1
        assert in_replicas == 1
