"""The digest of a batch tells it from every other, by all its bytes or by a sample of them."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.input import digests

quick = settings(deadline=None, max_examples=20)


def of(batch, whole=True):
    return int(digests.digest(batch, whole))


@quick
@given(st.integers(1, 40), st.data())
def test_any_entry_counts(count, data):
    """Breaks as ranks that train on other rows, where only the first or last are compared."""
    x = np.arange(count, dtype="float32")
    other = x.copy()
    other[data.draw(st.integers(0, count - 1))] += 1
    assert of((tf.constant(x), None)) == of((tf.constant(x.copy()), None))
    assert of((tf.constant(x), None)) != of((tf.constant(other), None))


def test_order_shape_and_which_tensor_count():
    x = tf.range(6)
    assert of(x) != of(x[::-1])
    assert of(tf.reshape(x, (2, 3))) != of(tf.reshape(x, (3, 2)))
    assert of((x, 2 * x)) != of((2 * x, x))


def test_strings_ragged_rows_and_flags():
    assert of(tf.constant(["a", "b"])) != of(tf.constant(["a", "c"]))
    assert of(tf.constant([True, False])) != of(tf.constant([False, True]))
    one, other = tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[1, 2], [3]])
    assert of(one) != of(other)


def test_a_sample_is_spread_over_the_whole_of_a_large_tensor():
    """Breaks as batches that are compared by what they begin with alone."""
    x = np.zeros(1 << 16, "float32")
    last = x.copy()
    last[-64:] = 1
    assert of(tf.constant(x), whole=False) != of(tf.constant(last), whole=False)


def test_the_digest_of_an_array_is_of_all_its_bytes():
    x = np.zeros((100, 30))
    other = x.copy()
    other[50, 15] = 1
    assert digests.hash_of(x) == digests.hash_of(x.copy())
    assert digests.hash_of(x) != digests.hash_of(other)
