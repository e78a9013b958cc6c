"""The origin of a sparse gradient's slices: places of a table, or rows of a batch.

Keras squares and clips the slices of a gradient one by one, so replicas together must have the
slices that one process has:

    table[range(5)] + x[rows, 5]      one for each place: the replicas' slices are summed
    table[tokens[rows, 5]]            one for each token: the replicas' slices are concatenated
    table[unique(tokens)]             one for each line that is read: equal lines are summed

The graph shows the origin, backwards from the indices: indices that are equal on all replicas are
of places; indices with an axis that has entries for each row of the batch are of rows; see
`row_dependence`. For all others the origin is unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.base import AlignedSlices
from dtk.trainer.tracing.row_dependence import OF_ROWS, RowDependence

PLACES, ROWS, LINES = "places", "rows", "lines"


class LookupSlices(NamedTuple):
    """The slices that one lookup has added to a gradient."""

    kind: str  # `PLACES`, `ROWS` or `LINES`
    sure: bool  # whether the graph shows the kind; else it is a guess
    slices: int | tf.Tensor  # how many; an int where the shape is static


_RESHAPING = ("Reshape", "Cast", "Identity", "EnsureShape", "StopGradient")


def pieces_of(
    indices: tf.Tensor,
    inside: tf.Graph | None = None,
    said: Mapping[Hashable, tuple[str, bool]] = MappingProxyType({}),
) -> list[LookupSlices]:
    """Return the lookups that the slices of a gradient come from, in their order."""
    if not hasattr(indices, "graph"):  # eager tensors have no graph to follow
        return [LookupSlices(ROWS, False, indices.shape[0])]
    known = RowDependence(inside)
    return [
        LookupSlices(*said.get(flat.ref(), ()) or _kind(_reshaped(flat), known), _count(flat))
        for flat in _concatenated(indices)
    ]


def _count(flat: tf.Tensor) -> int | tf.Tensor:
    count = flat.shape.num_elements()
    return tf.size(flat) if count is None else count


def _concatenated(indices: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors that were concatenated to indices; else the indices themselves."""
    op = _reshaped(indices).op
    if op.type == "ConcatV2" and tf.get_static_value(op.inputs[-1]) == 0:
        return [part for one in op.inputs[:-1] for part in _concatenated(one)]
    return [indices]


def _reshaped(tensor: tf.Tensor) -> tf.Tensor:
    """Return the tensor before reshaping and, for a table in several parts, before a shift."""
    while tensor.op.type in _RESHAPING or (
        tensor.op.type == "AddV2"
        and tensor.op.inputs[1].op.type == "Const"
        and tensor.op.inputs[1].shape.rank == 0
    ):
        tensor = tensor.op.inputs[0]
    return tensor


def _kind(source: tf.Tensor, known: RowDependence) -> tuple[str, bool]:
    if known.is_equal(source):
        return PLACES, not set(source.shape) & known.known_rows(source.graph)
    if source.op.type in ("Unique", "UniqueV2"):
        return LINES, OF_ROWS in (known.sizes(source.op.inputs[0]) or ())
    if OF_ROWS in (known.sizes(source) or ()):
        return ROWS, True
    return (LINES if source.op.type == "Range" else ROWS), False


def parts_of(gradient: tf.IndexedSlices, pieces: Sequence[LookupSlices]) -> list[tf.IndexedSlices]:
    """Divide the slices of a gradient."""
    values, indices = [gradient.values], [gradient.indices]
    if len(pieces) > 1:
        counts = [piece.slices for piece in pieces]
        values = tf.split(gradient.values, counts, num=len(counts))
        indices = tf.split(gradient.indices, counts, num=len(counts))
    return [
        (AlignedSlices if piece.kind == PLACES else tf.IndexedSlices)(v, i, gradient.dense_shape)
        for piece, v, i in zip(pieces, values, indices, strict=True)
    ]


def whole_of(parts: Sequence[tuple[LookupSlices, tf.IndexedSlices]]) -> tf.IndexedSlices:
    """Put the slices of a gradient together as one process would have them."""
    found = [_once(part) if piece.kind == LINES else part for piece, part in parts]
    return concatenated(found)


def concatenated(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Put slices one after the other."""
    values, indices = [part.values for part in parts], [part.indices for part in parts]
    if len(parts) == 1:
        return tf.IndexedSlices(values[0], indices[0], parts[0].dense_shape)
    return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), parts[0].dense_shape)


def squares_of(slices: tf.IndexedSlices) -> tf.Tensor:
    """Return the dense sum of the squares of slices, each squared by itself as optimizers do."""
    squares = tf.square(slices.values)
    return tf.convert_to_tensor(tf.IndexedSlices(squares, slices.indices, slices.dense_shape))


# The kinds as numbers in indices, where only indices accompany slices: index + lines * number.
_NUMBERS = {ROWS: 0, PLACES: 1, LINES: 2}


def tagged(
    slices: tf.IndexedSlices, pieces: Sequence[LookupSlices], lines: int | tf.Tensor
) -> tf.IndexedSlices:
    """Write the kinds of slices into their indices."""
    numbers = [tf.constant(_NUMBERS[piece.kind], tf.int64) for piece in pieces]
    tags = [tf.fill([piece.slices], n) for piece, n in zip(pieces, numbers, strict=True)]
    indices = tf.cast(slices.indices, tf.int64) + lines * tf.concat(tags, 0)
    return tf.IndexedSlices(slices.values, indices, slices.dense_shape)


def sum_of_tagged(replicas: Sequence[tf.IndexedSlices], lines: int | tf.Tensor) -> tf.IndexedSlices:
    """Put tagged slices of several replicas together as one process would have them."""
    shape = replicas[0].dense_shape
    parts = []
    for kind, number in _NUMBERS.items():
        chosen = [tf.equal(r.indices // lines, number) for r in replicas]
        values = [tf.boolean_mask(r.values, c) for r, c in zip(replicas, chosen, strict=True)]
        indices = [tf.boolean_mask(r.indices, c) for r, c in zip(replicas, chosen, strict=True)]
        if kind == PLACES:
            values, indices = [tf.add_n(values)], indices[:1]
        found = tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0) % lines, shape)
        parts.append((LookupSlices(kind, True, 0), found))
    return whole_of(parts)


def _once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up slices of the same line of a table."""
    lines, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(lines))
    return tf.IndexedSlices(values, lines, slices.dense_shape)
