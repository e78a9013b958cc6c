"""Two workers end with the weights of one process: relative difference at most 1e-5."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from dtk.optimizers import LAMB, LARS, RMSpropWarmup
from dtk.schedules import polynomial_decay

from strategies.test_equivalence import run
from support import bodies


def optimizers():
    return {
        "lars": LARS(polynomial_decay(0.2, 40, 5, 0.1), 0.9, 0.1, weight_decay=1e-3),
        "lamb": LAMB(0.01, weight_decay=0.01, global_clipnorm=0.5),
        "rmsprop warmup": RMSpropWarmup(0.1, 3, center=3.0, weight_decay=1e-3),
    }


def train(trained_under=None):
    """24 steps with each, the last batches of 13 rows. Returns flat weights by optimizer."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, (45, 6)), random.integers(0, 10, 45)
    ended = {}
    for name, optimizer in optimizers().items():
        keras.utils.set_random_seed(5)
        with bodies.scope_of(trained_under):
            layers = [keras.Input((6,), dtype="int32"), keras.layers.Embedding(50, 4)]
            layers += [keras.layers.Flatten(), keras.layers.Dense(12, activation="tanh")]
            layers += [keras.layers.LayerNormalization(), keras.layers.Dense(10)]
            model = keras.Sequential(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss)
        model.fit(x, y, batch_size=16, epochs=8, verbose=0)
        ended[name] = bodies.flat(model.get_weights())
    return ended


plain = functools.cache(train)


def train_here(devices=0):
    return train(bodies.strategy(devices))


def train_served():
    return train(bodies.served_with("sync"))


@pytest.mark.full
@pytest.mark.parametrize("backend, size", [("collective", 2), ("mirrored", 2), ("served", 2)])
def test_two_workers_equal_one_process(world, backend, size):
    body = train_served if backend == "served" else train_here
    results = run(world, backend, size, body, meanwhile=plain)
    for name, weights in plain().items():
        for result in results:
            difference = np.linalg.norm(result[name] - weights) / np.linalg.norm(weights)
            assert difference <= 1e-5, f"{name}: relative difference {difference:.2e}"
            np.testing.assert_array_equal(result[name], results[0][name])
