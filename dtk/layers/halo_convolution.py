"""A convolution over part of an image that never joins its rows with other ranks' rows.

    own rows, zeros for the halo      -> convolution -> output
    rows from above, zeros elsewhere  -> convolution -> added to the first rows of the output
    rows from below, zeros elsewhere  -> convolution -> added to its last rows

A convolution is a sum over its input's rows, so this is exact. Joining the rows would keep a copy
of the input for the backward pass, and make another for the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.layers.halo import Halo, HaloExchange, Range, Window, add_rows, ranges_of


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
