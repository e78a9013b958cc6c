"""Models that look tables up by places and by words, under optimizers that square slices."""

from __future__ import annotations

import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops, optimizers

from dtk.errors import NotDistributedError

from support import bodies
from support.served_bodies import partitioned

WORDS, LENGTH, WIDTH = 11, 6, 3
OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "clipnorm": lambda: optimizers.SGD(0.5, clipnorm=0.05),
    "global clipnorm": lambda: optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.05),
}


class Reader(layers.Layer):
    """Words and places of one table, places of another, and distances by a list of indices."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, WIDTH)
        self.places = layers.Embedding(LENGTH, WIDTH)
        self.bias = self.add_weight(shape=(2 * LENGTH, WIDTH), initializer="uniform")
        places = np.arange(LENGTH)
        self.distances = self.add_weight(
            shape=(LENGTH, LENGTH), dtype="int32", trainable=False, initializer="zeros"
        )
        self.distances.assign(places[:, None] - places + LENGTH)

    def call(self, words):
        found = self.table(words) + self.table(ops.arange(ops.shape(words)[1]))
        length = ops.shape(found)[-2]
        near = ops.mean(ops.take(self.bias, self.distances, axis=0), 0)
        return ops.tanh(found + self.places(ops.arange(0, length)) + near[:length])


class Readers(keras.Model):
    """One for each optimizer, all trained in the same steps."""

    def __init__(self, recipes):
        super().__init__()
        self.readers = [keras.Sequential([Reader(), layers.Dense(4)]) for _ in recipes]
        for number, make in enumerate(recipes.values()):
            setattr(self, f"optimizer_{number}", make())

    def call(self, words):
        return [reader(words) for reader in self.readers]

    def train_step(self, data):
        words, labels = data
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found = []
        for reader in self.readers:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, reader(words))
            weights = reader.trainable_weights
            found.append((tape.gradient(loss, weights), weights))
        for number, (gradients, weights) in enumerate(found):
            getattr(self, f"optimizer_{number}").apply(gradients, weights)
        return {"loss": loss}


def sentences(rows=45):
    words = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH))
    words[:, 1] = words[:, 0]  # lines that a row takes twice
    return words, (words + 3 * np.arange(LENGTH)) % 4


def train(strategy, recipes, epochs=8, **compiled):
    """Weights by optimizer after three steps an epoch, the last one of 13 rows."""
    keras.utils.set_random_seed(5)
    with bodies.scope_of(strategy):
        model = Readers({name: OPTIMIZERS[name] for name in recipes})
        model.compile(**{"optimizer": model.optimizer_0} | compiled)
    words, labels = sentences()
    model.fit(words, labels, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return {
        name: bodies.flat(reader.get_weights())
        for name, reader in zip(recipes, model.readers, strict=True)
    }


def loop(devices=0):
    """Words and places in a loop of a script's own, under `strategy.run` where it has devices."""
    strategy = bodies.strategy(devices) if devices else None
    keras.utils.set_random_seed(1)
    words = np.random.default_rng(0).integers(0, 9, (32, 5))
    with bodies.scope_of(strategy):
        table, places = layers.Embedding(9, 1), layers.Embedding(5, 1)
        table.build()
        places.build()
        weights = [table.embeddings, places.embeddings]
        optimizer = optimizers.Adam(0.01)
        optimizer.build(weights)

    def step(words):
        with tf.GradientTape() as tape:
            found = table(words) + places(ops.arange(ops.shape(words)[1]))
            loss = tf.reduce_sum((found[..., 0] - tf.cast(words % 2, tf.float32)) ** 2) / 16
        optimizer.apply(tape.gradient(loss, weights), weights)

    run = tf.function(lambda batch: strategy.run(step, (batch,)) if strategy else step(batch))
    batches = tf.data.Dataset.from_tensor_slices(words).batch(16).repeat(5)
    for batch in strategy.experimental_distribute_dataset(batches) if strategy else batches:
        run(batch)
    return {"adam": bodies.flat([weight.numpy() for weight in weights])}


def refusal_of_eager_steps():
    """What the self-test says where no graph tells what slices are of."""
    try:
        train(bodies.strategy(2), ("adam",), 1, run_eagerly=True)
    except NotDistributedError as error:
        return str(error)


def train_served(recipes):
    """The same behind two servers, each with a part of every table of more than ten lines."""
    strategy = bodies.served_with("sync")
    with partitioned(strategy, 2, rows=11):
        return train(strategy, recipes)


class Opaque(layers.Layer):
    """Looks words up by indices of which no graph tells what they are of."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(WORDS, WIDTH)

    def call(self, words):
        some = tf.reduce_any(words >= 0)
        return self.table(tf.cond(some, lambda: words + 0, lambda: words))


def told_of_opaque_lookups():
    """What is said of them, tried on a few rows and not."""
    strategy, told = bodies.served_with("sync"), []
    words, labels = sentences(16)
    for self_test in (True, False):
        strategy.self_test = self_test
        with strategy.scope():
            model = keras.Sequential([Opaque(), layers.Dense(4)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        try:
            model.fit(words, labels, batch_size=16, verbose=0)
        except NotDistributedError as error:
            told.append(str(error))
        else:
            told.append("trained")
    strategy.self_test = "auto"
    return told


def train_plain(recipes):
    return train(None, recipes)


def train_with(recipes, compiled, devices=0):
    strategy = bodies.strategy(devices)  # before the patch, which a new strategy would keep
    # Untried: it is the graph that tells which slices are of places.
    with mock.patch.dict(os.environ, {"DTK_SELF_TEST": "0"}):
        return train(strategy, recipes, **compiled)
