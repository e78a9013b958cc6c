"""Every BatchNormalization of a model is synchronized, wherever it is."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import dtk


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
