"""Batch normalization by TensorFlow's fused operation, where the user or `dtk tune` has chosen it.

Keras 3 computes a batch's moments first and then normalizes with them, in a dozen passes over the
activations; legacy Keras had one operation for all of it (`FusedBatchNormV3`), which rounds
otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtk.cluster.variables import FUSED_BATCH_NORM
from dtk.compat.replacing import replaced

# cuDNN refuses less, and TensorFlow would then normalize with another one than the layer's.
_LEAST_EPSILON = 1.001e-5


@contextlib.contextmanager
def fused_if_chosen() -> Iterator[None]:
    """Return a context in which batch normalization trains by the fused operation, if chosen.

    What that operation cannot compute stays Keras's: masked, renormalized and synchronized layers,
    channels that are not last, and types other than 32 bits.
    """
    if os.environ.get(FUSED_BATCH_NORM) != "1":
        yield
        return
    original = keras.layers.BatchNormalization.call

    @functools.wraps(original)
    def call(
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,
    ) -> tf.Tensor:
        if training and layer.trainable and mask is None and _fits(layer, inputs):
            return _fused(layer, inputs)
        return original(layer, inputs, training=training, mask=mask)

    with replaced(keras.layers.BatchNormalization, call=call):
        yield


def _fits(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> bool:
    return (
        isinstance(inputs, tf.Tensor)
        and inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
        and layer.axis in (-1, len(inputs.shape) - 1)
        and layer.epsilon >= _LEAST_EPSILON
        and not (layer.synchronized or layer.renorm)
    )


def _fused(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Normalize, and update the moving statistics, as `BatchNormalization.call` does."""
    x = tf.cast(inputs, tf.float32)  # as Keras does, against overflow
    channels = x.shape[-1]
    images = x if len(x.shape) == 4 else tf.reshape(x, [-1, 1, 1, channels])
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images,
        scale=tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones([channels]),
        offset=tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        is_training=True,
    )
    # The operation estimates the population's variance, of n - 1; Keras 3 keeps the batch's.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance *= tf.math.divide_no_nan(count - 1.0, count)
    for moving, now in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = tf.cast(moving, tf.float32)
        moving.assign(before * layer.momentum + now * (1.0 - layer.momentum))
    if images is not x:
        outputs = tf.reshape(outputs, tf.shape(x))
        outputs.set_shape(x.shape)
    return tf.cast(outputs, layer.compute_dtype)
