"""A convolution over part of an image that never joins its rows with those of other ranks.

    own rows, zeros where the halo is -> convolution -> output
    rows from above, zeros elsewhere  -> convolution -> added to the first rows of the output
    rows from below, zeros elsewhere  -> convolution -> added to its last rows

A convolution is a sum over its input's rows, so this is exact. Joined, the rows would be a copy of
the input that is kept for the backward pass, and their gradient another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.layers.halo import HaloExchange, add_rows
from dtk.layers.row_ranges import Halo, Range, Window, ranges_of


class BorderOutputs(NamedTuple):
    """Outputs of a convolution that other ranks' rows reach, and their rows in its input."""

    outputs: Range
    before: int
    behind: int


def fits(exchanges: Sequence[HaloExchange], windows: Sequence[Window]) -> bool:
    """Return whether `convolve` can be used; alike on all ranks.

    One axis may be divided, and what each rank lacks must be what TensorFlow pads its rows with for
    padding "same": with other padding oneDNN computes no gradients of convolutions, and what does
    needs nine times the memory of the input for a kernel of nine.
    """
    if min(exchange.communicator.size for exchange in exchanges) > 1:
        return False  # corners would be added twice
    if any(window.dilation > 1 for window in windows):
        return False  # TensorFlow pads copies of its own
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
    """Return what rows from above, and rows from below, are used for.

    Ranks that get none have one output each, of zeros only: graphs of all ranks have one shape.
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
    """Return which rows of the image a rank uses of its own, and all that it needs."""
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
