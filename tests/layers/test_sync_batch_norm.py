"""Every BatchNormalization of a model is synchronized, wherever it is."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import dtk

from support import bodies
from support.once import once


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.norms = {"a": [keras.layers.BatchNormalization(name="deep")]}

    def call(self, x):
        return self.norms["a"][0](x)


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.dense = Block(), keras.layers.Dense(2)

    def call(self, x):
        return self.dense(self.block(x))


def everywhere():
    shared = keras.layers.BatchNormalization(name="shared")
    inner = keras.Sequential([keras.Input((3,)), shared, Block()])
    x = keras.Input((3,))
    y = keras.layers.TimeDistributed(keras.layers.BatchNormalization(name="wrapped"))(
        keras.layers.RepeatVector(2)(inner(shared(x)))
    )
    return keras.Model(x, y), shared


def test_all_of_a_functional_model():
    model, shared = everywhere()
    weights = [w.copy() for w in model.get_weights()]
    assert dtk.layers.convert_sync_batchnorm(model) is model
    norms = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert {layer.name for layer in norms} == {"shared", "deep", "wrapped"}
    assert all(layer.synchronized for layer in norms)
    assert any(layer is shared for layer in norms)
    for got, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_subclassed_model_that_was_trained():
    """Its step was traced with the statistics of one worker."""
    model = Own()
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert model.train_function is not None
    dtk.layers.convert_sync_batchnorm(model)
    assert model.train_function is None
    assert model.block.norms["a"][0].synchronized
    model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)


def test_one_that_keras_does_not_know_of():
    class Holder:
        def __init__(self):
            self.norms = [keras.layers.BatchNormalization(name="hidden")]

    model, _ = everywhere()
    model.kept = Holder()
    with pytest.raises(ValueError, match="'hidden' in Functional .*attribute 'kept.norms'"):
        dtk.layers.convert_sync_batchnorm(model)


def trained(strategy=None, convert=lambda model: model):
    """In float64, whose rounding hides nothing; others train in float32."""
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(24, 6)), rng.normal(size=(24, 2))
    keras.utils.set_random_seed(1)
    with bodies.scope_of(strategy):
        layers = [
            keras.Input((6,), dtype="float64"),
            keras.layers.Dense(5, "tanh", dtype="float64"),
            keras.layers.BatchNormalization(momentum=0.7, dtype="float64"),
            keras.layers.Dense(2, dtype="float64"),
        ]
        model = convert(keras.Sequential(layers))
        loss = keras.losses.MeanSquaredError(dtype="float64")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    model.fit(x, y, batch_size=8, epochs=5, shuffle=False, verbose=0)
    return model.get_weights()


def converted():
    return trained(bodies.strategy(), dtk.layers.convert_sync_batchnorm)


@pytest.mark.worlds(("collective", 2))
def test_two_workers_equal_one_process(pool):
    """Two workers train a converted model as one process trains the plain one."""
    for weights in pool.run(converted, meanwhile=lambda: once(trained)):
        for got, expected in zip(weights, once(trained), strict=True):
            assert got.dtype == "float64"
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
