"""Metrics that cannot be summed over replicas: one replica counts the rows of all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from dtk.compat import keras_steps, tf_replicas
from dtk.nests import Function
from dtk.trainer.replica import compiled_step
from dtk.trainer.tracing import traced_step


def on_all_rows(metrics: Sequence[keras.Metric]) -> AbstractContextManager[None]:
    """Return a context in which traced steps gather the rows of these metrics."""
    return keras_steps.patch_updates(metrics, _update)


def _update(
    metric: keras.Metric, original: Function[object], *args: object, **kwargs: object
) -> object:
    step = traced_step.current()
    # No communication in a branch or loop: perhaps not all replicas enter it.
    if step is None or tf.compat.v1.get_default_graph() is not step.graph:
        return original(*args, **kwargs)
    if step.present is None:
        raise compiled_step.UncompilableError(f"metric {metric.name!r} counts rows of all workers")
    # The first replica counts as one process would; the others' counts stay zero.
    leaves = tf.nest.flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if tf.is_tensor(leaf)]
    whole = iter(_of_all(tensors, step.present))
    leaves = [next(whole) if tf.is_tensor(leaf) else leaf for leaf in leaves]
    if tf_replicas.replica_index():
        return None
    args, kwargs = tf.nest.pack_sequence_as((args, kwargs), leaves)
    with traced_step.tracing(None):
        return original(*args, **kwargs)


def _of_all(tensors: Sequence[tf.Tensor], present: tf.Tensor) -> list[tf.Tensor]:
    """Gather rows in the order of replicas: each pads its rows with zeros, and a sum joins them."""
    index, context = tf_replicas.replica_index(), tf.distribute.get_replica_context()
    total = functools.partial(context.all_reduce, tf.distribute.ReduceOp.SUM)
    mine = tf.where(present, tf.shape(tensors[0])[0], 0)
    counts = total(mine * tf.one_hot(index, context.num_replicas_in_sync, dtype=tf.int32))
    before, after = tf.reduce_sum(counts[:index]), tf.reduce_sum(counts[index + 1 :])

    def placed(tensor: tf.Tensor) -> tf.Tensor:
        known = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor
        ends = [[before, after], *([0, 0] for _ in range(tensor.shape.rank - 1))]
        return tf.pad(known[:mine], ends)

    with tf_replicas.counted_if(None):
        whole = total([placed(tensor) for tensor in tensors])
    return [tf.cast(rows, tensor.dtype) for rows, tensor in zip(whole, tensors, strict=True)]
