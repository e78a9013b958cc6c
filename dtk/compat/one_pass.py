"""Operations of TensorFlow's that do in one pass over memory what Keras 3 does in many.

    SGD                    the same bits, so always
    Adam, AdamW            other last digits: where the user or `dtk tune` has chosen it
    BatchNormalization     the same

Optimizer                                           _get_variable_index
Adam                                                _momentums, _velocities
tensorflow.python.distribute.values                 DistributedVariable._get
tensorflow.python.ops.resource_variable_ops         BaseResourceVariable
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import TypeAlias

import keras
import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.ops import resource_variable_ops

from dtk.cluster.variables import FUSED_ADAM, FUSED_BATCH_NORM
from dtk.compat.replacing import replaced

_Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
# cuDNN refuses less, and TensorFlow would then normalize with another one than the layer's.
_LEAST_EPSILON = 1.001e-5


# Optimizers.


def update_in_one_pass(optimizer: keras.Optimizer) -> None:
    """Make an optimizer update a variable by one operation of TensorFlow's, where there is one.

    Keras's own takes an operation for each product and sum, and goes through the memory of the
    variable, the gradient and what the optimizer remembers for each: 10.5 M weights take SGD 13 ms
    in place of 6, with Nesterov's momentum 20 in place of 8. Those operations compute the same
    bits. Of TensorFlow's operation for Adam the last digits differ, so it is used where it was
    chosen, by DTK_FUSED_ADAM=1.

    Args:
        optimizer: Any; all but Keras's own SGD, Adam and AdamW are left as they are.
    """
    if "update_step" in vars(optimizer):
        return
    if type(optimizer) is keras.optimizers.SGD:
        update, slots = _update_sgd, ["momentums"] if optimizer.momentum != 0 else []
    elif has_fused_adam(optimizer) and os.environ.get(FUSED_ADAM) == "1":
        update, slots = _update_adam, ["_momentums", "_velocities"]
    else:
        return
    by_parts = optimizer.update_step

    def update_step(gradient: _Gradient, variable: tf.Variable, learning_rate: tf.Tensor) -> None:
        place = optimizer._get_variable_index(variable) if slots else 0
        # The copies beside the variable that is updated.
        used = [variable, *(_local(getattr(optimizer, name)[place].value) for name in slots)]
        plain = all(isinstance(one, resource_variable_ops.BaseResourceVariable) for one in used)
        if not plain or isinstance(gradient, tf.IndexedSlices) or not variable.dtype.is_floating:
            by_parts(gradient, variable, learning_rate)
            return
        rate, gradient = (tf.cast(one, variable.dtype) for one in (learning_rate, gradient))
        update(optimizer, [one.handle for one in used], gradient, rate)

    optimizer.update_step = update_step


def has_fused_adam(optimizer: keras.Optimizer) -> bool:
    """Return whether TensorFlow has one operation for an optimizer's update, but for last digits.

    Args:
        optimizer: Any.
    """
    return type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW) and not (
        optimizer.amsgrad
    )


def _local(variable: tf.Variable) -> tf.Variable:
    return variable._get() if isinstance(variable, values.DistributedVariable) else variable


def _update_sgd(
    optimizer: keras.optimizers.SGD, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor
) -> None:
    if len(handles) == 1:
        tf.raw_ops.ResourceApplyGradientDescent(var=handles[0], alpha=rate, delta=gradient)
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=handles[0],
        accum=handles[1],
        lr=rate,
        grad=gradient,
        momentum=tf.cast(optimizer.momentum, rate.dtype),
        use_nesterov=optimizer.nesterov,
    )


def _update_adam(
    optimizer: keras.optimizers.Adam, handles: list[tf.Tensor], gradient: tf.Tensor, rate: tf.Tensor
) -> None:
    step = tf.cast(optimizer.iterations + 1, rate.dtype)
    betas = optimizer.beta_1, optimizer.beta_2
    # Rounded to 32 bits on their way, as Keras's are.
    powers = [tf.pow(tf.cast(beta, rate.dtype), step) for beta in betas]
    first, second = (tf.constant(beta, rate.dtype) for beta in betas)
    tf.raw_ops.ResourceApplyAdam(
        var=handles[0],
        m=handles[1],
        v=handles[2],
        beta1_power=powers[0],
        beta2_power=powers[1],
        lr=rate,
        beta1=first,
        beta2=second,
        epsilon=tf.constant(optimizer.epsilon, rate.dtype),
        grad=gradient,
    )


# Normalization.


@contextlib.contextmanager
def norms_if_chosen() -> Iterator[None]:
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
