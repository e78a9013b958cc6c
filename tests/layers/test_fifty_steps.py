"""A grid of processes trains the model that one device does: fifty steps, norms, and masks."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest

import dtk
from dtk.layers import parallelize, whole

from support import bodies, world

PLAN = {"first": "rows", "pool": "rows", "second": "output", "hidden": "output", "head": "input"}
ROWS, BATCH, EPOCHS = 320, 32, 5


@functools.cache
def grid():
    return dtk.strategies.AllReduceStrategy(world.communicator(), model_parallel=2)


def network(dtype, dropout):
    conv = functools.partial(keras.layers.Conv2D, kernel_size=3, activation="tanh", dtype=dtype)
    dense = functools.partial(keras.layers.Dense, dtype=dtype)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype=dtype),
            conv(6, padding="same", name="first"),
            keras.layers.MaxPooling2D(2, name="pool", dtype=dtype),
            conv(7, strides=2, padding="same", name="second"),
            keras.layers.Flatten(dtype=dtype),
            dense(24, "tanh", kernel_regularizer=keras.regularizers.L2(1e-3), name="hidden"),
            keras.layers.Dropout(dropout, dtype=dtype),
            dense(10, name="head"),
        ]
    )


def trained(dtype, dropout, plain):
    """Return weights and losses, of the divided model or of the same one on one device."""
    keras.config.set_floatx(dtype)  # of losses and penalties, too
    try:
        return _trained(dtype, dropout, plain)
    finally:
        keras.config.set_floatx("float32")


def _trained(dtype, dropout, plain):
    strategy = grid()
    images, labels = (part[:ROWS] for part in bodies.digits())
    with contextlib.ExitStack() as stack:
        stack.enter_context(dtk.strategies.undistributed() if plain else strategy.scope())
        keras.utils.set_random_seed(2)
        model = network(dtype, dropout)
        if not plain:
            model = parallelize(model, PLAN)
        model.compile(
            keras.optimizers.Adam(0.003, global_clipnorm=0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        history = model.fit(
            images.astype(dtype), labels, batch_size=BATCH, epochs=EPOCHS, verbose=0
        ).history["loss"]
    assert int(model.optimizer.iterations) == EPOCHS * ROWS // BATCH
    if not plain:
        strategy.check_weights(model)
        model = whole(model)
    return bodies.flat(model.get_weights()), history


@pytest.mark.full
@pytest.mark.worlds(("collective", 4), ("horovod-mpi", 4))
@pytest.mark.parametrize("dtype, within", [("float64", 1e-10), ("float32", 1e-4)])
def test_a_grid_trains_as_one_device(pool, dtype, within):
    expected, losses = pool.run(trained, dtype, 0.0, True, timeout=280)[0]
    for weights, history in pool.run(trained, dtype, 0.0, False, timeout=280):
        assert np.linalg.norm(weights - expected) <= within * np.linalg.norm(expected)
        assert history == pytest.approx(losses, rel=within)


@pytest.mark.full
@pytest.mark.worlds(("collective", 2))
def test_masks_are_those_of_one_device(pool):
    """Between two divided layers a mask covers an activation that both ranks hold."""
    expected, losses = pool.run(trained, "float32", 0.4, True)[0]
    for weights, history in pool.run(trained, "float32", 0.4, False, timeout=200):
        assert np.linalg.norm(weights - expected) <= 1e-4 * np.linalg.norm(expected)
        assert history == pytest.approx(losses, rel=1e-4)
