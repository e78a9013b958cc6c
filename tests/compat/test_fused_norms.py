"""The fused operation normalizes, and remembers, as Keras's own layer does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.cluster.variables import FUSED_BATCH_NORM
from dtk.compat import fused_kernels

from later import RENORM

FUSED = "FusedBatchNormV3"


def trained(shape, *, mask=None, trainable=True, training=True, dtype="float32", **options):
    """What a layer returns, its gradients, its weights after it, and the operations it took."""
    random = np.random.default_rng(5)
    policy = dtype if dtype in ("float32", "float64") else f"mixed_{dtype}"
    layer = keras.layers.BatchNormalization(momentum=0.7, dtype=policy, **options)
    layer.trainable = trainable
    layer.build(shape)
    for weight in layer.weights:
        weight.assign(random.uniform(0.5, 1.5, weight.shape))
    x = tf.constant(random.normal(3.0, 2.0, shape), dtype)
    upstream = tf.constant(random.normal(size=shape), dtype)

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None, *shape[1:]], dtype)])
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=training, mask=mask)
            loss = tf.reduce_sum(y * upstream)
        found = tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])
        kinds.update(op.type for op in tf.compat.v1.get_default_graph().get_operations())
        return y, *found

    kinds = set()
    found = [np.asarray(one, "float64") for one in step(x)]
    return found + [v.numpy() for v in layer.weights], kinds


@pytest.mark.parametrize(
    "shape, options",
    [
        ((4, 5, 6, 3), {}),
        ((4, 5, 6, 3), {"axis": 3, "epsilon": 1e-2, "scale": False, "center": False}),
        ((16, 7), {}),
        ((4, 6, 5), {"scale": False}),
        ((2, 3, 4, 2, 3), {"center": False}),
        ((1, 3), {}),
        ((4, 5, 6, 3), {"dtype": "float16"}),
    ],
)
def test_equals_keras(monkeypatch, shape, options):
    monkeypatch.setenv(FUSED_BATCH_NORM, "1")
    own, without = trained(shape, **options)
    with fused_kernels.patch_norms():
        fused, kinds = trained(shape, **options)
    assert FUSED in kinds and FUSED not in without
    tolerance = 1e-2 if "dtype" in options else 2e-5
    for one, other in zip(fused, own, strict=True):
        np.testing.assert_allclose(one, other, tolerance, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"axis": 1},
        {"epsilon": 1e-6},
        {"synchronized": True},
        pytest.param({"renorm": True}, marks=RENORM),
        {"mask": np.ones((4, 5, 6), bool)},
        {"trainable": False},
        {"training": False},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_what_it_cannot_compute_stays_keras_s(monkeypatch, options):
    monkeypatch.setenv(FUSED_BATCH_NORM, "1")
    with fused_kernels.patch_norms():
        found, kinds = trained((4, 5, 6, 3), **options)
    assert FUSED not in kinds
    for one, other in zip(found, trained((4, 5, 6, 3), **options)[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("chosen", [None, "0"])
def test_nothing_is_fused_unless_chosen(monkeypatch, chosen):
    monkeypatch.delenv(FUSED_BATCH_NORM, raising=False)
    if chosen is not None:
        monkeypatch.setenv(FUSED_BATCH_NORM, chosen)
    before = keras.layers.BatchNormalization.call
    with fused_kernels.patch_norms():
        assert keras.layers.BatchNormalization.call is before
    monkeypatch.setenv(FUSED_BATCH_NORM, "1")
    with fused_kernels.patch_norms():
        assert keras.layers.BatchNormalization.call is not before
    assert keras.layers.BatchNormalization.call is before
