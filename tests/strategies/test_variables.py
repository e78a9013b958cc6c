"""Variables made in a strategy's scope can be used as plain ones, and losses outside of steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies import bodies, cases


def numbers(strategy):
    """What Python and NumPy make of variables in the scope and outside, and what was in them."""
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


def largest(strategy):
    """The largest of what the replicas hold, eagerly and in a graph: by replica."""

    def index():
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def reduced():
        return strategy.extended.reduce_over_replicas(
            [tf.cast([index(), 1 - index()], tf.float32)], "max"
        )[0]

    found = [strategy.run(reduced), tf.function(lambda: strategy.run(reduced))()]
    return [value.numpy() for f in found for value in strategy.experimental_local_results(f)]


def loss_in_no_step(strategy):
    """A loss of ones: in the scope, summed over the replicas of a step by hand, and outside."""
    loss, ones = keras.losses.MeanSquaredError(), np.ones((4, 2), "float32")

    with strategy.scope():
        inside = float(loss(ones, 0 * ones))
        parts = strategy.run(lambda: loss(ones, 0 * ones))
        summed = float(strategy.reduce("sum", parts, axis=None))
    return inside, summed, float(loss(ones, 0 * ones))


def found_under(devices):
    strategy = bodies.strategy(devices)
    return numbers(strategy), largest(strategy), loss_in_no_step(strategy)


@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_variables_and_losses_are_numbers(world, backend, size, devices):
    """Breaks as TypeError of `float(optimizer.learning_rate)`, which TensorFlow's mirrored raise.

    Keras's own tests of callbacks found it: `int(optimizer.iterations)` at the end of an epoch. A
    loss of the scope was half with two workers: Keras divides it, as if it were summed.
    """
    for found, most, losses in world(backend, size).run(found_under, devices):
        inside, outside, (iterations, rate) = found
        for (steps, *_), (_, learning_rate, *_), (_, total, as_complex, array) in (inside, outside):
            assert steps == iterations == 2
            assert learning_rate == rate
            assert total > 0 and as_complex == total
            assert isinstance(array, np.ndarray) and array.shape == () and array == total
        np.testing.assert_array_equal(most, np.ones_like(most))
        assert losses == (1, 1, 1)
