"""A model whose layers are divided by a plan computes and learns what it did before."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.compat.keras_variables import shard_of

from support.once import once
from support.world import communicator


def residual(seed=1):
    """Convolutions with a shortcut, normalization and pooling, then two dense layers."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    image = keras.Input((9, 14, 3))
    x = layers.Conv2D(4, 3, padding="same", name="first")(image)
    y = layers.BatchNormalization(name="norm")(x)
    y = layers.ReLU(name="relu")(y)
    y = layers.Conv2D(4, 3, padding="same", name="second")(y)
    x = layers.Add(name="add")([x, y])
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Conv2D(5, 3, strides=2, activation="tanh", name="third")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(6, "relu", kernel_regularizer="l2", name="hidden")(x)
    return keras.Model(image, layers.Dense(3, name="head")(x), name="residual")


PLAN = {
    "first": "rows",
    "norm": "rows",
    "second": "rows",
    "pool": "rows",
    "third": "columns",
    "hidden": "output",
    "head": "input",
}


def learned(model):
    """What a model makes of images before it is trained, its losses and what it then is."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 9, 14, 3)), rng.normal(size=(12, 3))
    before = model(x).numpy()
    with dtk.strategies.undistributed():
        model.compile(keras.optimizers.SGD(0.05), "mse")
        fitted = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return before, fitted.history["loss"], [variable.numpy() for variable in model.weights]


def whole():
    return learned(residual())


def computes_and_learns_the_same(computed, losses, weights):
    parallel = dtk.layers.parallelize(residual(), PLAN, communicator())
    names = [layer.name.rstrip("_0123456789") for layer in parallel.layers]
    assert names.count("split_rows") == names.count("gather_rows") == 1
    before, history, _ = learned(parallel)
    np.testing.assert_allclose(before, computed, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(history, losses, rtol=1e-4)
    for variable, expected in zip(parallel.weights, weights, strict=True):
        shard = shard_of(variable)
        expected = expected if shard is None else shard.part(tf.constant(expected))
        np.testing.assert_allclose(variable.value, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.worlds(("collective", 2), pytest.param(("collective", 3), marks=pytest.mark.full))
def test_a_model_in_parts_learns_the_same(pool):
    pool.run(computes_and_learns_the_same, *once(whole), timeout=200)


def test_what_stays_as_it_is():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(3, 3, name="conv"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(2, name="head"),
        ]
    )
    model.compile("sgd", "mse")
    parallel = dtk.layers.parallelize(model, {"c*": "rows"})
    assert [type(layer).__name__ for layer in parallel.layers] == [
        "InputLayer",
        "SplitRows",
        "SpatiallyParallelConv2D",
        "GatherRows",
        "Flatten",
        "Dense",
    ]
    assert parallel.compiled
    assert parallel.get_layer("head") is model.get_layer("head")
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 2))
    np.testing.assert_allclose(parallel(x), model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "plan, told",
    [
        (
            {"frist": "rows"},
            "plan['frist']: model 'residual' has no such layer; did you mean 'first'",
        ),
        ({"first": "depth"}, "plan['first'] = 'depth'; use 'channels'"),
        ({"fi*": "rows", "first": "input"}, "'first' is to be divided by 'rows' and"),
        ({"flatten": "rows"}, "'flatten' is a Flatten, which cannot be divided by 'rows'"),
        ({"norm": "input"}, "'norm' is a BatchNormalization, which cannot be divided by 'input'"),
    ],
)
def test_plans_that_cannot_be_followed(plan, told):
    with pytest.raises(ValueError) as raised:
        dtk.layers.parallelize(residual(), plan)
    assert told in str(raised.value)


def test_what_cannot_be_rewritten():
    class Own(keras.Model):
        pass

    with pytest.raises(ValueError, match="use the layers of dtk.layers in a subclassed one"):
        dtk.layers.parallelize(Own(), {"a": "rows"})
    with pytest.raises(TypeError, match=r"plan=\['head'\]; expected a dict"):
        dtk.layers.parallelize(residual(), ["head"])
