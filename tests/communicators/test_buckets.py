"""Packing into buckets and back loses nothing and wastes little."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dtk.communicators import buckets, dtype_casts

DTYPES = (tf.float32, tf.float16, tf.int64, tf.bool)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12)
limits = st.integers(1, 60) | st.integers(1, 400)
quick = settings(deadline=None, max_examples=60)


def make(specs):
    return [
        tf.cast(tf.reshape(tf.range(math.prod(shape)) + i, shape), dtype)
        for i, (dtype, shape) in enumerate(specs)
    ]


@quick
@given(specs, limits)
def test_what_is_packed_comes_back(specs, limit):
    tensors = make(specs)
    packed, layout = buckets.pack(tensors, limit)
    for original, copy in zip(tensors, buckets.unpack(packed, tensors, layout), strict=True):
        assert copy.dtype == original.dtype
        np.testing.assert_array_equal(copy, original)


@settings(deadline=None, max_examples=300)
@given(specs, limits)
def test_a_plan_is_sound(specs, limit):
    dtypes = [dtype for dtype, _ in specs]
    sizes = [math.prod(shape) for _, shape in specs]
    layout = buckets.plan(dtypes, sizes, limit)
    assert sorted(i for members in layout for i in members) == list(range(len(specs)))
    for members in layout:
        assert members == sorted(members)
        assert len({dtypes[i] for i in members}) == 1
        assert len(members) == 1 or sum(sizes[i] * dtypes[i].size for i in members) <= limit
    # Two buckets of one dtype next to each other would have fitted one only if one is full.
    for dtype in DTYPES:
        filled = [
            sum(sizes[i] * dtype.size for i in members)
            for members in layout
            if dtypes[members[0]] == dtype
            and not any(sizes[i] * dtype.size >= limit for i in members)
        ]
        assert all(a + b > limit for a, b in zip(filled, filled[1:], strict=False))


def test_unknown_sizes_and_large_tensors_get_a_bucket_of_their_own():
    assert buckets.plan([tf.float32] * 4, [3, None, 3, None], 1000) == [[0, 2], [1], [3]]
    assert buckets.plan([tf.float32] * 3, [10, 1000, 10], 100) == [[0, 2], [1]]
    with pytest.raises(ValueError, match="at least 1 byte, got a limit of 0"):
        buckets.plan([], [], 0)


def test_static_shapes_survive_a_graph():
    @tf.function(
        input_signature=[tf.TensorSpec([2, 3]), tf.TensorSpec([]), tf.TensorSpec([None, 4])]
    )
    def step(a, b, c):
        packed, layout = buckets.pack([a, b, c])
        assert len(packed) == 2
        copies = buckets.unpack(packed, [a, b, c], layout)
        assert [copy.shape.as_list() for copy in copies] == [[2, 3], [], [None, 4]]
        return copies

    given = tf.ones([2, 3]), tf.constant(5.0), tf.ones([3, 4])
    for copy, original in zip(step(*given), given, strict=True):
        np.testing.assert_array_equal(copy, original)


@quick
@given(
    st.lists(st.integers(0, 255), max_size=9),
    st.sampled_from([tf.uint8, tf.int8, tf.bool, tf.bfloat16, tf.uint16, tf.uint32, tf.uint64]),
)
def test_reinterpreted_values_keep_every_bit(values, dtype):
    native = frozenset({tf.float16, tf.int32, tf.int64})
    flat = tf.cast(tf.constant(values, tf.int32, shape=[len(values)]), dtype)
    encoded, decode = dtype_casts.for_moving(flat, native)
    assert encoded.dtype in native
    np.testing.assert_array_equal(decode(encoded)[: len(values)], flat)
    # Bytes stay bytes: at most a word of padding.
    assert tf.size(encoded) * encoded.dtype.size < len(values) * dtype.size + 4


def test_a_list_travels_in_a_few_buckets():
    tensors = [tf.zeros([2**15])] * 100  # of 128 KiB
    packed, _ = buckets.pack(tensors, buckets.limit_for(tensors))
    assert len(packed) == 4
    assert buckets.limit_for(tensors, most=2**20) == 2**20
    few = [tf.zeros([10])] * 4
    assert len(buckets.pack(few, buckets.limit_for(few))[0]) == 1
