"""Optimizers of which each rank holds a part: equal to one process, with 1/N of the slots."""

from __future__ import annotations

import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.trainer.gradients.sharded_optimizer import divide

import world
from once import once
from strategies import bodies

TOLERANCE = 1e-5
SIZES = (2, pytest.param(3, marks=pytest.mark.full))


# The division.


def rooms(*shapes):
    return [tf.Variable(tf.zeros(shape)) for shape in shapes]


def test_ranks_share_each_bucket_evenly():
    found = divide(rooms((5,), (2, 3), (7, 4), ()), [False] * 4, 3, limit=10_000)
    assert found.buckets == [[3, 2, 1, 0]]
    # 40 elements: 14, 13, 13, but matrices are cut between rows.
    assert found.sizes == [[0, 0, 5], [0, 0, 6], [12, 16, 0], [1, 0, 0]]


def test_a_large_variable_is_a_bucket_of_its_own():
    found = divide(rooms((3,), (8, 4), (9,)), [False] * 3, 2, limit=100)
    assert found.buckets == [[2, 0], [1]]
    assert found.sizes == [[0, 3], [16, 16], [6, 3]]


def test_undivided_variables_go_to_the_rank_that_has_least():
    found = divide(rooms((2, 2), (9, 2), (3, 2), (4,)), [True, True, True, False], 2, limit=10_000)
    assert found.sizes == [[0, 4], [18, 0], [0, 6], [2, 2]]
    assert found.buckets == [[3], [1, 2, 0]]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (1,)])
def test_hardly_any_elements(shape):
    (sizes,) = divide(rooms(shape), [False], 3, limit=100).sizes
    assert sum(sizes) == math.prod(shape)


# Training.


def excluding(optimizer, *words):
    optimizer.exclude_from_weight_decay(var_names=list(words))
    return optimizer


def divided_among_two():
    by_path = {".*bias": keras.optimizers.SGD(0.1, momentum=0.9)}
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01), by_path)
    )


OPTIMIZERS = {
    "adam, clipnorm": lambda o: o.Adam(0.01, amsgrad=True, clipnorm=0.05),
    "adamw, global norm": lambda o: excluding(
        o.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.1), "bias"
    ),
    "nadam, windows": lambda o: o.Nadam(
        0.01, gradient_accumulation_steps=3, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9
    ),
    "overflow": lambda o: o.LossScaleOptimizer(
        o.Adam(0.01, global_clipnorm=0.1), initial_scale=2.0**127, dynamic_growth_steps=4
    ),
    "muon": lambda o: o.Muon(0.01, weight_decay=0.1),
    "adafactor": lambda o: o.Adafactor(0.05),
    "lars": lambda o: dtk.optimizers.LARS(1.0, weight_decay=0.01),
}
OTHERS = {
    "sgd": lambda o: o.SGD(0.05, momentum=0.9, nesterov=True),
    "plain sgd": lambda o: o.SGD(0.05, clipnorm=0.1),
    "rmsprop, clipvalue": lambda o: o.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.01),
    "adagrad": lambda o: o.Adagrad(0.05, clipnorm=0.05),
    "adadelta": lambda o: o.Adadelta(0.5),
    "adamax, ema": lambda o: o.Adamax(0.01, use_ema=True, ema_momentum=0.9),
    "ftrl": lambda o: o.Ftrl(0.05),
    "lion, overwritten": lambda o: o.Lion(
        0.001, weight_decay=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4
    ),
    "lamb": lambda o: o.Lamb(0.01),
    "free of schedules": lambda o: o.ScheduleFreeAdamW(0.01, warmup_steps=3),
    "windows in a loss scale": lambda o: o.LossScaleOptimizer(
        o.Adam(0.01, gradient_accumulation_steps=2), initial_scale=2.0**10, dynamic_growth_steps=7
    ),
    "divided among two": lambda o: divided_among_two(),
    "layerwise adam": lambda o: dtk.optimizers.LAMB(0.01, weight_decay=0.01),
    "warm-up": lambda o: dtk.optimizers.RMSpropWarmup(0.01),
}
NAMES = [*OPTIMIZERS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]


@functools.cache
def sharded(exchange=None):
    return dtk.strategies.AllReduceStrategy(world.communicator(), exchange, shard_optimizer=True)


def build():
    """A table, a convolution and matrices, one of them under a constraint."""
    keras.utils.set_random_seed(3)
    tokens = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(50, 4)(tokens)
    x = keras.layers.Conv1D(5, 3, activation="relu")(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(9, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.0))(
        x
    )
    return keras.Model(tokens, keras.layers.Dense(7)(x))


def compiled(strategy, name):
    with bodies.scope_of(strategy):
        model = build()
        model.compile(
            optimizer=(OPTIMIZERS | OTHERS)[name](keras.optimizers),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return model


def rows():
    random = np.random.default_rng(0)
    return random.integers(0, 50, (75, 6)), random.integers(0, 7, 75)


def fit(model, epochs=2, **kwargs):
    return model.fit(*rows(), batch_size=16, epochs=epochs, verbose=0, **kwargs)


def trained(name, strategy=None):
    model = compiled(strategy, name)
    history = fit(model)
    optimizer = model.optimizer
    return {
        "weights": bodies.flat(model.get_weights()),
        "loss": history.history["loss"],
        "slots": bodies.flat(v for v in optimizer.variables if v.shape.rank),
    }


def trained_in_parts(name, exchange=None):
    return trained(name, sharded(exchange))


def near(found, expected, tolerance=TOLERANCE):
    return np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("backend, size", [("collective", 2), ("collective", 3)])
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_one_process(world, backend, size, name):
    if name == "divided among two" and not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip(f"Keras {keras.__version__} has no MultiOptimizer yet")
    plain = once(trained, name)
    found = world(backend, size).run(trained_in_parts, name, timeout=120)
    for of_rank in found:
        assert near(of_rank["weights"], plain["weights"])
        np.testing.assert_allclose(of_rank["loss"], plain["loss"], rtol=TOLERANCE)
        assert np.array_equal(of_rank["weights"], found[0]["weights"])
    assert sum(of_rank["slots"].size for of_rank in found) == plain["slots"].size
