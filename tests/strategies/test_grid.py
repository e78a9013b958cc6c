"""Processes in two dimensions: replicas, and parts of one model."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.local import NullCommunicator
from dtk.errors import DisagreementError
from dtk.strategies.allreduce import make_grid

from support import bodies, world


@pytest.mark.parametrize("parts", [0, -1, True, 1.5, "2"])
def test_a_number_of_parts_that_is_none(parts):
    with pytest.raises(ValueError, match=r"rank 1: model_parallel=.*expected a whole number"):
        make_grid(NullCommunicator(1, 4), parts)


def test_ranks_that_do_not_make_a_grid():
    with pytest.raises(ValueError, match=r"=4 with 6 processes.*one of \[1, 2, 3, 6\].*-n 8"):
        make_grid(NullCommunicator(0, 6), 4)


@functools.cache
def grid():
    return dtk.strategies.AllReduceStrategy(world.communicator(), model_parallel=2)


def places():
    strategy = grid()
    return (
        strategy.rank,
        strategy.size,
        strategy.communicator.rank,
        strategy.model_communicator.rank,
        strategy.is_chief,
        strategy.processes,
    )


def chooses_by_itself():
    with pytest.raises(ValueError, match="name the exchange"):
        dtk.strategies.AllReduceStrategy(world.communicator(), "auto", model_parallel=2)
    return True


@pytest.mark.worlds(("collective", 2))
def test_one_replica_of_two_parts(pool):
    assert pool.run(places) == [(0, 1, 0, 0, True, 2), (1, 1, 0, 1, False, 2)]
    assert pool.run(chooses_by_itself) == [True, True]


@pytest.mark.full("worlds of three and four")
@pytest.mark.worlds(("collective", 4), ("horovod-mpi", 4))
def test_two_replicas_of_two_parts(pool):
    assert [found[2:4] for found in pool.run(places)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def build():
    keras.utils.set_random_seed(2)
    layers = [keras.layers.Dense(6, "tanh", name="halved"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def halved():
    """The same; each rank of a model holds half of the columns of its first kernel."""
    return dtk.layers.parallelize(build(), {"halved": "output"})


def trained(plain, clip, accumulate=None):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(58, 6)).astype("float32"), random.integers(0, 3, 58)
    strategy = grid()
    with bodies.scope_of(None if plain else strategy), dtk.strategies.undistributed():
        model = build() if plain else halved()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.Adam(0.05, gradient_accumulation_steps=accumulate, **clip)
        model.compile(optimizer, loss)
        history = model.fit(x, y, batch_size=20, epochs=2, verbose=0).history["loss"]
    if not plain:
        strategy.check_weights(model)
        model = dtk.layers.whole(model)
    return bodies.flat(model.get_weights()), history


CLIPS = [{"clipnorm": 0.02}, {"global_clipnorm": 0.05}, {"clipvalue": 0.01}]


@pytest.mark.full("layers/test_whole.py clips them, too")
@pytest.mark.worlds(("collective", 2), ("collective", 4))
@pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: next(iter(clip)))
def test_parts_are_clipped_by_the_norm_of_the_whole(pool, clip):
    accumulate = 2 if "global_clipnorm" in clip else None
    ((expected, losses), *_) = pool.run(trained, True, clip, accumulate)
    for found, own in pool.run(trained, False, clip, accumulate):
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
        assert own == pytest.approx(losses, rel=1e-5)


def refused_by(optimizer):
    with pytest.raises(ValueError, match=r"rank \d: optimizer .* holds only a part of"):
        random = np.random.default_rng(0)
        with grid().scope():
            model = halved()
            model.compile(getattr(keras.optimizers, optimizer)(), "mse")
        model.fit(random.normal(size=(8, 6)), random.normal(size=(8, 3)), verbose=0)


@pytest.mark.worlds(("collective", 2))
def test_optimizers_that_need_a_whole_variable_are_refused(pool):
    pool.run(refused_by, "Lamb")


def drifted():
    with grid().scope():
        model = halved()
        model.compile("sgd", "mse")
    model.layers[-1].kernel.assign_add(tf.fill([6, 3], float(grid().rank)))
    with pytest.raises(DisagreementError, match="kernel"):
        grid().check_weights(model)
    with pytest.raises(ValueError, match=r"only a part of it.*dtk.layers.whole"):
        model.save_weights("never.weights.h5")


@pytest.mark.worlds(("collective", 2))
def test_copies_that_drift_apart_are_named_and_a_part_is_not_saved_as_a_model(pool):
    pool.run(drifted)
