"""Exchanging rows at the borders between ranks, in one message to each rank that needs some."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.layers.collectives import exchange
from dtk.layers.row_ranges import Halo


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
        rank = self.communicator.rank
        rows = [self._rows(value, *self.halo.sent(rank, rank))]
        matrix = self.halo.matrix
        if np.any(matrix):  # alike on all ranks: all know the whole of it
            above, below = self._exchanged(value, matrix)
            rows = [above, *rows, below]
        joined = tf.concat(rows, self.axis)
        if not any(max(self.halo.padding(one)) for one in range(self.communicator.size)):
            return joined
        widths = [(0, 0)] * value.shape.rank
        widths[self.axis] = self.halo.padding(rank)
        constant = value.dtype.min if padding is None else padding
        return tf.pad(joined, widths, constant_values=tf.cast(constant, value.dtype))

    def _exchanged(self, value: tf.Tensor, matrix: list[list[int]]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the rows that ranks before and after this one have sent."""
        rank, size = self.communicator.rank, self.communicator.size
        # The graph has one shape on all ranks: an empty part for each that gets none.
        parts = [self._rows(value, *self.halo.sent(rank, j)) for j in range(size) if j != rank]
        first = [self.axis, *(i for i in range(value.shape.rank) if i != self.axis)]
        outgoing = tf.transpose(tf.concat(parts, self.axis), first)
        received = exchange(outgoing, self.communicator, tf.constant(matrix, tf.int64))
        counts = [row[rank] for row in matrix]
        received = tf.ensure_shape(received, [sum(counts), *outgoing.shape[1:]])
        back = np.argsort(first).tolist()
        above = sum(counts[:rank])
        return tf.transpose(received[:above], back), tf.transpose(received[above:], back)

    def _rows(self, value: tf.Tensor, start: int, stop: int) -> tf.Tensor:
        index = [slice(None)] * value.shape.rank
        index[self.axis] = slice(start, stop)
        return value[tuple(index)]
