"""Variables made in a strategy's scope can be used as plain ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies import bodies, cases


def numbers(devices=0):
    """What Python and NumPy make of variables in the scope and outside, and what was in them."""
    strategy = bodies.strategy(devices)
    model = cases.compiled(strategy)
    model.fit(*cases.rows(16), batch_size=8, epochs=1, verbose=0)
    optimizer, tracker = model.optimizer, model.metrics[0]

    def read():
        return [
            (int(variable), float(variable), complex(variable.value), np.array(variable.value))
            for variable in (optimizer.iterations, optimizer.learning_rate, tracker.total)
        ]

    with strategy.scope():
        inside = read()
    return inside, read(), [v.numpy() for v in (optimizer.iterations, optimizer.learning_rate)]


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_variable_is_a_number(world, backend, size, devices):
    """Breaks as TypeError of `float(optimizer.learning_rate)`, which TensorFlow's mirrored raise.

    Keras's own tests of callbacks found it: `int(optimizer.iterations)` at the end of an epoch.
    """
    for inside, outside, (iterations, rate) in world(backend, size).run(numbers, devices):
        for (steps, *_), (_, learning_rate, *_), (_, total, as_complex, array) in (inside, outside):
            assert steps == iterations == 2
            assert learning_rate == rate
            assert total > 0 and as_complex == total
            assert isinstance(array, np.ndarray) and array.shape == () and array == total


def largest(devices=0):
    """The largest of what the replicas hold, eagerly and in a graph: by replica."""
    strategy = bodies.strategy(devices)

    def index():
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def reduced():
        return strategy.extended.reduce_over_replicas(
            [tf.cast([index(), 1 - index()], tf.float32)], "max"
        )[0]

    found = [strategy.run(reduced), tf.function(lambda: strategy.run(reduced))()]
    return [value.numpy() for f in found for value in strategy.experimental_local_results(f)]


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_the_largest_over_the_replicas(world, backend, size, devices):
    for found in world(backend, size).run(largest, devices):
        np.testing.assert_array_equal(found, np.ones_like(found))


def loss_in_no_step(devices=0):
    """A loss of ones: in the scope, summed over the replicas of a step by hand, and outside."""
    strategy = bodies.strategy(devices)
    loss, ones = keras.losses.MeanSquaredError(), np.ones((4, 2), "float32")

    with strategy.scope():
        inside = float(loss(ones, 0 * ones))
        parts = strategy.run(lambda: loss(ones, 0 * ones))
        summed = float(strategy.reduce("sum", parts, axis=None))
    return inside, summed, float(loss(ones, 0 * ones))


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_loss_called_in_the_scope_but_in_no_step_is_whole(world, backend, size, devices):
    """Breaks as half the loss with two workers: Keras divides it, as if it were summed."""
    for inside, in_replicas, outside in world(backend, size).run(loss_in_no_step, devices):
        assert inside == outside == 1
        assert in_replicas == 1
