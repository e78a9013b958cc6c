"""Exchanging rows at the borders between ranks, in one message to each rank that needs some."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.layers.collectives import exchange
from dtk.layers.row_ranges import Halo, Range
from dtk.nests import Function


@dataclasses.dataclass(frozen=True)
class HaloExchange:
    """Gives each rank the rows that its part of an output needs, padding included.

    Gradients of rows that came from another rank go back there, and are added.

    Args:
        axis: Which axis of the tensor is divided.
        halo: Which rank has and needs which rows.
        communicator: Of the ranks.
    """

    axis: int
    halo: Halo
    communicator: Communicator

    def __call__(self, value: tf.Tensor, padding: float | None = 0.0) -> tf.Tensor:
        """Return the rows that this rank needs.

        Args:
            value: This rank's rows.
            padding: Value of rows outside the image; None for the lowest of the dtype.
        """
        rank, size = self.communicator.rank, self.communicator.size
        own, *parts = cut(value, [self.halo.sent(rank, j) for j in self._ranks], self.axis)
        rows = [own]
        if np.any(self.halo.matrix):  # alike on all ranks: all know the whole of it
            above, below = self._exchanged(parts)
            rows = [above, own, below]
        if any(max(self.halo.padding(one)) for one in range(size)):
            before, behind = self.halo.padding(rank)
            rows = [self._filled(own, before, padding), *rows, self._filled(own, behind, padding)]
        return tf.concat(rows, self.axis) if len(rows) > 1 else own

    @property
    def _ranks(self) -> list[int]:
        """This rank, and the others in order."""
        rank = self.communicator.rank
        return [rank, *(j for j in range(self.communicator.size) if j != rank)]

    def _filled(self, like: tf.Tensor, rows: int, padding: float | None) -> tf.Tensor:
        """Return rows of padding."""
        constant = like.dtype.min if padding is None else padding
        shape = tf.unstack(tf.shape(like), like.shape.rank)
        shape[self.axis] = rows
        static = like.shape.as_list()
        static[self.axis] = rows
        return tf.ensure_shape(tf.fill(shape, tf.cast(constant, like.dtype)), static)

    def _exchanged(self, parts: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Send a part to each other rank; return the rows of ranks before and after this one."""
        rank, matrix = self.communicator.rank, self.halo.matrix
        # The graph has one shape on all ranks: an empty part for each that gets none.
        first = [self.axis, *(i for i in range(parts[0].shape.rank) if i != self.axis)]
        outgoing = tf.transpose(tf.concat(parts, self.axis), first)
        received = exchange(outgoing, self.communicator, tf.constant(matrix, tf.int64))
        counts = [row[rank] for row in matrix]
        received = tf.ensure_shape(received, [sum(counts), *outgoing.shape[1:]])
        back = np.argsort(first).tolist()
        above = sum(counts[:rank])
        return tf.transpose(received[:above], back), tf.transpose(received[above:], back)


def cut(value: tf.Tensor, ranges: Sequence[Range], axis: int) -> list[tf.Tensor]:
    """Return several slices of an axis.

    The gradient of a slice of TensorFlow's is as large as the whole, and one is made for each slice
    and added. Here the whole is written once, and only rows in several slices are added.

    Args:
        value: A tensor whose length along `axis` is known.
        ranges: Rows of each slice.
        axis: Which one is cut.

    Returns:
        One tensor for each range.
    """
    length = value.shape[axis]
    if list(ranges) == [Range(0, length)]:
        return [value]

    @tf.custom_gradient
    def slices(given: tf.Tensor) -> tuple[list[tf.Tensor], Function[tf.Tensor]]:
        def gradient(*upstream: tf.Tensor) -> tf.Tensor:
            ends = sorted({0, length, *(end for one in ranges for end in one)})
            found = []
            for start, stop in itertools.pairwise(ends):
                added = [
                    _rows(one, start - rows.start, stop - rows.start, axis)
                    for one, rows in zip(upstream, ranges, strict=True)
                    if rows.start <= start and stop <= rows.stop
                ]
                found.append(
                    tf.add_n(added) if added else tf.zeros_like(_rows(given, start, stop, axis))
                )
            return tf.concat(found, axis)

        return [_rows(given, *rows, axis) for rows in ranges], gradient

    return slices(value)


def _rows(value: tf.Tensor, start: int, stop: int, axis: int) -> tf.Tensor:
    if (start, stop) == (0, value.shape[axis]):
        return tf.identity(value)
    index = [slice(None)] * value.shape.rank
    index[axis] = slice(start, stop)
    return value[tuple(index)]
