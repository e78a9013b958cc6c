"""Slices of a global batch rebuild it, whatever its number of rows and of ranks."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.even_division import even_bounds
from dtk.input import slicing

quick = settings(deadline=None, max_examples=25)
rows = st.integers(1, 20)
sizes = st.integers(1, 7)


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 200), sizes)
def test_bounds_cover_all_rows_once_and_the_first_ranks_take_one_more(count, size):
    bounds = [even_bounds(count, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(end == begin for (_, end), (begin, _) in zip(bounds, bounds[1:], strict=False))
    lengths = [end - begin for begin, end in bounds]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


@quick
@given(rows, sizes)
def test_bounds_of_tensors_are_those_of_numbers(count, size):
    for rank in range(size):
        begin, end = even_bounds(tf.constant(count, tf.int64), rank, size)
        assert (int(begin), int(end)) == even_bounds(count, rank, size)


@quick
@given(rows, sizes)
def test_slices_rebuild_the_batch(count, size):
    """Breaks as a row that no rank trains on, or two do."""
    dense = np.arange(count * 2).reshape(count, 2)
    batch = {"x": tf.constant(dense), "y": tf.ragged.range(tf.range(count)), "no": None}
    parts = slicing.without_padding(slicing.cut_batch(batch, range(size), size))
    assert all(part["no"] is None for part in parts)
    np.testing.assert_array_equal(tf.concat([part["x"] for part in parts], 0), dense)
    assert tf.concat([part["y"] for part in parts], 0).to_list() == batch["y"].to_list()


def test_a_generators_array_is_not_written_to():
    """Breaks as a step that computes its results over the script's own rows."""
    memory = np.zeros(8 * 16 * 4 + 64, np.uint8)
    begin = -memory.ctypes.data % 64  # TensorFlow takes an aligned array as it is
    rows = memory[begin : begin + 8 * 16 * 4].view(np.float32).reshape(8, 16)
    rows[:] = 1
    batches = tf.data.Dataset.from_generator(
        lambda: iter([rows, rows]), output_signature=tf.TensorSpec([None, 16])
    )
    cut = slicing.cut_dataset(batches, range(2), 2)
    doubled = cut.map(lambda slices: tuple(2 * part for part in slices.parts))
    for part in tf.nest.flatten(list(doubled.as_numpy_iterator())):
        np.testing.assert_array_equal(part, np.full((4, 16), 2))
    np.testing.assert_array_equal(rows, np.ones((8, 16)))


def exactly(batch, ranks, size):
    return slicing.without_padding(slicing.cut_batch(batch, ranks, size))


@functools.cache
def traced(cut, size):
    """`cut` into `size` parts, as one graph for whatever number of rows."""
    any_rows = tf.TensorSpec([None], tf.int32)
    return tf.function(
        lambda batch: cut(batch, range(size), size),
        input_signature=[{"more": any_rows, "x": any_rows}],
    )


@quick
@given(rows, sizes, st.integers(1, 4), st.sampled_from([exactly, slicing.cut_batch]))
def test_parts_of_other_sizes_are_dealt_in_step(count, size, each, cut):
    """Breaks as a rank that has all labelled rows, and another that has none."""
    more = tf.reshape(tf.range(count * each), (count, each))
    batch = {"more": tf.reshape(more, [-1]), "x": tf.range(count)}
    parts = traced(cut, size)(batch)
    for part in getattr(parts, "parts", parts):
        expected = tf.reshape(tf.gather(more, part["x"]), [-1])
        np.testing.assert_array_equal(part["more"], expected)


def test_parts_that_cannot_be_dealt_in_step_are_told():
    batches = tf.data.Dataset.zip(
        (tf.data.Dataset.range(24).batch(24), tf.data.Dataset.range(7).batch(7))
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="no multiples") as told:
        list(slicing.cut_dataset(batches, (0,), 2))
    assert "24" in str(told.value) and "7" in str(told.value)


@quick
@given(rows, sizes)
def test_every_slice_has_a_row_and_counts_those_of_its_own(count, size):
    """Breaks as 0 / 0 in the loss of a rank that has no rows."""
    slices = slicing.cut_batch(tf.range(count), range(size), size)
    assert int(slices.rows) == count
    assert sum(map(int, slices.counts)) == count
    for part, own in zip(slices.parts, slices.counts, strict=True):
        assert len(part) == max(int(own), 1)


def test_sparse_slices_know_the_sizes_that_layers_are_built_from():
    whole = tf.sparse.from_dense(np.eye(5, 7, dtype="float32"))
    rebuilt = []

    @tf.function
    def cut():
        for part in slicing.without_padding(slicing.cut_batch(whole, range(2), 2)):
            forgotten = slicing.forget_rows(part)
            assert forgotten.shape.as_list() == [None, 7]
            rebuilt.append(tf.sparse.to_dense(forgotten))
        return tf.concat(rebuilt, 0)

    np.testing.assert_array_equal(cut(), np.eye(5, 7))


def test_inputs_that_are_left_out_have_no_rows():
    """Keras's `Input(optional=True)` takes None, of which a dataset has a spec without a shape."""
    batches = tf.data.Dataset.from_tensors((tf.ones([3, 2]), None))
    assert len(slicing.check_rows(batches.element_spec)) == 1
    (batch,) = slicing.cut_dataset(batches, (1,), 2)
    rows, left_out = batch.parts[0]
    assert len(rows) == 1 and left_out is None


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="call .batch"):
        slicing.count_rows({"x": tf.constant(1.0)})
    with pytest.raises(ValueError, match="without tensors"):
        slicing.count_rows(None)


def test_what_has_no_rows_is_padded_by_one():
    empty = slicing.padding_row(tf.zeros([0, 3]))
    assert empty.shape == (1, 3) and not empty.numpy().any()
    assert slicing.padding_row(tf.ones([2, 3])).shape == (2, 3)
