"""Rows of a tensor on the wire: flat, one block for each rank, in a dtype that can be moved."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk import placement
from dtk.communicators import dtype_casts
from dtk.errors import at_rank


class RowBlocks:
    """A tensor's rows as flat elements that a backend moves, in blocks for `counts` rows each."""

    def __init__(self, tensor: tf.Tensor, native: frozenset[tf.DType]) -> None:
        shape = tf.shape(tensor, tf.int64)  # beside the tensor, which would be copied
        with tf.device(placement.host()):
            self._row = shape[1:]
            self._width = tf.reduce_prod(self._row)  # elements in one row
        self._is_flat = tensor.shape.rank == 1
        self._static = [None, *tensor.shape[1:]]
        self._native = native
        self._flat = tf.reshape(tensor, [-1])
        # Four bytes share a word; the last word of a block may hold padding.
        self._per_word = 4 if (tensor.dtype.size == 1 and tensor.dtype not in native) else 1
        self.encoded, self.decode = dtype_casts.for_moving(self._flat, native)

    def blocks(self, counts: tf.Tensor, size: int) -> tf.Tensor:
        """Return `size` blocks, one after the other: a word must not hold bytes for two ranks."""
        if self._per_word == 1:  # one word per element: blocks need no padding
            return self.encoded
        blocks = tf.split(self._flat, counts * self._width, num=size)
        return tf.concat([dtype_casts.for_moving(one, self._native)[0] for one in blocks], axis=0)

    def words(self, rows: tf.Tensor) -> tf.Tensor:
        """Return how many elements on the wire the rows take."""
        with tf.device(placement.host()):
            elements = rows if self._is_flat else rows * self._width  # static sizes stay static
            return elements if self._per_word == 1 else -(-elements // self._per_word)

    def joined(self, parts: Sequence[tf.Tensor], counts: tf.Tensor) -> tf.Tensor:
        """Decode and join the parts from all ranks."""
        flat = [self.decode(part) for part in parts]
        if self._per_word > 1:
            flat = [part[: counts[j] * self._width] for j, part in enumerate(flat)]
        with tf.device(placement.host()):
            shape = tf.concat([tf.reduce_sum(counts)[None], self._row], axis=0)
        return tf.ensure_shape(tf.reshape(tf.concat(flat, axis=0), shape), self._static)


def checked_counts(
    tensor: tf.Tensor, known: Sequence[int] | tf.Tensor, rank: int, size: int
) -> tf.Tensor:
    """Return the row count of every rank; raise if this rank's does not fit its tensor."""
    if tf.is_tensor(known):
        with tf.device(placement.host()):
            return tf.ensure_shape(tf.cast(known, tf.int64), [size])
    counts, rows = list(known), tensor.shape[0]
    if len(counts) != size or rows not in (None, counts[rank]):
        message = (
            f"allgather got rows={counts} for {rows} rows of this rank, expected one number "
            f"for each of {size} ranks"
        )
        raise ValueError(at_rank(rank, message))
    message = at_rank(rank, f"allgather got rows={counts}, which says other rows of this rank")
    with tf.device(placement.host()):
        row_counts = tf.constant(counts, tf.int64)
        return (
            row_counts
            if rows is not None
            else _asserted(row_counts, row_counts[rank], tensor, message)
        )


def checked_splits(
    tensor: tf.Tensor, splits: Sequence[int] | tf.Tensor | None, rank: int, size: int
) -> tf.Tensor:
    """Return how many rows an all-to-all sends to each rank; raise if they do not fit."""
    if tensor.shape.rank == 0:
        raise ValueError(at_rank(rank, "alltoall needs rows to send, got a scalar"))
    rows = tensor.shape[0]
    if splits is None:
        if rows is not None and rows % size:
            message = f"alltoall of {rows} rows over {size} ranks is uneven: pass splits, the rows"
            raise ValueError(at_rank(rank, f"{message} for each rank"))
        even = tf.repeat(tf.shape(tensor, tf.int64)[0] // size, size)
        message = f"alltoall of rows that {size} does not divide: pass splits"
        mine, sent_rows = even, even
    else:
        sent_rows = tf.cast(tf.convert_to_tensor(splits), tf.int64)
        if sent_rows.shape not in ([size], [size, size]):
            message = (
                f"alltoall got splits of shape {tuple(sent_rows.shape)}, expected ({size},), "
                f"or ({size}, {size}) for what every rank sends"
            )
            raise ValueError(at_rank(rank, message))
        mine = sent_rows if sent_rows.shape.rank == 1 else sent_rows[rank]
        message = "alltoall got splits that do not add up to the rows"
    known = tf.get_static_value(mine)
    if rows is None or (splits is not None and known is None):
        return _asserted(sent_rows, tf.reduce_sum(mine), tensor, at_rank(rank, message))
    if known is not None and known.sum() != rows:
        message = (
            f"alltoall got splits {known.tolist()} for {rows} rows: they must add up to the rows"
        )
        raise ValueError(at_rank(rank, message))
    return sent_rows


def _asserted(counts: tf.Tensor, mine: tf.Tensor, tensor: tf.Tensor, told: str) -> tf.Tensor:
    """Return `counts`, in a graph that fails if `mine` is not the number of the tensor's rows.

    Otherwise MPI would send the memory behind the rows.
    """
    check = tf.debugging.assert_equal(mine, tf.shape(tensor, tf.int64)[0], told)
    with tf.control_dependencies([check]):
        return tf.identity(counts)
