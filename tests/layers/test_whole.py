"""What ranks hold in parts is saved as the model of one device, and becomes parts again."""

from __future__ import annotations

import functools
import shutil
import warnings

import keras
import numpy as np
import pytest

import dtk
from dtk import layers
from dtk.communicators.local import LocalCommunicator

from support import bodies, world

pytestmark = pytest.mark.full("a cheaper test holds its rule")


@functools.cache
def grid(parallel):
    communicator = world.communicator() if parallel > 1 else LocalCommunicator()
    return dtk.strategies.AllReduceStrategy(communicator, model_parallel=parallel)


def plain():
    return keras.Sequential(
        [
            keras.Input((6, 4, 2)),
            keras.layers.Conv2D(5, 3, padding="same", activation="tanh", name="conv"),
            keras.layers.Dropout(0.3),
            keras.layers.Flatten(),
            keras.layers.Dense(7, "tanh", name="hidden"),
            keras.layers.Dense(3, name="head"),
        ]
    )


def until(epochs, directory, plan, ranks=2):
    """Train until an epoch; without a plan plain layers. Of one rank, on rank 0 alone."""
    ranks = 1 if plan is None else ranks
    if ranks == 1 and world.communicator().rank > 0:
        return None
    random = np.random.default_rng(0)
    x, y = random.normal(size=(44, 6, 4, 2)).astype("float32"), random.integers(0, 3, 44)
    keras.utils.set_random_seed(2)
    with grid(ranks).scope():
        model = plain() if plan is None else layers.parallelize(plain(), plan)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), loss)
    stats = dtk.callbacks.CommunicationStats()
    saving = [dtk.callbacks.Checkpoint(directory)] if directory else []
    with dtk.strategies.undistributed():
        history = model.fit(
            x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[stats, *saving]
        ).history
    if ranks > 1:
        assert history["comm_bytes"][-1] > 0, "what parts send is counted, too"
    together = layers.whole(model)
    return (
        bodies.flat(together.get_weights()),
        [type(layer).__module__.partition(".")[0] for layer in together.layers],
    )


CHANNELS = {"conv": "channels", "hidden": "output", "head": "input"}


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("plan", [CHANNELS, {"conv": "rows"}], ids=["channels", "rows"])
def test_what_one_layout_has_saved_another_resumes(pool, tmp_path, plan):
    """Keras's layers on one rank, and a plan's on two, or on one: these have classes of dtk's."""
    layouts = {"keras": (None,), "parts": (plan, 2), "alone": (plan, 1)}
    pairs = [("parts", "keras"), ("keras", "parts")]
    if plan is CHANNELS:
        pairs += [("parts", "alone")]
    ((expected, _), _) = pool.run(until, 2, None, None)
    for first in {first for first, _ in pairs}:
        pool.run(until, 1, str(tmp_path / first), *layouts[first])
    for first, then in pairs:
        directory = shutil.copytree(tmp_path / first, tmp_path / f"{first} {then}")
        for found in pool.run(until, 2, str(directory), *layouts[then]):
            if found is not None:
                resumed, made_of = found
                assert np.linalg.norm(resumed - expected) <= 1e-5 * np.linalg.norm(expected)
                assert set(made_of) == {"keras"}


@functools.cache
def compressing(parallel):
    return dtk.strategies.AllReduceStrategy(
        world.communicator(), exchange="1bit", model_parallel=parallel
    )


def compressed(epochs, directory, parallel):
    """Weights of this rank, and what was warned of, after gradients of one bit."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(44, 6, 4, 2)).astype("float32"), random.integers(0, 3, 44)
    strategy = compressing(parallel)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = layers.parallelize(plain(), CHANNELS)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    saving = [dtk.callbacks.Checkpoint(directory)] if directory else []
    with warnings.catch_warnings(record=True) as caught:
        model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=saving)
    return bodies.flat(model.get_weights()), [str(one.message) for one in caught]


@pytest.mark.full
@pytest.mark.worlds(("collective", 4))
def test_what_an_exchange_remembers_of_parts_is_saved(pool, tmp_path):
    expected = pool.run(compressed, 3, None, 2, timeout=120)
    directory = str(tmp_path / "grid")
    pool.run(compressed, 2, directory, 2, timeout=120)
    elsewhere = str(tmp_path / "elsewhere")
    shutil.copytree(directory, elsewhere)
    resumed = pool.run(compressed, 3, directory, 2, timeout=120)
    for (weights, _), (wanted, _) in zip(resumed, expected, strict=True):
        np.testing.assert_array_equal(weights, wanted)
    told = [messages for _, messages in pool.run(compressed, 3, elsewhere, 1, timeout=120)]
    assert "in 2 part(s), which here has 1: exchange=" in "".join(told[0])
    assert not any("part(s)" in "".join(messages) for messages in told[1:])
