"""Bodies with losses and steps of their own, mostly with and without a self-test."""

from __future__ import annotations

import contextlib
import io

import keras
import tensorflow as tf

from dtk.trainer.model_scope import trainer_of

from strategies import bodies, cases


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


def changed_nothing():
    """Whether weights, optimizer, metrics and seeds are as before a self-test."""
    from dtk.input import digests
    from dtk.trainer.replica import self_test, snapshot

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
