"""Gradients as dense tensors, for optimizers that change every row in a step."""

from __future__ import annotations

import keras
import tensorflow as tf


def dense(gradient: tf.Tensor | tf.IndexedSlices, variable: keras.Variable) -> tf.Tensor:
    """Return a gradient in the shape and dtype of its variable; repeated rows are summed first.

    Norms, decay and decaying moments involve every row of a table, also rows that a batch does not
    read, so a sparse gradient saves nothing here. Besides, the sum of squared slices is not the
    square of their sum.

    Example:
        >>> import tensorflow as tf
        >>> slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([0, 2, 0]))
        >>> dense(slices, tf.Variable(tf.zeros((3, 1)))).numpy().tolist()
        [[5.0], [0.0], [2.0]]
    """
    if isinstance(gradient, tf.IndexedSlices):
        rows = variable.shape[0]
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)
    return keras.ops.cast(gradient, variable.dtype)
