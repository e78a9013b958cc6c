"""Exchange rows at the borders between ranks, in one message to each rank that needs some."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.layers.collectives import exchange
from dtk.layers.row_ranges import Halo, Range
from dtk.nests import Function


class HaloRows(NamedTuple):
    """Rows that a rank needs, without padding: from ranks before, its own, from ranks after.

    `above` and `below` are None if no rank of the group needs rows of another.
    """

    above: tf.Tensor | None
    own: tf.Tensor
    below: tf.Tensor | None


@dataclasses.dataclass(frozen=True)
class HaloExchange:
    """Gives each rank the rows that its part of an output needs, padding included.

    Gradients of another rank's rows go back to that rank, which adds them.
    """

    axis: int
    halo: Halo
    communicator: Communicator

    def __call__(self, value: tf.Tensor, padding: float | None = 0.0) -> tf.Tensor:
        """Return the rows that this rank needs."""
        rank, size = self.communicator.rank, self.communicator.size
        above, own, below = self.rows(value)
        rows = [own] if above is None or below is None else [above, own, below]
        if any(max(self.halo.padding(one)) for one in range(size)):
            before, behind = self.halo.padding(rank)
            rows = [self._filled(own, before, padding), *rows, self._filled(own, behind, padding)]
        return tf.concat(rows, self.axis) if len(rows) > 1 else own

    def rows(self, value: tf.Tensor) -> HaloRows:
        """Return the rows that this rank needs, without joining them: that would copy them."""
        rank = self.communicator.rank
        own, *parts = cut(value, [self.halo.sent(rank, j) for j in self._ranks], self.axis)
        if not np.any(self.halo.matrix):  # the same on all ranks: all know the whole matrix
            return HaloRows(None, own, None)
        above, below = self._exchanged(parts)
        return HaloRows(above, own, below)

    @property
    def _ranks(self) -> list[int]:
        """This rank, then the other ranks in order."""
        rank = self.communicator.rank
        return [rank, *(j for j in range(self.communicator.size) if j != rank)]

    def _filled(self, like: tf.Tensor, rows: int, padding: float | None) -> tf.Tensor:
        constant = like.dtype.min if padding is None else padding
        shape = tf.unstack(tf.shape(like), like.shape.rank)
        shape[self.axis] = rows
        static = like.shape.as_list()
        static[self.axis] = rows
        return tf.ensure_shape(tf.fill(shape, tf.cast(constant, like.dtype)), static)

    def _exchanged(self, parts: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Send a part to each other rank; return the rows of ranks before and after this one."""
        rank, matrix = self.communicator.rank, self.halo.matrix
        # Ranks that get no rows have an empty part, so that all ranks' graphs have the same shape.
        first = [self.axis, *(i for i in range(parts[0].shape.rank) if i != self.axis)]
        outgoing = tf.transpose(tf.concat(parts, self.axis), first)
        received = exchange(outgoing, self.communicator, tf.constant(matrix, tf.int64))
        counts = [row[rank] for row in matrix]
        received = tf.ensure_shape(received, [sum(counts), *outgoing.shape[1:]])
        back = np.argsort(first).tolist()
        above = sum(counts[:rank])
        return tf.transpose(received[:above], back), tf.transpose(received[above:], back)


def cut(value: tf.Tensor, ranges: Sequence[Range], axis: int) -> list[tf.Tensor]:
    """Return several slices of an axis; the first has most of it.

    TensorFlow's gradient of a slice is as large as the whole, and it makes one for each slice and
    adds them up. Here the gradients of the other slices are added to the rows of the first slice's
    gradient, in place if nothing else needs that.
    """
    length = value.shape[axis]
    if list(ranges) == [Range(0, length)]:
        return [value]

    @tf.custom_gradient
    def slices(given: tf.Tensor) -> tuple[list[tf.Tensor], Function[tf.Tensor]]:
        def gradient(first: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
            beside = [[0, 0]] * given.shape.rank
            beside[axis] = [ranges[0].start, length - ranges[0].stop]
            whole = tf.pad(first, beside) if any(beside[axis]) else first
            whole = tf.ensure_shape(whole, given.shape)
            for one, rows in zip(others, ranges[1:], strict=True):
                whole = add_rows(whole, one, rows, axis) if rows.length else whole
            return whole

        return [_rows(given, *rows, axis) for rows in ranges], gradient

    return slices(value)


def add_rows(value: tf.Tensor, added: tf.Tensor, rows: Range, axis: int) -> tf.Tensor:
    """Return `value` with `added` added to some rows, in place if nothing else needs `value`."""
    length, inner = value.shape[axis], value.shape[axis + 1 :].num_elements()
    flat = tf.reshape(value, [-1, inner])
    first = tf.range(0, tf.shape(flat)[0], length)
    index = tf.reshape(first[:, None] + np.arange(*rows, dtype=np.int32), [-1, 1])
    result = tf.tensor_scatter_nd_add(flat, index, tf.reshape(added, [-1, inner]))
    return tf.reshape(result, [-1, *value.shape[1:]])


def _rows(value: tf.Tensor, start: int, stop: int, axis: int) -> tf.Tensor:
    if (start, stop) == (0, value.shape[axis]):
        return tf.identity(value)
    index = [slice(None)] * value.shape.rank
    index[axis] = slice(start, stop)
    return value[tuple(index)]
