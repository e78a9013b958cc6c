"""Layers that make one pass over memory where Keras 3 makes many; last digits differ.

They are used between replicas, whose sums differ in the last digits anyway, unless the user or
`dtk tune` has chosen otherwise.

    while steps trace    BatchNormalization.call     patch_layers
                         keras.ops.einsum
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import keras
import tensorflow as tf

from dtk.cluster.variables import FUSED_BATCH_NORM, switch
from dtk.compat import names
from dtk.nests import Function
from dtk.patches import patch_around

# cuDNN refuses a smaller epsilon; TensorFlow would then normalize with another than the layer's.
_LEAST_EPSILON = 1.001e-5


@contextlib.contextmanager
def patch_layers(replicas: int | None = None) -> Iterator[None]:
    """Return a context in which layers compute by fewer operations.

    The replicas are the strategy's, unless given.
    """

    def count() -> int:
        return replicas or tf.distribute.get_strategy().num_replicas_in_sync

    def normalize(
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        training: bool | None = None,
        mask: tf.Tensor | None = None,
        *,
        original: Function[tf.Tensor],
    ) -> tf.Tensor:
        chosen = switch(os.environ, FUSED_BATCH_NORM, default=count() > 1)
        trains = training and layer.trainable and mask is None
        if chosen and trains and _fits(layer, inputs):
            return _fused(layer, inputs)
        return original(layer, inputs, training=training, mask=mask)

    def einsum(
        subscripts: str, *operands: tf.Tensor, original: Function[tf.Tensor], **options: object
    ) -> tf.Tensor:
        axes = None if options or count() == 1 else _axes_of_projection(subscripts)
        if axes is not None:
            tensors = [tf.convert_to_tensor(one) for one in operands]
            # In 16 bits, TensorFlow's operation may also sum over the rows in 16 bits.
            alike = {one.dtype for one in tensors} in ({tf.float32}, {tf.float64})
            if alike and [one.shape.rank for one in tensors] == axes:
                return tf.einsum(subscripts, *tensors)
        return original(subscripts, *operands, **options)

    with (
        patch_around(keras.layers.BatchNormalization, call=normalize),
        patch_around(names.home_of("keras.src.backend.tensorflow", "einsum"), einsum=einsum),
    ):
        yield


def _axes_of_projection(subscripts: str) -> list[int] | None:
    """Return the axes of both operands, if one matrix multiplies rows of several axes.

    Keras multiplies the rows of each example by themselves, as for the query of an attention: the
    gradient of the matrix is then one matrix for each example, and a sum of these.
    """
    match = re.fullmatch(r"([a-zA-Z]{3,}),([a-zA-Z]+)->([a-zA-Z]+)", subscripts)
    if match is None or set.intersection(*map(set, match.groups())):
        return None
    return [len(labels) for labels in match.groups()[:2]]  # Keras takes stacks of operands, too


# Batch normalization: Keras still computes what the fused operation cannot, such as masked,
# renormalized and synchronized layers, channels that are not last, and 64-bit types.


def _fits(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> bool:
    return (
        type(layer) is keras.layers.BatchNormalization  # others may compute other moments
        and isinstance(inputs, tf.Tensor)
        and inputs.shape.rank is not None
        and inputs.shape[-1] is not None
        and inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
        and layer.axis in (-1, len(inputs.shape) - 1)
        and layer.epsilon >= _LEAST_EPSILON
        and not (layer.synchronized or getattr(layer, "renorm", False))
    )


def _fused(layer: keras.layers.BatchNormalization, inputs: tf.Tensor) -> tf.Tensor:
    """Normalize and update the moving statistics as `BatchNormalization.call` does."""
    x = tf.cast(inputs, tf.float32)  # as Keras does, against overflow
    channels = x.shape[-1]
    shape = tf.shape(x)
    # A row is an image: cuDNN refuses batches of some hundred thousand images.
    as_images = tf.stack([shape[0], tf.reduce_prod(shape[1:-1]), 1, channels])
    images = x if len(x.shape) == 4 else tf.reshape(x, as_images)
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images,
        scale=tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones([channels]),
        offset=tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros([channels]),
        mean=[],
        variance=[],
        epsilon=layer.epsilon,
        is_training=True,
    )
    # The operation divides the variance by n - 1, which may be 0; Keras 3 divides by n.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance = tf.where(count > 1, variance * (count - 1) / count, tf.zeros_like(variance))
    for moving, now in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = tf.cast(moving, tf.float32)
        moving.assign(before * layer.momentum + now * (1.0 - layer.momentum))
    if images is not x:
        outputs = tf.reshape(outputs, shape)
        outputs.set_shape(x.shape)
    return tf.cast(outputs, layer.compute_dtype)
