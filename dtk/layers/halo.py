"""Halos: the rows of an image that a rank needs to compute its rows of a window's output.

Convolutions and pooling slide a window over an axis. With kernel k, stride s, dilation d and p rows
of padding in front, outputs [a, b) need inputs

    [a s - p,  (b - 1) s - p + (k - 1) d + 1)

where rows outside [0, length) are padding. With TensorFlow's "same" padding an axis of length n has
ceil(n / s) outputs, and p is half the number of rows that they need beyond n, rounded down.

The same holds for columns. Rows at the borders between ranks travel in one message to each rank
that needs some.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.layers.collectives import exchange
from dtk.nests import Function


class Range(NamedTuple):
    """Rows from `start` up to, but not including, `stop`; empty if `stop <= start`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return max(0, self.stop - self.start)

    def within(self, other: Range) -> Range:
        """Return the rows in both ranges; if there are none, an empty range at the nearer end."""
        start = min(max(self.start, other.start), other.stop)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that slides over an axis.

    Example:
        >>> window = Window(3, stride=2, padding="same")
        >>> window.outputs(6), window.front(6), window.needs(Range(0, 3), 6)
        (3, 0, Range(start=0, stop=7))
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: str = "valid"

    @property
    def extent(self) -> int:
        """Rows from the first tap to the last, both included."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, length: int) -> int:
        """Return the number of outputs of an axis."""
        if self.padding == "same":
            return -(-length // self.stride)
        return max(0, (length - self.extent) // self.stride + 1)

    def front(self, length: int) -> int:
        """Return the number of padding rows in front."""
        if self.padding != "same":
            return 0
        return max(0, (self.outputs(length) - 1) * self.stride + self.extent - length) // 2

    def needs(self, outputs: Range, length: int) -> Range:
        """Return the inputs that some outputs need, padding included."""
        start = outputs.start * self.stride - self.front(length)
        return Range(start, start + (outputs.length - 1) * self.stride + self.extent)

    def taps(self, output: int, length: int) -> int:
        """Return how many taps of an output are on rows, not on padding."""
        start = output * self.stride - self.front(length)
        return sum(0 <= start + tap * self.dilation < length for tap in range(self.kernel))


def ranges_of(sizes: Sequence[int]) -> list[Range]:
    """Return the rows of every rank: consecutive ranges of these sizes."""
    ends = [0, *itertools.accumulate(sizes)]
    return [Range(a, b) for a, b in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Halo:
    """The rows that ranks send each other, so that each has the rows it needs.

    Example:
        >>> halo = Halo((2, 2), (Range(-1, 3), Range(1, 5)))
        >>> halo.matrix, halo.padding(0)
        ([[0, 1], [1, 0]], (1, 0))
    """

    sizes: tuple[int, ...]
    needs: tuple[Range, ...]

    def sent(self, source: int, dest: int) -> Range:
        """Return which of its rows a rank sends to another, counted from its own first row."""
        own = ranges_of(self.sizes)[source]
        rows = self.needs[dest].within(own)
        return Range(rows.start - own.start, rows.stop - own.start)

    @property
    def matrix(self) -> list[list[int]]:
        """Number of rows that rank i sends to rank j; 0 to itself."""
        ranks = range(len(self.sizes))
        return [[self.sent(i, j).length if i != j else 0 for j in ranks] for i in ranks]

    def padding(self, rank: int) -> tuple[int, int]:
        """Return the numbers of padding rows that a rank adds before and behind."""
        inside = self.needs[rank].within(Range(0, sum(self.sizes)))
        before = min(self.needs[rank].length, max(0, -self.needs[rank].start))
        return before, self.needs[rank].length - before - inside.length


@dataclasses.dataclass(frozen=True)
class HaloExchange:
    """Gives each rank the rows that its part of an output needs, padding included.

    Gradients of another rank's rows go back to that rank, which adds them.
    """

    axis: int
    halo: Halo
    communicator: Communicator

    def __call__(self, value: tf.Tensor, padding: float | None = 0.0) -> tf.Tensor:
        """Return the rows that this rank needs; None pads with the least number of the dtype."""
        rank, size = self.communicator.rank, self.communicator.size
        above, own, below = self.rows(value)
        rows = [part for part in (above, own, below) if part is not None]
        if any(max(self.halo.padding(one)) for one in range(size)):
            before, behind = self.halo.padding(rank)
            rows = [self._filled(own, before, padding), *rows, self._filled(own, behind, padding)]
        return tf.concat(rows, self.axis) if len(rows) > 1 else own

    def rows(self, value: tf.Tensor) -> tuple[tf.Tensor | None, tf.Tensor, tf.Tensor | None]:
        """Return the rows of ranks before, of this rank, and of ranks after it, without padding.

        Joining them would copy them. The first and the last are None if no rank of the group needs
        rows of another.
        """
        rank, matrix = self.communicator.rank, self.halo.matrix
        others = [j for j in range(self.communicator.size) if j != rank]
        own, *parts = parts_of(value, [self.halo.sent(rank, j) for j in (rank, *others)], self.axis)
        if not np.any(matrix):  # the same on all ranks: all know the whole matrix
            return None, own, None
        # Ranks that get no rows have an empty part, so that all ranks' graphs have the same shape.
        first = [self.axis, *(i for i in range(own.shape.rank) if i != self.axis)]
        outgoing = tf.transpose(tf.concat(parts, self.axis), first)
        received = exchange(outgoing, self.communicator, tf.constant(matrix, tf.int64))
        counts = [row[rank] for row in matrix]
        received = tf.ensure_shape(received, [sum(counts), *outgoing.shape[1:]])
        back, above = np.argsort(first).tolist(), sum(counts[:rank])
        return tf.transpose(received[:above], back), own, tf.transpose(received[above:], back)

    def _filled(self, like: tf.Tensor, rows: int, padding: float | None) -> tf.Tensor:
        constant = like.dtype.min if padding is None else padding
        shape, static = tf.unstack(tf.shape(like), like.shape.rank), like.shape.as_list()
        shape[self.axis] = static[self.axis] = rows
        return tf.ensure_shape(tf.fill(shape, tf.cast(constant, like.dtype)), static)


def parts_of(value: tf.Tensor, ranges: Sequence[Range], axis: int) -> list[tf.Tensor]:
    """Return several slices of an axis; the first has most of it.

    TensorFlow's gradient of a slice is as large as the whole, and it makes one for each slice and
    adds them up. Here the gradients of the other slices are added to the rows of the first slice's
    gradient, in place if nothing else needs that.
    """
    length = value.shape[axis]
    if list(ranges) == [Range(0, length)]:
        return [value]

    @tf.custom_gradient
    def slices(tensor: tf.Tensor) -> tuple[list[tf.Tensor], Function[tf.Tensor]]:
        def gradient(first: tf.Tensor, *others: tf.Tensor) -> tf.Tensor:
            beside = [[0, 0]] * tensor.shape.rank
            beside[axis] = [ranges[0].start, length - ranges[0].stop]
            whole = tf.pad(first, beside) if any(beside[axis]) else first
            whole = tf.ensure_shape(whole, tensor.shape)
            for one, rows in zip(others, ranges[1:], strict=True):
                whole = add_rows(whole, one, rows, axis) if rows.length else whole
            return whole

        return [_rows(tensor, *rows, axis) for rows in ranges], gradient

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


# A convolution over part of an image that never joins its rows with other ranks' rows:
#
#     own rows, zeros for the halo      -> convolution -> output
#     rows from above, zeros elsewhere  -> convolution -> added to the first rows of the output
#     rows from below, zeros elsewhere  -> convolution -> added to its last rows
#
# A convolution is a sum over its input's rows, so this is exact. Joining the rows would keep a copy
# of the input for the backward pass, and make another for the gradient.


class BorderOutputs(NamedTuple):
    """Outputs of a convolution that depend on other ranks' rows, and the padding of these rows."""

    outputs: Range
    before: int
    behind: int


def fits(exchanges: Sequence[HaloExchange], windows: Sequence[Window]) -> bool:
    """Return whether `convolve` can be used: the same answer on all ranks.

    Only one axis may be divided, and each rank must lack exactly the rows with which TensorFlow
    pads its own rows for padding "same". With other padding oneDNN computes no gradients of
    convolutions, and the other implementation needs nine times the memory of the input for a kernel
    of nine.
    """
    if min(exchange.communicator.size for exchange in exchanges) > 1:
        return False  # corners would be added twice
    if any(window.dilation > 1 for window in windows):
        return False  # TensorFlow would pad its own copies
    return all(
        _as_same(window, exchange.halo, rank)
        for exchange, window in zip(exchanges, windows, strict=True)
        for rank in range(exchange.communicator.size)
    )


def _as_same(window: Window, halo: Halo, rank: int) -> bool:
    own, need = _rows_of(halo, rank)
    same = dataclasses.replace(window, padding="same")
    return own.length > 0 and need == Range(
        *(own.start + row for row in same.needs(Range(0, same.outputs(own.length)), own.length))
    )


def pieces(window: Window, halo: Halo, rank: int) -> tuple[BorderOutputs, BorderOutputs]:
    """Return the outputs that rows from above reach, and the outputs that rows from below reach.

    If a rank gets no rows, the piece is one output of zeros, so that all graphs have one shape.
    """
    own, need = _rows_of(halo, rank)
    last = (need.length - window.extent) // window.stride
    reached = min(last + 1, max(1, -(-(own.start - need.start) // window.stride)))
    stop = need.start + (reached - 1) * window.stride + window.extent
    clear = max(0, (own.stop - need.start - window.extent) // window.stride + 1)
    first = min(last, clear)
    start = need.start + first * window.stride
    before, behind = halo.padding(rank)
    return (
        BorderOutputs(Range(0, reached), before, stop - own.start),
        BorderOutputs(Range(first, last + 1), own.stop - start, behind),
    )


def _rows_of(halo: Halo, rank: int) -> tuple[Range, Range]:
    """Return which rows of the image a rank uses of its own, and which it needs in all."""
    start = ranges_of(halo.sizes)[rank].start
    own = halo.sent(rank, rank)
    return Range(start + own.start, start + own.stop), halo.needs[rank]


def convolve(
    inputs: tf.Tensor,
    kernel: tf.Tensor,
    exchanges: Sequence[HaloExchange],
    windows: Sequence[Window],
) -> tf.Tensor:
    """Return this rank's rows of a convolution."""
    strides = [window.stride for window in windows]
    divided = int(exchanges[0].communicator.size == 1)
    exchange, alone = exchanges[divided], exchanges[1 - divided]
    above, own, below = exchange.rows(inputs)
    outputs = tf.nn.conv2d(own, kernel, strides, "SAME")
    if above is None or below is None:
        return outputs
    parts = pieces(windows[divided], exchange.halo, exchange.communicator.rank)
    for value, piece in zip((above, below), parts, strict=True):
        beside = [[0, 0]] * 4
        beside[exchange.axis] = [piece.before, piece.behind]
        beside[alone.axis] = list(alone.halo.padding(0))
        added = tf.nn.conv2d(tf.pad(value, beside), kernel, strides, "VALID")
        outputs = add_rows(outputs, added, piece.outputs, exchange.axis)
    return outputs
