"""What the tests of synchronized normalization run, on every rank at once."""

from __future__ import annotations

import keras
import numpy as np

import dtk

from strategies import bodies

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
