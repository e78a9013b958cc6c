"""Statistics are those of whole batches, over all ranks; nothing else of training changes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk

from callbacks.bodies import data, fails, strategy
from support.newer_keras import RENORM

two_ranks = pytest.mark.worlds(("collective", 2))


def check(results, rows):
    for (weights, found, losses, logs), plain, x in results:
        (mean, variance), _ = found
        batch = x[:rows].astype("float64")
        np.testing.assert_allclose(mean, batch.mean(0), rtol=1e-6)
        np.testing.assert_allclose(variance, batch.var(0), rtol=1e-5)
        if plain is not None:
            assert weights == plain[0], "training must not notice"
            assert logs == plain[3]
            assert not np.allclose(variance, plain[1][0][1], rtol=0.1), "the case must differ"
        assert losses[0] == pytest.approx(losses[1], rel=1e-6), "validation must see them"
        for one, other in zip(found, results[0][0][1], strict=True):
            np.testing.assert_array_equal(one, other)


def normalized(form, batches, size=16, kind="world", synchronized=False, **options):
    """Statistics after training, and the same training without the callback."""
    strategy(kind)  # before the dataset: TensorFlow's collectives come first
    x, y = data()
    x = x * 3 + np.arange(37, dtype="float32")[:, None]  # ranks' rows differ in their mean
    given, of_rows = x, size
    if form == "dataset":
        given, of_rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(size), None

    def run(*callbacks):
        keras.utils.set_random_seed(3)
        norms = [keras.layers.BatchNormalization(synchronized=synchronized) for _ in range(2)]
        with strategy(kind).scope():
            layers = [norms[0], keras.layers.Dense(3), keras.layers.Dropout(0.3), norms[1]]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"], **options)
        held_out = (x[:9], y[:9])
        how = {"batch_size": 16, "epochs": 2, "verbose": 0, "validation_data": held_out}
        model.fit(x, y, callbacks=callbacks, **how)
        assert norms[0].momentum == 0.99
        weights = [v.numpy().tobytes() for v in model.trainable_variables]
        found = [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in norms]
        val_loss = model.history.history["val_loss"][-1]
        evaluated = model.evaluate(*held_out, verbose=0)[0]
        return weights, found, (val_loss, evaluated), model.history.history["loss"]

    statistics = dtk.callbacks.BatchNormStatistics(given, batches, of_rows)
    return run(statistics), run() if synchronized else None, x


@pytest.mark.full_but("collective-2-arrays-2-15-30")
@two_ranks
@pytest.mark.parametrize(
    "form, batches, size, rows",
    [
        ("arrays", 2, 15, 30),  # 8 and 7 rows
        ("dataset", 2, 36, 37),  # a last batch of one row, of which one rank has none
    ],
)
def test_two_ranks(pool, form, batches, size, rows):
    check(pool.run(normalized, form, batches, size, timeout=90), rows)


def normalized_in_executions():
    return normalized("arrays", 2, synchronized=True, steps_per_execution=3)


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_synchronized_layers_and_several_steps_per_execution(pool):
    check(pool.run(normalized_in_executions, timeout=90), 32)


@pytest.mark.full("a cheaper test holds its rule")
def test_two_devices(alone):
    check(alone.run(normalized, "arrays", 1, 15, "mirrored", timeout=90), 15)


def renormalized():
    with strategy().scope():
        layers = [keras.layers.BatchNormalization(renorm=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("sgd", "mse")
    x, y = data()
    statistics = dtk.callbacks.BatchNormStatistics(x)
    return fails(model.fit, x, y, verbose=0, callbacks=[statistics])


@two_ranks
@RENORM
def test_renormalization_is_refused(pool):
    for kind, message in pool.run(renormalized):
        assert kind == "ValueError" and "renorm=True" in message
