"""Replicas that take local steps and synchronize their weights now and then."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.compat import keras_models, tf_replicas
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.tracing import traced_step


def weights_are_equal(model: keras.Model) -> tf.Tensor | None:
    """Return whether all replicas hold the same weights; None without local steps."""
    flags = [flag for e in shared_optimizer.gradient_exchanges_of(model) for flag in e.together()]
    return tf.reduce_all(flags) if flags else None


def averaging_weight(model: keras.Model) -> tf.Tensor:
    """Return this replica's weight in the mean that synchronizes replicas."""
    weights = [e.averaging_weight() for e in shared_optimizer.gradient_exchanges_of(model)]
    return next(weight for weight in weights if weight is not None)


def average_statistics(step: traced_step.Step, model: keras.Model) -> bool:
    """Average moving statistics in a step that synchronizes weights; False without local steps.

    Other steps send nothing: their logs are this replica's, and metric state is summed when the
    epoch's logs are made.
    """
    equal = weights_are_equal(model)
    if equal is None:
        return False
    averaged = moving_statistics(step)
    values = [tf.convert_to_tensor(v) for v in averaged]
    replica = tf.distribute.get_replica_context()
    if averaged:
        share = averaging_weight(model)
        parts = [tf.math.multiply_no_nan(v, tf.cast(share, v.dtype)) for v in values]
        with tf_replicas.counted_if(None):
            means = tf.cond(
                equal,
                lambda: replica.all_reduce(tf.distribute.ReduceOp.SUM, parts),
                lambda: values,
            )
        for variable, mean in zip(averaged, means, strict=True):
            variable.assign(mean)
    return True


def moving_statistics(step: traced_step.Step) -> list[keras.Variable]:
    """Return the non-trainable floats a step assigned, without synchronized layers' statistics."""
    model = step.model
    exact = {
        id(v)
        for layer in keras_models.layers_of(model)
        if getattr(layer, "synchronized", False)
        for v in layer.non_trainable_variables
    }
    return [
        v
        for v in model.non_trainable_variables
        if id(v) in step.assigned and id(v) not in exact and keras.backend.is_float_dtype(v.dtype)
    ]
