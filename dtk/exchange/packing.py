"""Pack integers of 1 to 16 bits into bytes without gaps, and unpack them.

The numbers of a row form one stream of bits, padded to whole bytes. Eight numbers a, b, ... of 3
bits fill three bytes (each byte's lowest bit is on the left):

    aaabbbcc cdddeeef ffggghhh

Eight numbers of up to 8 bits, one byte each, form a 64-bit word, in which neighbours move together
in three rounds; the first four of the numbers:

    aaa..... bbb..... ccc..... ddd.....
    aaabbb.. ........ cccddd.. ........
    aaabbbcc cddd.... ........ ........

For longer numbers, the low bytes come first, then a separate stream of the bits above.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

MOST = 16
# Moves the lowest bits of a word's 8 bytes into its highest byte, the first byte's bit lowest.
_GATHER_BITS = 0x0102040810204080


def width(entries: int, bits: int) -> int:
    """Return the bytes of a row.

    Example:
        >>> width(8, 3), width(9, 3), width(9, 12)
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
    if bits == 16:
        return tf.reshape(tf.bitcast(numbers, tf.uint8), (rows, 2 * entries))
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
    return tf.reshape(packed, (rows, groups * bits))[:, : width(entries, bits)]


def unpack(packed: tf.Tensor, entries: int, bits: int) -> tf.Tensor:
    """Unpack any number of rows: the inverse of `pack`.

    Example:
        >>> unpack(tf.constant([[209, 1]], tf.uint8), 3, 3).numpy().tolist()
        [[1.0, 2.0, 7.0]]
    """
    rows = tf.shape(packed)[0]
    if bits == 16:
        pairs = tf.reshape(packed, (rows, entries, 2))
        return tf.cast(tf.bitcast(pairs, tf.uint16), tf.float32)
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
    padded = tf.pad(packed, [[0, 0], [0, groups * bits - width(entries, bits)]])
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
