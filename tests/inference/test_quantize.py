"""Eight bits on all ranks alike; and knowledge passed from a large model to a small one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators import LocalCommunicator
from dtk.errors import DisagreementError
from dtk.inference import ExportError, export, quantize

from support import bodies as worlds

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])
TRAIN = 1437


def digits_model(width=64):
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu", name="image"),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="head"),
        ]
    )


def compiled(model):
    model.compile(
        keras.optimizers.Adam(0.005),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def trained_and_quantized():
    """Accuracy before and after, both ways of predicting after, and the weights of each rank."""
    strategy = worlds.strategy()
    x, y = worlds.digits()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = compiled(digits_model())
    model.fit(x[:TRAIN], y[:TRAIN], batch_size=128, epochs=4, verbose=0)
    test = x[TRAIN:], y[TRAIN:]
    before = np.mean(np.argmax(model(test[0]), -1) == test[1])
    report = quantize(model)
    after = model.evaluate(*test, batch_size=90, verbose=0)[1]
    predicted = model.predict(x[:37], batch_size=16, verbose=0)
    with pytest.raises(ValueError, match="quantised already"):
        quantize(model)
    other = digits_model()
    with strategy.scope():
        other = digits_model()
        other.layers[-1].bias.assign(np.full(10, strategy.rank))
    with pytest.raises(DisagreementError, match="model's weights"):
        quantize(other)
    difference = np.abs(predicted - model(x[:37]).numpy()).max()
    return before, after, report, model.get_weights(), difference


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_two_ranks_hold_the_same_eight_bits(world, backend, size):
    results = world(backend, size).run(trained_and_quantized)
    for before, after, report, weights, difference in results:
        assert before > 0.8 and abs(after - before) < 0.01
        assert report.layers == ("hidden", "head") and report.left == ("image",)
        assert report.bytes_after < 0.32 * report.bytes_before
        assert sum(weight.nbytes for weight in weights) == report.bytes_after
        assert [weight.dtype for weight in weights].count(np.dtype("int8")) == 2
        assert difference < 1e-5
        for mine, first in zip(weights, results[0][3], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_model_that_keras_quantises_nothing_of_is_refused():
    """Breaks as a model that is called int8, and in which every weight is a float."""
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 3, name="first")])
    with pytest.raises(ValueError, match=r"weights are in Conv2D: it knows Dense.*LiteRT"):
        quantize(model)
    model = digits_model(4)
    with pytest.raises(ValueError, match="filters='nothing'"):
        quantize(model, filters="nothing", strategy=LocalCommunicator())


@pytest.mark.full("a cheaper test holds its rule")
def test_litert_takes_no_int8_of_keras_and_says_what_to_do(tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    quantize(model)
    with pytest.raises(ExportError, match=r"optimizations=\[tf.lite.Optimize.DEFAULT\]"):
        export(model, tmp_path / "model.tflite", "litert")
    export(model, tmp_path / "model", "tf_saved_model")


def distilled(strategy=None):
    """Weights of a student, taught by a teacher of random weights."""
    x, y = worlds.digits()
    keras.utils.set_random_seed(1)
    with worlds.scope_of(strategy):
        teacher, student = digits_model(32), digits_model(4)
        distiller = keras.distillation.Distiller(
            teacher,
            student,
            keras.distillation.LogitsDistillation(4.0, keras.losses.KLDivergence()),
            student_loss_weight=0.3,
        )
        compiled(distiller)
    held = teacher.get_weights()
    history = distiller.fit(x[:107], y[:107], batch_size=16, epochs=2, verbose=0).history
    assert all(np.array_equal(*pair) for pair in zip(held, teacher.get_weights(), strict=True))
    return student.get_weights(), history


def distilled_by_all():
    return distilled(worlds.strategy())


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_a_student_of_two_ranks_is_that_of_one_process(world, backend, size):
    """The last batch of 11 rows is uneven, too."""
    results = world(backend, size).run(distilled_by_all)
    weights, history = distilled()
    for theirs, seen in results:
        for mine, other in zip(weights, theirs, strict=True):
            np.testing.assert_allclose(other, mine, 0, 1e-5 * np.abs(mine).max())
        assert seen.keys() == history.keys()
        for name in history:
            np.testing.assert_allclose(seen[name], history[name], 1e-4)


def test_keras_distils_by_default_what_is_no_distribution():
    """When this fails, docs/inference.md need not warn of `LogitsDistillation()` any more.

    Given the name "kl_divergence", Keras 3.15 does not recognise it, and compares logits as if they
    were probabilities: two models with the same logits but for a constant have the same softmax,
    and a divergence of 0.
    """
    logits = tf.constant([[1.0, 2.0, 3.0]])
    by_name = keras.distillation.LogitsDistillation(2.0)
    by_instance = keras.distillation.LogitsDistillation(2.0, keras.losses.KLDivergence())
    assert abs(float(by_instance.compute_loss(logits, logits - 2.0))) < 1e-6
    assert float(by_name.compute_loss(logits, logits - 2.0)) > 0.1
