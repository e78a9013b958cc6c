"""Sums of a table's rows are the same bits in any order, as GPUs add in any order."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.aligned_slices import once


def summed(values, indices):
    """Return a row for each of eight lines."""
    found, lines = once(tf.constant(values), tf.constant(indices))
    return tf.scatter_nd(lines[:, None], found, [8, *values.shape[1:]]).numpy()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_order_of_adding_changes_no_bit(dtype):
    """Plain sums differ in their last bits for most orders, and large numbers hide small ones."""
    random = np.random.default_rng(0)
    size = 10.0 ** random.uniform(-3, 3, (500, 1))
    values = (random.normal(size=(500, 3)) * size).astype(dtype)
    indices = random.integers(0, 8, 500).astype("int32")
    expected = np.zeros((8, 3))
    np.add.at(expected, indices, values.astype("float64"))
    first = summed(values, indices)
    np.testing.assert_array_equal(first, expected.astype(dtype))
    plain, orders = set(), [random.permutation(500) for _ in range(10)]
    for order in orders:
        np.testing.assert_array_equal(summed(values[order], indices[order]), first)
        added = np.zeros((8, 3), dtype)
        np.add.at(added, indices[order], values[order])
        plain.add(added.tobytes())
    assert len(plain) > 1


def test_what_is_not_finite_stays_in_its_line():
    values = np.array([[1.0], [np.nan], [2.0], [np.inf], [0.0], [4.0]], "float32")
    found = summed(values, [0, 1, 0, 2, 3, 2])
    assert found[[0, 3]].tolist() == [[3.0], [0.0]]
    assert not np.isfinite(found[1:3]).any()
