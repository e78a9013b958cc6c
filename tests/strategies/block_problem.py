"""The problem that tests of block updates solve, in scripts as well."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

BLOCKS, L1 = 5, 6.0


def problem(dtype="float64", columns=None):
    """Rows, targets and first weights; a sixth of the true weights is not zero.

    With `columns`, weights are a matrix and targets have so many columns.
    """
    random = np.random.default_rng(4)
    x = random.normal(size=(103, 24)) + 0.3 * random.normal(size=(103, 1))
    true = random.normal(size=(24, columns or 1)) * (random.random((24, 1)) < 1 / 6)
    y = x @ true + 0.1 * random.normal(size=(103, columns or 1))
    start = 0.1 * random.normal(size=(24, columns or 1))
    if columns is None:
        y, start = y[:, 0], start[:, 0]
    return x.astype(dtype), y.astype(dtype), start.astype(dtype)


def squares(weights, x, y):
    """Half the squared error of each row; weights are a vector or a matrix."""
    whole = tf.reshape(weights, (weights.shape[0], -1))
    error = tf.matmul(x, whole) - tf.reshape(y, (-1, whole.shape[1]))
    return tf.reduce_sum(error**2, 1) / 2
