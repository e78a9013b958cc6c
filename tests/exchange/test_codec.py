"""Quantisation is CNTK's, to the bit; what is packed comes out again."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dtk.exchange import codec

# Processors may take subnormal numbers for zero.
FLOATS = st.floats(-1e3, 1e3, width=32, allow_subnormal=False)
MATRICES = arrays.arrays("float32", arrays.array_shapes(min_dims=2, max_dims=2), elements=FLOATS)


def written_out(matrix, bits):
    """The equations, entry by entry."""
    made = np.zeros_like(matrix)
    for column, values in enumerate(matrix):
        if bits == 1:
            means = [
                values[part].mean(dtype="float64") if part.any() else 0.0
                for part in (values < 0, values >= 0)
            ]
            made[column] = np.where(values < 0, *means)
            continue
        high = np.float32(4.0) * np.sqrt(np.mean(values * values, dtype="float32"))
        top = 2**bits - 1
        for row, value in enumerate(values):
            if value <= -high:
                index = 0
            elif value >= high:
                index = top
            else:
                index = int(np.floor((value + high) * np.float32(top) / (2 * high)))
            made[column, row] = (index + 0.5) * 2 * high / top - high
    return made


def test_the_vector_of_the_original():
    """From CNTK: v = [1, 2, -3, -1, 0], what it becomes, and what is left over."""
    matrix = tf.constant([[1.0, 2.0, -3.0, -1.0, 0.0]])
    made = codec.decode(codec.encode(matrix, 1), 5, 1)
    assert made.numpy().tolist() == [[1.0, 1.0, -2.0, -2.0, 1.0]]
    assert (matrix - made).numpy().tolist() == [[0.0, 1.0, -1.0, 1.0, -1.0]]


@settings(max_examples=60, deadline=None)
@given(matrix=MATRICES, bits=st.sampled_from(codec.BITS))
def test_it_is_what_the_equations_say(matrix, bits):
    made = codec.decode(codec.encode(tf.constant(matrix), bits), matrix.shape[1], bits).numpy()
    expected = written_out(matrix, bits)
    # An entry on the edge between two steps may fall on either side of it, by rounding.
    size = np.abs(matrix).max(1, keepdims=True)
    step = 8 * size / (2**bits - 1) if bits > 1 else 0 * size
    assert (np.abs(made - expected) <= step * 1.01 + 1e-4 * size + 1e-12).all()
    assert (np.abs(made - expected) > 1e-4 * size + 1e-12).mean() <= (0.0 if bits == 1 else 0.35)


@pytest.mark.parametrize("bits", [4, 6, 12])
def test_an_entry_out_of_range_takes_the_outermost_level(bits):
    """Levels reach four root mean squares, and one entry of 40 may be at more than six."""
    matrix = np.zeros((2, 40), np.float32)
    matrix[:, 7] = 1.0, -1.0
    made = codec.decode(codec.encode(tf.constant(matrix), bits), 40, bits).numpy()
    np.testing.assert_allclose(made[:, 7], written_out(matrix, bits)[:, 7], rtol=1e-5)
    assert (abs(made[:, 7]) < 0.75).all()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(codec.BITS),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 19)),
    seed=st.integers(0, 2**16),
)
def test_packing_loses_nothing(bits, shape, seed):
    """Whatever the number of entries: the last byte is padded."""
    indices = np.random.default_rng(seed).integers(0, 2**bits, shape)
    packed = codec.pack(tf.constant(indices, codec.dtype_of(bits)), bits)
    assert packed.dtype == tf.uint8
    assert packed.shape == (shape[0], -(-shape[1] * bits // 8)), "not packed"
    assert (codec.unpack(packed, shape[1], bits).numpy() == indices).all()


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_lie_side_by_side_lowest_first(bits):
    """A row is one stream of bits, which numpy packs in another way."""
    numbers = np.random.default_rng(bits).integers(0, 2**bits, (3, 21))
    stream = numbers[..., None] >> np.arange(bits) & 1
    expected = np.packbits(stream.reshape(3, -1).astype("uint8"), axis=1, bitorder="little")
    assert (codec.pack(tf.constant(numbers, tf.uint8), bits).numpy() == expected).all()


def test_packing_takes_no_longer_than_the_step_it_serves():
    """Ten million entries take some ten milliseconds on one core, and a table of bits seconds."""
    numbers = tf.zeros((100, 10_000), tf.uint8)
    both = tf.function(lambda n: codec.unpack(codec.pack(n, 3), 10_000, 3))
    both(numbers)
    began = time.process_time()
    for _ in range(5):
        both(numbers)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("bits", [1, 5, 12])  # coded by signs, by bytes, by two bytes
def test_error_feedback_makes_up_for_what_was_lost(bits):
    """The sum of what was sent follows the sum of what was to be sent, at any number of bits."""
    random = np.random.default_rng(bits)
    truth, sent, residual = np.zeros((3, 40)), np.zeros((3, 40)), tf.zeros((3, 40))
    coded = tf.function(lambda wanted: codec.decode(codec.encode(wanted, bits), 40, bits))
    for _ in range(200):
        gradient = tf.constant(random.normal(0.1, 1.0, (3, 40)), tf.float32)
        wanted = gradient + residual
        made = coded(wanted)
        residual = wanted - made
        truth, sent = truth + gradient.numpy(), sent + made.numpy()
    np.testing.assert_allclose(sent + residual.numpy(), truth, atol=1e-3)
    assert np.abs(residual.numpy()).max() < 12.0, "what is left over grows without bound"


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (3, 3, 2, 4)])
def test_columns_are_those_of_the_last_axis(shape):
    gradient = tf.reshape(tf.range(int(np.prod(shape)), dtype=tf.float32), shape)
    matrix = codec.to_columns(gradient)
    assert matrix.shape == codec.matrix_shape(shape)
    if len(shape) > 1:
        assert (matrix[1].numpy() == gradient.numpy()[..., 1].ravel()).all()
    back = codec.from_columns(matrix, shape, tf.float16)
    assert back.dtype == tf.float16 and (back.numpy() == gradient.numpy().astype("float16")).all()


def test_zeros_and_empty_columns():
    for bits in codec.BITS:
        for shape in ((2, 3), (1, 0), (0, 3)):
            made = codec.decode(codec.encode(tf.zeros(shape), bits), shape[1], bits)
            assert made.shape == shape
            assert (made.numpy() == 0).all(), bits
