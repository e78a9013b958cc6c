"""A synchronized norm sees all workers' rows, for one message in each direction."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import dtk

from strategies import bodies

FLOAT = 4

CHANNELS = 5


def fit(synchronized, batch, axis=-1, devices=0, plain=False):
    """Train one norm between two convolutions; returns weights and bytes of a step."""
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, size=(40, 6, 6, 3)).astype("float32")
    y = random.integers(0, 4, 40)
    strategy = bodies.strategy(devices)
    with bodies.scope_of(None if plain else strategy):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                keras.layers.Conv2D(CHANNELS, 3, activation="tanh"),
                keras.layers.BatchNormalization(axis=axis, synchronized=synchronized),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    counts = [] if plain or devices else [dtk.callbacks.CommunicationStats()]
    with dtk.strategies.undistributed():  # the plain one
        history = model.fit(x, y, batch_size=batch, epochs=2, verbose=0, callbacks=counts).history
    return bodies.flat(model.get_weights()), history.get("comm_bytes", [None])[-1]


@pytest.mark.worlds(("collective", 2), ("collective", 3))
@pytest.mark.parametrize("axis", [-1, 2])
def test_weights_are_those_of_one_process_whatever_is_normalized(pool, axis):
    # 16 and 16 rows, then 8; with three workers some have a row more
    found = [weights for weights, _ in pool.run(fit, True, 16, axis)]
    alone, _ = pool.run(fit, True, 16, axis, 0, True)[0]
    for weights in found:
        assert np.array_equal(weights, found[0])
    assert np.linalg.norm(found[0] - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.worlds(("local", 1))
def test_between_mirrored_devices(pool):
    ((mirrored, _),) = pool.run(fit, True, 16, -1, 2)
    ((alone, _),) = pool.run(fit, True, 16, -1, 0, True)
    assert np.linalg.norm(mirrored - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.worlds(("collective", 2))
def test_one_vector_travels_forwards_and_one_backwards(pool):
    (_, together), _ = pool.run(fit, True, 20)
    (_, apart), _ = pool.run(fit, False, 20)
    # Moving statistics of norms that are not synchronized are averaged in every step.
    statistics = 2 * CHANNELS
    vectors = 2 * (2 * CHANNELS + 1)
    assert together - apart == FLOAT * (vectors - statistics)
