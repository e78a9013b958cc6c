"""Quantise gradients to n bits per entry, pack them to send, and decode them.

A gradient is quantised column by column, because the entries of a column have similar sizes. In a
kernel, a column belongs to one output unit or channel, along the last axis (in a transposed
convolution, to an input channel); a vector is one column.

    kernel (3, 3, 16, 32)  ->  32 columns of 144 entries  ->  1 bit: (32, 18) bytes, (32, 2) floats

With 1 bit, an entry becomes the mean of its column's negative entries or of the others. With more,
the range of four root mean squares on both sides of zero is cut into equal steps. The caller keeps
the rounding error and adds it to the next gradient: with this error feedback nothing is ever lost,
only late.

Sources: Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
Distributed Training of Speech DNNs"; CNTK's `MatrixQuantizer` for more bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

BITS = tuple(range(1, 17))
# Range on each side of zero, in root mean squares of a column.
_RANGE = 4.0


class Code(NamedTuple):
    """A quantised matrix, as it is sent."""

    packed: tf.Tensor  # uint8, shape (columns, bytes of a column)
    scales: tf.Tensor  # float32, shape (columns, 2): the values of 0 and 1, or the range


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of columns, and of entries in each, for a weight of this shape.

    Example:
        >>> matrix_shape((3, 3, 16, 32)), matrix_shape((3, 3, 16, 1)), matrix_shape((10,))
        ((32, 144), (16, 9), (1, 10))
    """
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]  # a depthwise kernel: its channels are on the axis before
    columns = shape[-1] if len(shape) > 1 else 1
    return columns, math.prod(shape) // max(columns, 1)


def to_columns(gradient: tf.Tensor) -> tf.Tensor:
    """Turn a gradient into a float32 matrix of shape (columns, entries)."""
    columns, entries = matrix_shape(gradient.shape)
    return tf.transpose(tf.reshape(tf.cast(gradient, tf.float32), (entries, columns)))


def from_columns(matrix: tf.Tensor, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """Turn a matrix back into a gradient: the inverse of `to_columns`."""
    return tf.cast(tf.reshape(tf.transpose(matrix), shape), dtype)


def encode(matrix: tf.Tensor, bits: int) -> Code:
    """Quantise a matrix.

    Example:
        >>> code = encode(tf.constant([[1.0, 2.0, -3.0, -1.0, 0.0]]), 1)
        >>> code.packed.numpy().tolist(), code.scales.numpy().tolist()
        ([[19]], [[-2.0, 1.0]])
    """
    scales, indices = _signs(matrix) if bits == 1 else _levels(matrix, bits)
    return Code(pack(indices, bits), scales)


def decode(code: Code, entries: int, bits: int) -> tf.Tensor:
    """Decode a code, bit for bit the same on every receiver.

    Example:
        >>> code = encode(tf.constant([[1.0, 2.0, -3.0, -1.0, 0.0]]), 1)
        >>> decode(code, 5, 1).numpy().tolist()
        [[1.0, 1.0, -2.0, -2.0, 1.0]]
    """
    indices = unpack(code.packed, entries, bits)
    low, high = code.scales[:, :1], code.scales[:, 1:]
    if bits == 1:
        return tf.where(indices > 0, high, low)
    return (indices + 0.5) * ((high - low) / _top(bits)) + low


def bytes_of(columns: int, entries: int, bits: int) -> int:
    """Return the bytes of a code: entries padded to whole bytes, and two floats per column.

    Example:
        >>> bytes_of(32, 144, 1), 4 * 32 * 144
        (832, 18432)
    """
    return columns * (row_bytes(entries, bits) + 8)


def to_bytes(codes: Sequence[Code]) -> tf.Tensor:
    """Join codes into one flat uint8 tensor, with `bytes_of` bytes for each."""
    parts = [part for c in codes for part in (c.packed, tf.bitcast(c.scales, tf.uint8))]
    flat = [tf.reshape(part, [-1]) for part in parts]
    return tf.concat([*flat, tf.zeros([0], tf.uint8)], 0)


def from_bytes(
    rows: tf.Tensor, columns: Sequence[int], entries: Sequence[int], bits: int
) -> list[Code]:
    """Cut the bytes of several senders into codes: the inverse of `to_bytes`."""
    widths = [row_bytes(n, bits) for n in entries]
    sizes = [size for c, w in zip(columns, widths, strict=True) for size in (c * w, c * 8)]
    parts = iter(tf.split(rows, sizes, axis=1) if sizes else [])
    codes = []
    for count, width in zip(columns, widths, strict=True):
        packed = tf.reshape(next(parts), (rows.shape[0] * count, width))
        scales = tf.reshape(next(parts), (rows.shape[0] * count, 2, 4))
        codes.append(Code(packed, tf.bitcast(scales, tf.float32)))
    return codes


def _top(bits: int) -> float:
    """Return the highest index."""
    return float(2**bits - 1)


def _signs(matrix: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    positive = matrix >= 0
    ones = tf.reduce_sum(tf.cast(positive, tf.float32), 1, keepdims=True)
    zeros = tf.cast(tf.shape(matrix)[1], tf.float32) - ones
    above = tf.reduce_sum(tf.nn.relu(matrix), 1, keepdims=True)
    below = tf.reduce_sum(tf.minimum(matrix, 0.0), 1, keepdims=True)
    scales = tf.concat([tf.math.divide_no_nan(below, zeros), tf.math.divide_no_nan(above, ones)], 1)
    return scales, tf.cast(positive, tf.uint8)


def _levels(matrix: tf.Tensor, bits: int) -> tuple[tf.Tensor, tf.Tensor]:
    high = _RANGE * tf.sqrt(tf.reduce_mean(matrix * matrix, 1, keepdims=True))
    top = _top(bits)
    steps = tf.math.divide_no_nan((matrix + high) * top, 2.0 * high)
    indices = tf.clip_by_value(tf.floor(steps), 0.0, top)
    return tf.concat([-high, high], 1), tf.cast(indices, dtype_of(bits))


# Integers of 1 to 16 bits are packed into bytes without gaps. The numbers of a row form one stream
# of bits, padded to whole bytes. Eight numbers a, b, ... of 3 bits fill three bytes (each byte's
# lowest bit is on the left):
#
#     aaabbbcc cdddeeef ffggghhh
#
# Eight numbers of up to 8 bits, one byte each, form a 64-bit word, in which neighbours move
# together in three rounds; the first four of the numbers:
#
#     aaa..... bbb..... ccc..... ddd.....
#     aaabbb.. ........ cccddd.. ........
#     aaabbbcc cddd.... ........ ........
#
# For longer numbers, the low bytes come first, then a separate stream of the bits above.

# Moves the lowest bits of a word's 8 bytes into its highest byte, the first byte's bit lowest.
_GATHER_BITS = 0x0102040810204080


def row_bytes(entries: int, bits: int) -> int:
    """Return the bytes of a row of packed numbers.

    Example:
        >>> row_bytes(8, 3), row_bytes(9, 3), row_bytes(9, 12)
        (3, 4, 14)
    """
    return -(-entries * bits // 8)


def dtype_of(bits: int) -> tf.DType:
    """Return the dtype for numbers with this many bits."""
    return tf.uint16 if bits > 8 else tf.uint8


def pack(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Pack numbers.

    Example:
        >>> pack(tf.constant([[1, 2, 7]], tf.uint8), 3).numpy().tolist()
        [[209, 1]]
    """
    rows, entries = numbers.shape
    if bits > 8:
        low = tf.cast(tf.bitwise.bitwise_and(numbers, tf.constant(255, tf.uint16)), tf.uint8)
        high = tf.bitwise.right_shift(numbers, tf.constant(8, tf.uint16))
        return tf.concat([low, pack(tf.cast(high, tf.uint8), bits - 8)], 1)
    if bits == 8:
        return numbers
    groups = -(-entries // 8)
    padded = tf.pad(numbers, [[0, 0], [0, -entries % 8]])
    words = tf.bitcast(tf.reshape(padded, (rows, groups, 8)), tf.uint64)
    if bits == 1:  # One multiplication is five times as fast.
        gathered = tf.bitwise.right_shift(words * _word(_GATHER_BITS), _word(56))
        return tf.cast(gathered, tf.uint8)
    for distance, lower, upper in _rounds(bits):
        moved = tf.bitwise.right_shift(words, _word(distance))
        words = tf.bitwise.bitwise_or(_masked(words, lower), _masked(moved, upper))
    packed = tf.bitcast(words, tf.uint8)[:, :, :bits]
    return tf.reshape(packed, (rows, groups * bits))[:, : row_bytes(entries, bits)]


def unpack(packed: tf.Tensor, entries: int, bits: int) -> tf.Tensor:
    """Unpack any number of rows: the inverse of `pack`.

    Example:
        >>> unpack(tf.constant([[209, 1]], tf.uint8), 3, 3).numpy().tolist()
        [[1.0, 2.0, 7.0]]
    """
    rows = tf.shape(packed)[0]
    if bits > 8:
        low, high = packed[:, :entries], packed[:, entries:]
        return tf.cast(low, tf.float32) + 256.0 * unpack(high, entries, bits - 8)
    if bits == 8:
        return tf.cast(packed, tf.float32)
    groups = -(-entries // 8)
    if bits == 1:
        table = tf.constant(np.arange(256)[:, None] >> np.arange(8) & 1, tf.float32)
        looked_up = tf.gather(table, tf.cast(packed, tf.int32))
        return tf.reshape(looked_up, (rows, groups * 8))[:, :entries]
    padded = tf.pad(packed, [[0, 0], [0, groups * bits - row_bytes(entries, bits)]])
    apart = tf.reshape(padded, (rows, groups, bits))
    words = tf.bitcast(tf.pad(apart, [[0, 0], [0, 0], [0, 8 - bits]]), tf.uint64)
    for distance, lower, upper in reversed(list(_rounds(bits))):
        moved = tf.bitwise.left_shift(_masked(words, upper), _word(distance))
        words = tf.bitwise.bitwise_or(_masked(words, lower), moved)
    numbers = tf.reshape(tf.bitcast(words, tf.uint8), (rows, groups * 8))
    return tf.cast(numbers[:, :entries], tf.float32)


def _rounds(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield how far the upper of two neighbours moves down, and the masks of both afterwards."""
    for doubled in range(3):
        place, field = 8 << doubled, bits << doubled
        lower = sum((1 << field) - 1 << start for start in range(0, 64, 2 * place))
        yield place - field, lower, lower << field


def _word(value: int) -> tf.Tensor:
    return tf.constant(np.uint64(value))


def _masked(words: tf.Tensor, mask: int) -> tf.Tensor:
    return tf.bitwise.bitwise_and(words, _word(mask))
