"""Slices of a table: which ranks add up place by place, and sums of those of one line.

The indices of `AlignedSlices` are the same on all ranks, so a sum adds values place by place. dtk
finds by the graph that indices depend on no row of the batch. A script can still make them differ
by rank, for example from its rank's number; sums of other places would be wrong silently.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from dtk import placement
from dtk.errors import at_rank


class AlignedSlices(tf.IndexedSlices):
    """Slices with the same indices on all ranks: a sum adds the values of each index."""


def with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """Return slices of the same class and indices, with other values."""
    return type(slices)(values, slices.indices, slices.dense_shape)


def concatenated(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Put slices one after the other."""
    values, indices = [part.values for part in parts], [part.indices for part in parts]
    if len(parts) == 1:
        return tf.IndexedSlices(values[0], indices[0], parts[0].dense_shape)
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape)


def is_gathered(value: tf.Tensor | tf.IndexedSlices) -> bool:
    """Return whether ranks gather the slices of a value, since their number may differ by rank."""
    if not isinstance(value, tf.IndexedSlices):
        return False
    return not isinstance(value, AlignedSlices) or not value.values.shape.is_fully_defined()


def once(values: tf.Tensor, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Add up the values of each index, with the same bits in any order of adding.

    A GPU adds in the order in which its threads come, and ranks that add the same slices would get
    weights that differ. In float64 whole multiples of one unit add up exactly. The unit is 2^-50 of
    the most that the values of an index can add up to: float32 resolves 2^-24.

    Example:
        >>> values, indices = once(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 3, 7]))
        >>> values.numpy().tolist(), indices.numpy().tolist()
        ([[5.0], [2.0]], [7, 3])
    """
    # TensorFlow computes with int32 in the host's memory.
    lines, places = tf.unique(tf.cast(indices, tf.int64), tf.int64)
    count = tf.size(lines)
    add = functools.partial(tf.raw_ops.UnsortedSegmentSum, segment_ids=places, num_segments=count)
    wide = tf.cast(values, tf.float64)
    largest = tf.math.unsorted_segment_max(tf.abs(wide), places, count)
    sizes = add(data=tf.ones_like(places, tf.float64))
    most = largest * tf.reshape(sizes, [-1] + [1] * (values.shape.rank - 1))
    exponent = tf.bitwise.bitwise_and(tf.bitcast(most, tf.int64), 0x7FF << 52)
    unit = tf.gather(tf.bitcast(exponent, tf.float64) * 2.0**-50, places)
    whole = tf.round(tf.math.divide_no_nan(wide, unit)) * unit
    return tf.cast(add(data=whole), values.dtype), lines


def digits_of(slices: Sequence[tf.IndexedSlices]) -> tf.Tensor:
    """Hash indices to 16 digits of 0 to 15, followed by their squares, as floats that ranks sum.

    The sum of squares is the square of the sum over the number of ranks only if all are equal.
    Sums are exact up to 70,000 ranks.
    """
    with tf.device(placement.host()):
        indices = tf.concat([tf.cast(tf.reshape(one.indices, [-1]), tf.int64) for one in slices], 0)
        sizes = tf.stack([tf.size(one.indices, tf.int64) for one in slices])
        bytes_ = tf.bitcast(tf.concat([sizes, indices], 0), tf.uint8)
        fingerprint = tf.fingerprint(tf.reshape(bytes_, [1, -1]))[0]
        digits = tf.cast(tf.concat([fingerprint % 16, fingerprint // 16], 0), tf.float32)
        return tf.concat([digits, digits * digits], 0)


def assert_equal(values: Sequence[tf.Tensor], equal: tf.Tensor, rank: int) -> list[tf.Tensor]:
    """Return the same values; fail if ranks have looked up other places."""
    message = (
        "a table is looked up at other places on another rank, though its indices depend on no "
        "row of the batch. If sequences are of other lengths there: pad the whole batch to one "
        "length before it is cut, in the dataset. If a script computes indices from its rank: "
        "give them as a part of the batch"
    )
    with tf.control_dependencies([tf.debugging.Assert(equal, [at_rank(rank, message)])]):
        return [tf.identity(value) for value in values]
