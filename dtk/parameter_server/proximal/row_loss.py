"""A loss given row by row, traced for workers that have all weights and some rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.nests import Array, Function
from dtk.parameter_server.proximal.blocks import Blocks


class RowLoss:
    """Loss summed over rows: functions of all weights and some rows that run on workers."""

    def __init__(self, loss: Function[tf.Tensor], blocks: Blocks, data: Sequence[Array]):
        self._loss, self._dtype = loss, blocks.dtype
        weights = [tf.TensorSpec(v.shape, v.dtype) for v in blocks.variables]
        rows = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data]
        bound, handle = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)
        # Traced here, so that a mistake in the loss raises on the main thread.
        value = tf.function(self._values, autograph=False)
        self.value = value.get_concrete_function(weights, rows)
        push = tf.function(self._gradient, autograph=False)
        self.push = push.get_concrete_function(weights, rows, bound, bound, handle)

    def _values(self, weights: list[tf.Tensor], rows: list[tf.Tensor]) -> tf.Tensor:
        """Return the sum of the loss over some rows, the number of losses, and |w|_1; traced."""
        whole = tf.concat(weights, 0)
        values = self._loss_of(whole, rows)
        numbers = [tf.reduce_sum(values), tf.size(values), tf.reduce_sum(tf.abs(whole))]
        return tf.stack([tf.cast(number, tf.float64) for number in numbers])

    def _gradient(
        self,
        weights: list[tf.Tensor],
        rows: list[tf.Tensor],
        begin: tf.Tensor,
        end: tf.Tensor,
        buffer: tf.Tensor,
    ) -> tf.Tensor:
        """Put the gradient of one block into a gradient buffer; return the bytes sent; traced."""
        whole = tf.concat(weights, 0)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(whole)
            total = tf.reduce_sum(self._loss_of(whole, rows))
        gradient = tape.gradient(total, whole)
        if gradient is None:
            raise ValueError(
                "loss(weights, *rows) has no gradient with respect to the weights; compute it from "
                "them with TensorFlow's functions"
            )
        content = tf.convert_to_tensor(gradient)[begin:end]
        tf.raw_ops.AssignVariableOp(resource=buffer, value=content)
        return tf.size(content, tf.int64) * self._dtype.size

    def _loss_of(self, weights: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        values = tf.convert_to_tensor(self._loss(weights, *rows))
        if values.shape.rank != 1:
            raise ValueError(
                f"loss(weights, *rows) returned shape {values.shape}; expected one number per row, "
                "of shape (rows,), for they are summed over all workers"
            )
        return values
