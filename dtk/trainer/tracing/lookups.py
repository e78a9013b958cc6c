"""Look up rows of a table without copying the table.

`keras.ops.take`, and with it `keras.layers.Embedding`, reads the whole variable and gathers rows
from the value. Once the variable has had a sparse update, TensorFlow copies it at each read, so
every step copies the table. Gathering from the variable itself gives the same rows and the same
sparse gradient:

    Keras   variable -- read: copies 51 MB --> table -- gather --> 8 rows
    here    variable -- gather --> 8 rows
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import keras
import tensorflow as tf

from dtk.compat import keras_steps, keras_variables
from dtk.nests import Function


def in_place() -> AbstractContextManager[None]:
    """Return a context in which `keras.ops.take` gathers rows from the variable itself."""
    return keras_steps.patch_take(_take)


def _take(
    x: tf.Tensor | keras.Variable,
    indices: tf.Tensor,
    axis: int | None,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    plain = isinstance(indices, tf.Tensor) and indices.dtype in (tf.int32, tf.int64)
    if axis != 0 or not plain or not isinstance(x, keras.Variable):
        return original(x, indices, axis)
    variable = keras_variables.stored(x)
    # A stateless scope or autocasting gives the variable another value.
    if variable is None or x.value is not variable:
        return original(x, indices, axis)
    rows = tf.constant(variable.shape[0], indices.dtype)
    return tf.gather(
        keras_variables.local_value(variable), tf.where(indices < 0, indices + rows, indices)
    )
