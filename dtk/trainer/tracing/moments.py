"""Mean and variance over the rows of all replicas, by one message in each direction.

For a synchronized normalization Keras sums three tensors over the replicas: the inputs, their
squares and their number; in the backward pass TensorFlow sums three gradients. Each sum is a
message that the next computation waits for. Here the three are one vector:

    forward     [sum x | sum x^2 | count]   all-reduce   mean, variance
    backward    [  dx  |   dx^2  |  -   ]   all-reduce

In a script's own train_step, each replica differentiates a mean over its own rows; its gradients
are weighed by its share of the rows after the tape, when the optimizer gets them. The gradients
that other replicas send back through the moments must be weighed by their shares, not by this one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from dtk.compat import keras_models
from dtk.nests import Function
from dtk.trainer.strategy import Strategy
from dtk.trainer.tracing import traced_step


def of_all_replicas(
    x: tf.Tensor,
    axes: int | Sequence[int],
    keepdims: bool,
    original: Function[tuple[tf.Tensor, tf.Tensor]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute mean and variance over these axes and all replicas, as Keras does."""
    axes = [axes] if isinstance(axes, int) else axes
    replica = tf.distribute.get_replica_context()
    if traced_step.current() is None or replica is None:
        return original(x, axes, keepdims)
    sums = tf.reduce_sum(x, axes, keepdims=True)
    squares = tf.reduce_sum(tf.square(x), axes, keepdims=True)
    shape = sums.shape
    if not shape.is_fully_defined():
        return original(x, axes, keepdims)
    length = math.prod(shape)
    count = tf.cast(tf.size(x, tf.int64) // length, x.dtype)
    joined = tf.concat([tf.reshape(sums, [-1]), tf.reshape(squares, [-1]), count[None]], 0)
    joined = _sum_over_replicas(joined)
    sums, squares, counts = tf.split(joined, [length, length, 1])
    mean = tf.math.divide_no_nan(sums, counts)
    variance = tf.maximum(tf.math.divide_no_nan(squares, counts) - tf.square(mean), 0.0)
    gone = set() if keepdims else {axis % x.shape.rank for axis in axes}
    left = [n for axis, n in enumerate(shape) if axis not in gone]
    return tf.reshape(mean, left), tf.reshape(variance, left)


def tell_of_others(step: traced_step.Step, strategy: Strategy) -> None:
    """Print once which layers normalize over the rows of each replica alone."""
    layers = [
        layer.name
        for layer in keras_models.layers_of(step.model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not layer.synchronized
        and id(layer.moving_mean) in step.assigned  # not if frozen or in inference mode
    ]
    replicas = strategy.num_replicas_in_sync
    tells = strategy.is_chief and strategy.local_index() == 0
    if replicas > 1 and layers and tells and keras_models.is_first_time(step.model, "norms"):
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        print(
            f"dtk: model {step.model.name!r}: batch normalization in {', '.join(layers[:3])}{more} "
            f"is over the rows of each of {replicas} replicas alone, so weights differ from those "
            "of one process with the whole batch. BatchNormalization(synchronized=True), or model "
            "= dtk.layers.convert_sync_batchnorm(model) before fit, is over all rows",
            file=sys.stderr,
            flush=True,
        )


@tf.custom_gradient
def _sum_over_replicas(
    value: tf.Tensor,
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """Sum a tensor over the replicas; weigh its gradient as the tape's target will be weighed."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        step = traced_step.current()
        if step is None or not step.weighed_later:
            return _sum_over_replicas(upstream)
        share = tf.cast(step.share, upstream.dtype)
        return tf.math.divide_no_nan(_sum_over_replicas(step.weighed(upstream)), share)

    replica = tf.distribute.get_replica_context()
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, value), gradient
