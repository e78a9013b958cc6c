"""Lookups of rows of a table: without copying it, and the origin of their gradients' slices.

`keras.ops.take`, and with it `keras.layers.Embedding`, reads the whole variable and gathers rows
from the value. Once the variable has had a sparse update, TensorFlow copies it at each read, so
every step copies the table. Gathering from the variable itself gives the same rows and the same
sparse gradient:

    Keras   variable -- read: copies 51 MB --> table -- gather --> 8 rows
    here    variable -- gather --> 8 rows

Keras squares and clips the slices of such a gradient one by one, so replicas together must have the
slices that one process has:

    table[range(5)] + x[rows, 5]      one for each place: the replicas' slices are summed
    table[tokens[rows, 5]]            one for each token: the replicas' slices are concatenated
    table[unique(tokens)]             one for each line that is read: equal lines are summed

The graph shows the origin, backwards from the indices: indices that are equal on all replicas are
of places; indices with an axis that has entries for each row of the batch are of rows; see
`row_dependence`. For all others the origin is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import keras
import tensorflow as tf

from dtk.communicators.aligned_slices import AlignedSlices, concatenated, once
from dtk.compat import keras_steps, keras_variables
from dtk.errors import NotDistributedError, at_rank
from dtk.exchange.contract import Gradient
from dtk.nests import Function
from dtk.trainer.tracing import traced_step
from dtk.trainer.tracing.row_dependence import OF_ROWS, RowDependence

PLACES, ROWS, LINES = "places", "rows", "lines"
# Joins exchanged pieces to whole gradients.
Join: TypeAlias = Callable[[list[Gradient]], list[Gradient]]


def in_place() -> AbstractContextManager[None]:
    """Return a context in which `keras.ops.take` gathers rows from the variable itself."""
    return keras_steps.patch_take(_take)


def _take(
    x: tf.Tensor | keras.Variable,
    indices: tf.Tensor,
    axis: int | None = None,
    *,
    original: Function[tf.Tensor],
) -> tf.Tensor:
    plain = isinstance(indices, tf.Tensor) and indices.dtype in (tf.int32, tf.int64)
    if axis != 0 or not plain or not isinstance(x, keras.Variable):
        return original(x, indices, axis)
    variable = keras_variables.stored(x)
    # A stateless scope or autocasting gives the variable another value.
    if variable is None or x.value is not variable:
        return original(x, indices, axis)
    rows = tf.constant(variable.shape[0], indices.dtype)
    return tf.gather(
        keras_variables.local_value(variable), tf.where(indices < 0, indices + rows, indices)
    )


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


def whole_of(parts: Sequence[tuple[str, tf.IndexedSlices]]) -> tf.IndexedSlices:
    """Put the slices of a gradient, with their kinds, together as one process would have them."""
    return concatenated([_once(part) if kind == LINES else part for kind, part in parts])


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
        slices = tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0) % lines, shape)
        parts.append((kind, slices))
    return whole_of(parts)


def _once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up slices of the same line of a table."""
    return tf.IndexedSlices(*once(slices.values, slices.indices), slices.dense_shape)


# Dividing gradients for an exchange.


def divided(
    gradients: list[Gradient], paths: Sequence[str] = (), rank: int = 0, linear: bool = True
) -> tuple[list[Gradient], Join]:
    """Divide sparse gradients by the origin of their slices, since each kind is summed otherwise.

    Returns the pieces to exchange, and the function that joins the exchanged pieces again.
    """
    pieces = list(gradients)
    held: dict[int, list[tuple[str, int]]] = {}  # gradient -> its pieces' kinds and places
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            path = paths[i] if paths else ""
            origins = known_pieces(gradient, path, rank, linear, traced_step.current())
            first, *others = parts_of(gradient, origins)
            places = [i, *range(len(pieces), len(pieces) + len(others))]
            held[i] = [(one.kind, place) for one, place in zip(origins, places, strict=True)]
            pieces[i] = first
            pieces += others

    def join(exchanged: list[Gradient]) -> list[Gradient]:
        joined = exchanged[: len(gradients)]
        for i, kinds in held.items():
            joined[i] = whole_of([(kind, exchanged[place]) for kind, place in kinds])
        return joined

    return pieces, join


def known_pieces(
    gradient: tf.IndexedSlices,
    path: str,
    rank: int,
    linear: bool,
    step: traced_step.Step | None,
) -> list[LookupSlices]:
    """Return the origins of a gradient's slices, as the graph or the self-test shows them."""
    if step is None:
        pieces = pieces_of(gradient.indices)
    else:
        pieces = pieces_of(gradient.indices, step.graph, step.origins)
    if linear or (step is not None and step.tried) or all(piece.sure for piece in pieces):
        return pieces
    eager = tf.executing_eagerly()
    how = (
        "train with run_eagerly=False, or put @tf.function around the step of a loop of your own"
        if eager
        else "compute the indices from constants and the shapes of the data, or from its rows"
    )
    trial = "" if step is None else ", or make the strategy with self_test=True, which tries it"
    message = (
        f"{path!r} is looked up by indices of which nothing tells whether they belong to rows "
        "of the batch, such as words, or are the same for every row, such as positions: one "
        "process sums slices of the gradient in the second case only, and this optimizer "
        f"squares or clips them one by one. Please {how}{trial}. keras.optimizers.SGD without "
        "clipping makes no difference"
    )
    raise NotDistributedError(at_rank(rank, message))
