"""Rows of a tensor on the wire: flat, one block for each rank, in a dtype that can be moved."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators import wire
from dtk.errors import at_rank


class RowBlocks:
    """Encodes a tensor's rows as flat elements that a backend moves, and decodes them."""

    def __init__(self, tensor: tf.Tensor, native: frozenset[tf.DType]) -> None:
        self._tensor = tensor
        self._native = native
        self._width = tf.reduce_prod(tf.shape(tensor, tf.int64)[1:])  # elements in one row
        # Four bytes share a word; the last word of a block may hold padding.
        self._per_word = 4 if (tensor.dtype.size == 1 and tensor.dtype not in native) else 1

    def encode(self) -> tuple[tf.Tensor, wire.Decode]:
        """Return all rows as one flat tensor for the wire, and its decoder."""
        return wire.for_moving(tf.reshape(self._tensor, [-1]), self._native)

    def encode_blocks(self, counts: tf.Tensor, size: int) -> tuple[tf.Tensor, wire.Decode]:
        """Return the rows as `size` blocks, one after the other in a flat tensor, and the decoder.

        Each block is encoded by itself: a word must not hold bytes for two ranks.
        """
        if self._per_word == 1:  # one word per element: blocks need no padding
            return self.encode()
        flat = tf.reshape(self._tensor, [-1])
        blocks = tf.split(flat, counts * self._width, num=size)
        encoded = [wire.for_moving(block, self._native) for block in blocks]
        return tf.concat([block for block, _ in encoded], axis=0), encoded[0][1]

    def words(self, rows: tf.Tensor) -> tf.Tensor:
        """Return how many elements on the wire the rows take."""
        elements = rows * self._width
        return elements if self._per_word == 1 else -(-elements // self._per_word)

    def decode(
        self, parts: Sequence[tf.Tensor], decode: wire.Decode, counts: tf.Tensor
    ) -> tf.Tensor:
        """Decode and join the parts from all ranks."""
        flat = [decode(part) for part in parts]
        if self._per_word > 1:
            flat = [part[: counts[j] * self._width] for j, part in enumerate(flat)]
        row = tf.shape(self._tensor, tf.int64)[1:]
        shape = tf.concat([tf.reduce_sum(counts)[None], row], axis=0)
        rows = tf.reshape(tf.concat(flat, axis=0), shape)
        return tf.ensure_shape(rows, [None, *self._tensor.shape[1:]])


def checked_counts(tensor: tf.Tensor, known: Sequence[int], rank: int, size: int) -> tf.Tensor:
    """Return the row count of every rank; raise if this rank's does not fit its tensor."""
    counts = list(known)
    if len(counts) != size or tensor.shape[0] not in (None, counts[rank]):
        raise ValueError(
            at_rank(
                rank,
                f"allgather got rows={counts} for {tensor.shape[0]} rows of this rank, expected "
                f"one number for each of {size} ranks",
            )
        )
    given = tf.constant(counts, tf.int64)
    if tensor.shape[0] is not None:
        return given
    told = at_rank(rank, f"allgather got rows={counts}, which says other rows of this rank")
    return _asserted(given, given[rank], tensor, told)


def _asserted(counts: tf.Tensor, mine: tf.Tensor, tensor: tf.Tensor, told: str) -> tf.Tensor:
    """Return `counts`, in a graph that fails if `mine` is not the number of the tensor's rows.

    Otherwise MPI would send the memory behind the rows.
    """
    rows = tf.shape(tensor, tf.int64)[0]
    check = tf.debugging.assert_equal(mine, rows, told)
    with tf.control_dependencies([check]):
        return tf.identity(counts)


def checked_splits(
    tensor: tf.Tensor, splits: Sequence[int] | tf.Tensor | None, rank: int, size: int
) -> tf.Tensor:
    """Return how many rows an all-to-all sends to each rank; raise if they do not fit."""
    if tensor.shape.rank == 0:
        raise ValueError(at_rank(rank, "alltoall needs rows to send, got a scalar"))
    rows = tf.shape(tensor, tf.int64)[0]
    if splits is None:
        if tensor.shape[0] is not None and tensor.shape[0] % size:
            raise ValueError(
                at_rank(
                    rank,
                    f"alltoall of {tensor.shape[0]} rows over {size} ranks is uneven: "
                    "pass splits, the rows for each rank",
                )
            )
        even = tf.repeat(rows // size, size)
        if tensor.shape[0] is not None:
            return even
        told = at_rank(rank, f"alltoall of rows that {size} does not divide: pass splits")
        return _asserted(even, tf.reduce_sum(even), tensor, told)
    given = tf.cast(tf.convert_to_tensor(splits), tf.int64)
    if given.shape not in ([size], [size, size]):
        raise ValueError(
            at_rank(
                rank,
                f"alltoall got splits of shape {tuple(given.shape)}, expected ({size},), "
                f"or ({size}, {size}) for what every rank sends",
            )
        )
    mine = given if given.shape.rank == 1 else given[rank]
    known = tf.get_static_value(mine)
    if known is None or tensor.shape[0] is None:
        told = at_rank(rank, "alltoall got splits that do not add up to the rows")
        return _asserted(given, tf.reduce_sum(mine), tensor, told)
    if known.sum() != tensor.shape[0]:
        raise ValueError(
            at_rank(
                rank,
                f"alltoall got splits {known.tolist()} for {tensor.shape[0]} rows: "
                "they must add up to the rows",
            )
        )
    return given
