"""A few rows both ways: what the kinds of losses make of training, and that nothing is changed."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.input import digests
from dtk.trainer.model_scope import trainer_of
from dtk.trainer.replica import self_test, snapshot

from once import once
from strategies import bodies, cases

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])


def assert_equal(mine, plain):
    assert np.linalg.norm(mine[0] - plain[0]) <= 1e-5 * np.linalg.norm(plain[0])
    for name, values in plain[1].items():
        np.testing.assert_allclose(mine[1][name], values, 1e-5, 1e-6, err_msg=name)


def scalar(y, p):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, p, True))


def summed(y, p):
    return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, p, True)) / 16


class Mixed(cases.Subclassed):
    """A mean, a sum and a quotient, in one loss; logged in parts."""

    def __init__(self):
        super().__init__()
        self.tracked = keras.metrics.Mean(name="tracked")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            rows = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), True)
            weight = 1 + tf.cast(y > 2, rows.dtype)
            masked = tf.reduce_sum(rows * weight) / tf.reduce_sum(weight)
            spread = tf.reduce_sum(tf.square(rows)) / 64
            loss = tf.reduce_mean(rows) + 0.5 * spread - 0.1 * masked
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        self.tracked.update_state(spread)
        return {"loss": loss, "tracked": self.tracked.result(), "masked": masked}


def trained(name, tested=True, devices=0, plain=False):
    """Weights, history and what was printed, of one of these."""
    strategy = None if plain else bodies.strategy(devices)
    x, y = cases.rows(42)
    builds = {
        "scalar": (cases.small, scalar), "summed": (cases.small, summed), "mixed": (Mixed, None)
    }  # fmt: skip
    build, loss = builds[name]

    def seeded():
        keras.utils.set_random_seed(3)
        return build()

    model = cases.compiled(strategy, seeded, optimizer=keras.optimizers.SGD(0.05), loss=loss)
    if not tested:
        trainer_of(model).kinds["train"] = {}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), history.history, text.getvalue()


def plain(name):
    return trained(name, plain=True)


@TWO
@pytest.mark.parametrize("name", ["scalar", "summed", "mixed"])
def test_losses_of_ones_own(world, backend, size, name):
    """Breaks as sums that count with a replica's share, or as a mean that counts twice."""
    for mine in world(backend, size).run(trained, name):
        assert_equal(mine, once(plain, name))


@pytest.mark.parametrize("backend, size, devices", [("mirrored", 2, 2)])
def test_on_two_devices(world, backend, size, devices):
    (mine,) = world("local", 1).run(trained, "mixed", True, devices)
    assert_equal(mine, once(plain, "mixed"))


@TWO
def test_without_it_a_mean_is_right_and_a_sum_is_not(world, backend, size):
    """What the test is for: the sum would be trained on by half, without a word."""
    mine, _ = world(backend, size).run(trained, "scalar", False)
    assert_equal(mine, once(plain, "scalar"))
    mine, _ = world(backend, size).run(trained, "summed", False)
    with pytest.raises(AssertionError):
        assert_equal(mine, once(plain, "summed"))


@TWO
def test_what_it_prints(world, backend, size):
    """Its cost, and what it found; on rank 0 only."""
    (_, _, said), (_, _, other) = world(backend, size).run(trained, "summed")
    assert said.startswith("dtk: self-test of model 'sequential")
    assert "(loss summed): 5 rows as a whole and in 2 parts agree to" in said
    assert "loss 0 is a sum (" in said and said.endswith(" s)\n")
    assert other == ""


def changed_nothing():
    """Whether weights, optimizer, metrics and seeds are as before a self-test."""
    strategy = bodies.strategy()
    x, y = cases.rows(16)

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(10)]
        normalized = keras.layers.BatchNormalization()
        return keras.Sequential([keras.Input((8, 8, 1)), *layers, normalized])

    model = cases.compiled(strategy, build, loss=scalar, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, verbose=0)
    model.reset_metrics()
    trainer = trainer_of(model)
    variables = snapshot.changed_by_training(model)
    before = [v.numpy().tobytes() for v in variables]
    batch = trainer.cut(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
    trial = trainer.make_trial(model.train_step, next(iter(batch)))
    verdict = self_test.run(trial, ["a test"])
    assert digests.digest(tf.constant([1])) is not None
    return before == [v.numpy().tobytes() for v in variables], verdict


@TWO
def test_it_changes_nothing(world, backend, size):
    for same, verdict in world(backend, size).run(changed_nothing):
        assert same
        assert verdict.difference < 1e-4 and verdict.wrong is None and verdict.notes == []
