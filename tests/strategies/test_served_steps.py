"""Steps that update in their middle: with parameter servers refused, where that would be too late.

Behind parameter servers gradients are applied when the step is over. keras.io's DCGAN, whose
generator learns from the discriminator just updated, trained on with the old one: 4e-4 away from
one process, and nobody was told.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from dtk.errors import NotDistributedError
from dtk.exchange import Downpour
from dtk.parameter_server.consistency_models import BoundedDelay

from support.bodies import digits, flat, scope_of, served_with
from support.once import once
from support.served_bodies import check_mistake, exchanging, partitioned

TOLERANCE = 1e-5
pytestmark = pytest.mark.worlds(("served", 2))


def check(mine, expected):
    assert np.linalg.norm(mine[0] - expected[0]) <= TOLERANCE * np.linalg.norm(expected[0])
    for name, values in expected[1].items():
        np.testing.assert_allclose(mine[1][name], values, rtol=TOLERANCE)


LATENT = 6


class GAN(keras.Model):
    """Two networks, two optimizers, as keras.io overrides `train_step`; the noise is given."""

    def __init__(self, joint):
        super().__init__()
        self.discriminator = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 4, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ],
            name="discriminator",
        )
        self.generator = keras.Sequential(
            [
                keras.Input((LATENT,)),
                layers.Dense(4 * 4 * 4),
                layers.Reshape((4, 4, 4)),
                layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
            ],
            name="generator",
        )
        self.joint = joint

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def call(self, images):
        return self.discriminator(images)

    def train_step(self, data):
        images, noise = data
        with tf.GradientTape() as tape:
            both = ops.concatenate([self.generator(noise), images], axis=0)
            labels = ops.concatenate([ops.ones_like(noise[:, :1]), ops.zeros_like(noise[:, :1])], 0)
            d_loss = self.loss_fn(labels, self.discriminator(both))
        d_gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        if not self.joint:
            self.d_optimizer.apply(d_gradients, self.discriminator.trainable_weights)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(ops.zeros_like(predictions), predictions)
        g_gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        if self.joint:
            self.d_optimizer.apply(d_gradients, self.discriminator.trainable_weights)
        self.g_optimizer.apply(g_gradients, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def adversaries(strategy, joint):
    """Weights and logs after 12 steps; `joint`: all gradients come before the first update."""
    x, _ = digits()
    noise = keras.utils.normalize(x[:96, 2:4, 2:5, 0].reshape(96, LATENT))
    keras.utils.set_random_seed(5)
    with scope_of(strategy):
        model = GAN(joint)
        model.compile(
            keras.optimizers.Adam(0.002),
            keras.optimizers.Adam(0.001),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = model.fit(x[:96], noise, batch_size=16, epochs=2, verbose=0).history
    return flat(model.get_weights()), history


def served(consistency, joint):
    return adversaries(served_with(consistency), joint)


class Stepping(keras.Model):
    """A table and a kernel, and one of STEPS."""

    def __init__(self, step):
        super().__init__()
        self.table, self.other = layers.Embedding(20, 3), layers.Embedding(20, 3)
        self.dense = layers.Dense(1)
        self.step = step
        self.second = keras.optimizers.SGD(0.1)

    def build(self, shape):
        self.table.build()
        self.other.build()
        self.dense.build((None, 3))
        self.built = True

    def call(self, ids):
        return self.dense(self.table(ids) + self.other(ids))

    def gradients(self, ids, weights, output=None):
        with tf.GradientTape() as tape:
            found = self(ids) if output is None else output()
            loss = keras.losses.MeanSquaredError()(ops.ones_like(found), found)
        return tape.gradient(loss, weights), loss

    def train_step(self, ids):
        loss = STEPS[self.step](self, ids)
        return {"loss": loss}


def _update(model, ids):
    weights = model.trainable_weights
    gradients, loss = model.gradients(ids, weights)
    model.optimizer.apply(gradients, weights)
    return loss


def _then_read(read):
    def step(model, ids):
        loss = _update(model, ids)
        return loss + 0.0 * ops.sum(read(model, ids))

    return step


def _without_names(model, ids):
    """Gradients alone: the optimizer knows what they are of."""
    gradients, loss = model.gradients(ids, model.trainable_weights)
    model.optimizer.apply(gradients)
    return loss


def _disjoint(model, ids):
    """Two optimizers; the second's gradients are computed without what the first updates."""
    first, second = model.table.trainable_weights, model.other.trainable_weights
    gradients, loss = model.gradients(
        ids, first, output=lambda: ops.sum(model.table(ids), -1)[:, None]
    )
    model.optimizer.apply(gradients, first)
    gradients, more = model.gradients(
        ids, second, output=lambda: ops.sum(model.other(ids), -1)[:, None] * 2.0
    )
    model.second.apply(gradients, second)
    return loss + more


def _persistent(model, ids):
    """The second gradient is taken after the first update, but of what was computed before."""
    first, second = model.table.trainable_weights, model.other.trainable_weights
    loss_of = keras.losses.MeanSquaredError()
    with tf.GradientTape(persistent=True) as tape:
        found = model(ids)
        losses = [loss_of(target * ops.ones_like(found), found) for target in (1.0, 2.0)]
    model.optimizer.apply(tape.gradient(losses[0], first), first)
    model.second.apply(tape.gradient(losses[1], second), second)
    return losses[0]


def _twice(model, ids):
    """As WGANs train their critic: again, with what it has become."""
    _update(model, ids)
    return _update(model, ids)


def _in_a_branch(model, ids):
    weights = model.trainable_weights
    gradients, loss = model.gradients(ids, weights)

    def apply():
        model.optimizer.apply(gradients, weights)
        return 1

    tf.cond(loss > 0.0, apply, lambda: 0)
    return loss


def _compiled(model, ids):
    return tf.function(lambda: _update(model, ids), autograph=False)()


@functools.cache
def stranger():
    """A layer that no model has."""
    layer = layers.Dense(1)
    layer.build((None, 3))
    return layer


def _of_a_stranger(model, ids):
    loss, weights = _update(model, ids), stranger().trainable_weights
    with tf.GradientTape() as tape:
        more = ops.sum(stranger()(ops.ones((1, 3))))
    model.second.apply(tape.gradient(more, weights), weights)
    return loss


def _by_hand(model, ids):
    loss = _update(model, ids)
    model.dense.bias.assign(ops.ones((1,)))
    return loss


def _by_dtype(model, ids):
    """Another optimizer for the ids of another trace."""
    weights = model.trainable_weights
    gradients, loss = model.gradients(ids, weights)
    (model.optimizer if ids.dtype == tf.int32 else model.second).apply(gradients, weights)
    return loss


STEPS = {
    "kernel": _then_read(lambda model, ids: model.dense(ops.ones((1, 3)))),
    "table": _then_read(lambda model, ids: model.table(ids)),
    "whole table": _then_read(lambda model, ids: ops.transpose(model.table.embeddings)),
    "kernel in a function": _then_read(
        lambda model, ids: tf.function(lambda: model.dense(ops.ones((1, 3))))()
    ),
    "rate": _then_read(lambda model, ids: model.optimizer.learning_rate),
    "disjoint": _disjoint,
    "persistent": _persistent,
    "without names": _without_names,
    "twice": _twice,
    "branch": _in_a_branch,
    "compiled": _compiled,
    "stranger": _of_a_stranger,
    "by hand": _by_hand,
    "by dtype": _by_dtype,
}


def stepped(strategy, name):
    ids = (tf.range(48) * 7 % 20).numpy()
    keras.utils.set_random_seed(5)
    with scope_of(strategy):
        model = Stepping(name)
        model.build(None)
        model.compile(keras.optimizers.SGD(0.1))
        model.optimizer.build(model.trainable_variables)
        stranger()
    model.fit(ids, batch_size=8, verbose=0)
    if name == "by dtype":
        model.fit(ids.astype("int64"), batch_size=8, verbose=0)
    return flat(model.get_weights())


def _unjoined(consistency, exchange=None):
    """A mistake: adversaries who see each other updated."""

    def make():
        with exchanging(served_with(consistency), exchange):
            served(consistency, False)

    said = ("'discriminator/", "'adam'", "its own update", "AllReduceStrategy", "first apply")
    return make, NotDistributedError, *said


def stepped_served(name, parts=2):
    """With every table in some parts."""
    strategy = served_with("sync")
    with partitioned(strategy, parts, rows=20):
        return stepped(strategy, name)


def _refused(name, *said):
    """A mistake: a step that needs what it has updated."""
    refused = functools.partial(stepped_served, name, parts=1)
    return refused, NotDistributedError, *said, "model 'stepping'"


MISTAKES = {
    "adversaries sync": _unjoined("sync"),
    "adversaries rarely": _unjoined("async", Downpour(2)),
    "kernel": _refused("kernel", "reads 'stepping/dense/kernel' (and 1 more)", "'sgd"),
    "table": _refused("table", "reads 'stepping/embedding/embeddings'"),
    "whole table": _refused("whole table", "reads 'stepping/embedding/embeddings'"),
    "in a function": _refused("kernel in a function", "reads 'stepping/dense/kernel'"),
    "twice": _refused("twice", "(and 3 more)", "its own update"),
    "branch": _refused("branch", "inside a branch, a loop or a function", "in train_step itself"),
    "stranger": _refused("stranger", "/kernel' to optimizer", "no trainable weight of the model"),
    "by dtype": _refused("by dtype", "other optimizers", "compile the model again"),
    "by hand": _refused(
        "by hand", "assigns 'stepping/dense/bias'", "only optimizers", "constraint"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_steps_that_need_what_they_have_updated_are_refused(pool, name):
    check_mistake(pool, __name__, name)


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("consistency", ["sync", BoundedDelay(0)], ids=str)
def test_adversaries_whose_gradients_all_come_first_equal_one_process(pool, consistency):
    (mine,) = pool.run(served, consistency, True)
    check(mine, once(adversaries, None, True))


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("name", ["disjoint", "persistent", "rate", "without names", "compiled"])
def test_steps_that_need_no_update_of_their_own(pool, name):
    (mine,) = pool.run(stepped_served, name)
    expected = stepped(None, name)
    assert np.linalg.norm(mine - expected) <= TOLERANCE * np.linalg.norm(expected)
