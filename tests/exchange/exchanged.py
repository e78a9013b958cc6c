"""What the tests of exchanges run, on every rank at once."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np

from dtk import exchange as exchanges

from support import bodies, cases

# A step of float32 sums in another order.
ROUNDING = 1e-5


@contextlib.contextmanager
def exchanging(value):
    """The strategy of this process, with an exchange for what is compiled meanwhile."""
    strategy = bodies.strategy()
    before, strategy.exchange = strategy.exchange, exchanges.parse(value)
    try:
        yield strategy
    finally:
        strategy.exchange = before


def perceptron(strategy, optimizer, activation="relu", seed=3, **options):
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(seed)
        hidden = keras.layers.Dense(32, activation=activation)
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), hidden, keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.compile(optimizer, cases.crossentropy(), metrics=["accuracy"], **options)
    return model


def train(value, optimizer="sgd", rows=155, batch=16, epochs=2, options=None):
    """A small network on the digits. Returns weights, the history and the optimizer's steps."""
    x, y = cases.rows(rows)
    with contextlib.nullcontext() if value == "plain" else exchanging(value) as strategy:
        model = perceptron(strategy, make(optimizer), **options or {})
        history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
    return bodies.flat(model.get_weights()), history.history, int(model.optimizer.iterations)


def make(optimizer):
    return {
        "sgd": lambda: keras.optimizers.SGD(0.1),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.003),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**127, dynamic_growth_steps=5
        ),
        "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True),
        "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    }[optimizer]()


def apart(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def same_everywhere(results):
    """All ranks' weights, which must be one bit pattern; returns them."""
    for result in results:
        assert np.array_equal(result[0], results[0][0])
    return results[0][0]


@functools.cache
def plain(*args, **kwargs):
    return train("plain", *args, **kwargs)
