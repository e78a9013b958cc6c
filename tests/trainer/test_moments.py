"""A synchronized norm sees all workers' rows, for one message in each direction."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk

from support import bodies

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


@pytest.mark.full
@pytest.mark.worlds(("collective", 2), ("collective", 3))
@pytest.mark.parametrize("axis", [-1, 2])
def test_weights_are_those_of_one_process_whatever_is_normalized(pool, axis):
    # 16 and 16 rows, then 8; with three workers some have a row more
    found = [weights for weights, _ in pool.run(fit, True, 16, axis)]
    alone, _ = pool.run(fit, True, 16, axis, 0, True)[0]
    for weights in found:
        assert np.array_equal(weights, found[0])
    assert np.linalg.norm(found[0] - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_between_mirrored_devices(pool):
    ((mirrored, _),) = pool.run(fit, True, 16, -1, 2)
    ((alone, _),) = pool.run(fit, True, 16, -1, 0, True)
    assert np.linalg.norm(mirrored - alone) <= 1e-5 * np.linalg.norm(alone)


class OwnStep(keras.Model):
    """A step with two tapes over one normalized network, as a GAN's; the inner one's target has
    rows, and is no mean."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.below = keras.layers.Dense(6, activation="tanh")
        self.above = keras.layers.Dense(1)

    def call(self, x, training=None):
        return self.above(keras.ops.tanh(self.norm(self.below(x), training=training)))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                judged = self(x, training=True)
            slopes = inner.gradient(judged, x)
            penalty = tf.reduce_mean(tf.square(slopes))
            loss = tf.reduce_mean(tf.square(judged - y)) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_own_step(batch, plain=False):
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, size=(23, 4)).astype("float32")
    y = random.normal(size=(23, 1)).astype("float32")
    with bodies.scope_of(None if plain else bodies.strategy()):
        keras.utils.set_random_seed(2)
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.1))
    with dtk.strategies.undistributed():  # the plain one
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


@pytest.mark.full
@pytest.mark.worlds(("collective", 2))
def test_own_steps_with_parts_of_unlike_size_are_those_of_one_process(pool):
    # 6 and 5 rows, 6 and 5, then 1 and 0: gradients came back through the moments without shares
    found = pool.run(fit_own_step, 11)
    alone = pool.run(fit_own_step, 11, True)[0]
    for weights in found:
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)


def fit_years(plain=False):
    """Train a norm of what is far from zero, and spreads little."""
    x = np.random.default_rng(0).normal(2000.0, 5.0, size=(64, 8)).astype("float32")
    with bodies.scope_of(None if plain else bodies.strategy()):
        keras.utils.set_random_seed(2)
        norm = keras.layers.BatchNormalization(synchronized=not plain)
        model = keras.Sequential([keras.Input((8,)), norm, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    with dtk.strategies.undistributed():  # the plain one
        model.fit(x, (x[:, :1] - 2000.0) / 5.0, batch_size=16, shuffle=False, verbose=0)
    return bodies.flat([norm.gamma, norm.beta, norm.moving_variance, *model.layers[1].weights])


@pytest.mark.worlds(("collective", 2))
def test_what_is_far_from_zero_keeps_its_variance(pool):
    """It was a hundredth too small or large, as the difference of two sums of squares."""
    found = pool.run(fit_years)
    alone = pool.run(fit_years, True)[0]
    for weights in found:
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)


def fit_masked(axis, plain=False):
    """Train a norm of time steps of which a mask keeps some; of the first rows it keeps none."""
    random = np.random.default_rng(1)
    x = random.normal(3.0, 2.0, size=(10, 4, 3)).astype("float32")
    mask, y = random.random((10, 4)) < 0.6, random.normal(size=(10, 1)).astype("float32")
    mask[:3] = False
    with bodies.scope_of(None if plain else bodies.strategy()):
        keras.utils.set_random_seed(3)
        steps, kept = keras.Input((4, 3)), keras.Input((4,), dtype="bool")
        norm = keras.layers.BatchNormalization(axis=axis, synchronized=not plain)
        normed = norm(keras.layers.Dense(3, activation="tanh")(steps), mask=kept)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(normed))
        model = keras.Model([steps, kept], outputs)
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with dtk.strategies.undistributed():  # the plain one
        model.fit([x, mask], y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


@pytest.mark.full_but("collective-2-1", why="test_cases.py has masked norms over the last axis")
@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_mask_counts_for_each_channel(pool, axis):
    """Where channels are time steps, each has a count of its own: .1 apart with one for all."""
    found = pool.run(fit_masked, axis)
    alone = pool.run(fit_masked, axis, True)[0]
    for weights in found:
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)


def loop_of_years(devices=0, plain=False):
    """Train the norm of `fit_years`, where a mask says which rows count, in a loop of one's own."""
    random = np.random.default_rng(0)
    x = random.normal(2000.0, 5.0, size=(33, 8)).astype("float32")
    kept = random.random(33) < 0.8
    strategy = None if plain else bodies.strategy(devices)
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(2)
        norm = keras.layers.BatchNormalization(synchronized=not plain)
        dense = keras.layers.Dense(1)
        dense.build((None, 8))
        norm.build((None, 8))
        optimizer = keras.optimizers.SGD(0.1)

    def step(x, kept):
        weights = [norm.gamma, norm.beta, *dense.trainable_weights]
        with tf.GradientTape() as tape:
            rows = dense(norm(x, training=True, mask=kept)) - (x[:, :1] - 2000.0) / 5.0
            loss = tf.reduce_sum(tf.square(rows)) / 16
        optimizer.apply(tape.gradient(loss, weights), weights)

    batches = tf.data.Dataset.from_tensor_slices((x, kept)).batch(16)  # 16 rows, 16, and 1
    if strategy is not None:
        batches = strategy.experimental_distribute_dataset(batches)
    run = tf.function(lambda *batch: strategy.run(step, batch) if strategy else step(*batch))
    with dtk.strategies.undistributed() if plain else contextlib.nullcontext():
        for batch in batches:
            run(*batch)
    return bodies.flat([*norm.weights, *dense.weights])


@pytest.mark.worlds(("collective", 2))
def test_a_loop_of_ones_own_normalizes_over_all_rows(pool):
    """Keras's own synchronized norm takes a mask for its replica's, and loses small variances."""
    found = pool.run(loop_of_years)
    alone = pool.run(loop_of_years, 0, True)[0]
    for weights in found:
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)


@pytest.mark.worlds(("collective", 2))
def test_one_vector_of_each_replica_travels_forwards_and_one_backwards(pool):
    (_, together), _ = pool.run(fit, True, 20)
    (_, apart), _ = pool.run(fit, False, 20)
    # Moving statistics of norms that are not synchronized are averaged in every step.
    statistics = 2 * CHANNELS
    vectors = 2 * 2 * (2 * CHANNELS + 1)
    # On a slow machine ranks ask each other in one of these epochs whether to stop: 8 bytes.
    assert together - apart == pytest.approx(FLOAT * (vectors - statistics), abs=8)


def told(kind, devices=0):
    """What is said of norms by two calls of `fit`, or of others."""
    keras.utils.set_random_seed(2)
    norms = [keras.layers.BatchNormalization(synchronized=kind == "all rows") for _ in range(5)]
    for norm in norms:
        norm.trainable = kind != "frozen"
    with bodies.scope_of(bodies.strategy(devices)):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), *norms])
        model.compile("sgd", "mse", run_eagerly=kind == "eager")
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if kind == "inference":
            model.evaluate(x, x, verbose=0)
            model.predict(x, verbose=0)
        else:
            model.fit(x, x, batch_size=16, verbose=0)
            model.fit(x, x, batch_size=16, verbose=0)
    names = ", ".join(norm.name for norm in norms[:3])
    assert said.getvalue().count("dtk.layers.convert_sync_batchnorm(model)") <= 1, "told once"
    return f"{names} and 2 more is over the rows of each of 2 replicas alone" in said.getvalue()


@pytest.mark.full
@pytest.mark.worlds(("collective", 2))
def test_a_norm_of_a_replicas_rows_is_told_once(pool):
    """Breaks as weights that differ from one process's, and no word."""
    assert pool.run(told, "a replica's rows") == [True, False]


@pytest.mark.full_but("local-1-a replica's rows-2-True")
@pytest.mark.worlds(("local", 1))
@pytest.mark.parametrize(
    "kind, devices, expected",
    [
        ("a replica's rows", 2, True),
        ("eager", 2, True),
        ("a replica's rows", 0, False),
        ("all rows", 2, False),
        ("frozen", 2, False),
        ("inference", 2, False),
    ],
)
def test_devices_tell_once_where_it_makes_a_difference(pool, kind, devices, expected):
    assert pool.run(told, kind, devices) == [expected]
