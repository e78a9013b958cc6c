"""Where TensorFlow is to be deterministic, nothing that was measured decides how numbers add up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators import cost_measurement
from dtk.communicators.costs import Costs
from dtk.strategies import AllReduceStrategy
from dtk.strategies.start import processor

from support import world

pytestmark = pytest.mark.full("three ranks train six times")

# Buckets as large as can be, short lists in one hop, kernels whole; and the opposite of each.
SLOW_MESSAGES = Costs(3, message=1.0, byte=1e-9, operation=1e-3)
SLOW_BYTES = Costs(3, message=1e-9, byte=1e-5, operation=1e-15)


@contextlib.contextmanager
def determinism(when):
    """As `tf.config.experimental.enable_op_determinism`, which cannot be taken back in public."""
    from tensorflow.python.framework import config

    if when:
        tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        config.disable_op_determinism()


@contextlib.contextmanager
def costs_kept(costs, folder):
    """While inside, the user's cache holds these costs of this world."""
    before = dict(os.environ)
    os.environ.update(DTK_CALIBRATE="", XDG_CACHE_HOME=folder)
    communicator = world.communicator()
    communicator.learn(False, None)
    try:
        if communicator.rank == 0:
            file = cost_measurement._file(communicator, [processor()] * communicator.size)
            file.parent.mkdir(parents=True, exist_ok=True)
            Path(file).write_text(json.dumps(dataclasses.asdict(costs)))
        communicator.barrier()
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        communicator.learn(False, None)


def trained(costs, folder, early, late=False):
    """The weights after some steps; determinism is asked for before the strategy, or after."""
    with costs_kept(costs, folder), determinism(early):
        keras.utils.set_random_seed(5)
        strategy = AllReduceStrategy()
        with determinism(early or late):
            rng = np.random.default_rng(1)
            x, y = rng.normal(size=[54, 96]), rng.normal(size=[54, 40])
            with strategy.scope():
                model = keras.Sequential([keras.Input((96,))])
                for width in (130, 64, 200):
                    model.add(keras.layers.Dense(width, "tanh"))
                    model.add(keras.layers.LayerNormalization())
                model.add(keras.layers.Dense(40))
                model.compile(keras.optimizers.Adam(0.01), "mse")
            model.fit(x, y, batch_size=9, epochs=3, verbose=0)
            return model.get_weights()


def are_equal(runs):
    (first, *_), (other, *_) = runs
    return all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.worlds(("collective", 3))
def test_the_same_bits_whatever_was_measured(pool, tmp_path):
    """Two runs on one machine differed where its cache had been measured anew between them."""

    def runs(*given):
        return [
            pool.run(trained, costs, str(tmp_path), *given) for costs in (SLOW_MESSAGES, SLOW_BYTES)
        ]

    assert are_equal(runs(True))
    assert are_equal(runs(False, True))
    assert not are_equal(runs(False)), "these costs decide nothing: nothing was tested"


def started(folder, rank):
    with costs_kept(SLOW_BYTES, folder), determinism(world.communicator().rank == rank):
        AllReduceStrategy()


@pytest.mark.worlds(("collective", 3))
def test_ranks_that_differ_are_refused(pool, tmp_path):
    """One rank would take other buckets than the rest, and all wait."""
    with pytest.raises(world.WorldError, match="deterministic ops"):
        pool.run(started, str(tmp_path), 1)
