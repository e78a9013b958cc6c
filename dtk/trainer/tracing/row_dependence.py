"""Find the tensors of a step's graph that are equal on all replicas, or have entries for each row.

Tensors computed from constants, weights and sizes other than the number of rows are equal on all
replicas. Which sizes those are, TensorFlow's own inference of shapes says: the ops that lead to a
tensor are made again in two other graphs, whose data has `_ROWS` rows and twice as many.

    size in one, in the other    5, 5      EQUAL       of words, of a table
                                 R, 2R     OF_ROWS     of rows; of rows and words together, 5R
                                 R/3, ?    UNKNOWN     and so are sizes that nothing infers
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import tensorflow as tf

from dtk.trainer.tracing.loss_terms import computed_from, depends_on_data, linear_terms

# The size of an axis: the same on all replicas, a multiple of the batch's rows, or unknown.
EQUAL, OF_ROWS, UNKNOWN = "equal", "of rows", "unknown"
# One for each axis; None where the number of axes is unknown.
Sizes: TypeAlias = "list[str] | None"

# Rows in the first of the two graphs, and the size of other axes of data that is unknown. Both have
# many divisors, as steps divide them, and neither divides the other.
_ROWS, _ENTRIES = 5040, 27720

_DATA = ("Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "OptionalGetValue")
# What making an op again raises; AssertionError where an input is a resource, which is left out.
_NOT_MADE = (AssertionError, LookupError, TypeError, ValueError, tf.errors.OpError)
# Ops whose outputs have some entries for each row, if their first inputs have; how many, the values
# decide.
_CHOOSING = ("DynamicPartition", "StringSplitV2", "Where")


class RowDependence:
    """Values and sizes of tensors in a step's graph.

    `exact`: entries that are chosen by their values, as by a mask, are of unknown size; else they
    are of rows.
    """

    def __init__(self, inside: tf.Graph | None, exact: bool = False):
        self.inside = inside
        self._equal: dict[Hashable, bool] = {}
        self._inferred = [_Inferred(inside, rows, exact) for rows in (_ROWS, 2 * _ROWS)]

    def known_rows(self, graph: tf.Graph) -> set[int]:
        """Return the numbers of rows that the graph's inputs have as static shapes.

        Constants may have as many entries. dtk's own steps hide these numbers.
        """
        if self.inside is not None:
            return set()
        data = [t for op in graph.get_operations() if op.type in _DATA for t in op.outputs]
        return {t.shape[0] for t in data if t.shape.rank and captured(t) is None} - {None, 1}

    # Values.

    def is_equal(self, tensor: tf.Tensor) -> bool:
        """Return whether the graph shows that a tensor has the same value on all replicas."""
        left = [tensor]
        while left:  # no recursion: a graph may be deeper than Python's stack
            one = left[-1]
            if one.ref() in self._equal:
                left.pop()
                continue
            needed = self._needed(one)
            if needed is None or any(self._equal.get(n.ref()) is False for n in needed):
                self._equal[one.ref()] = False
            elif all(n.ref() in self._equal for n in needed):
                self._equal[one.ref()] = True
            else:
                left += [n for n in needed if n.ref() not in self._equal]
        return self._equal[tensor.ref()]

    def _needed(self, tensor: tf.Tensor) -> Sequence[tf.Tensor] | None:
        """Return the tensors that must be equal for this one to be; None if none would suffice."""
        op = tensor.op
        if op.type == "Placeholder":
            outer = captured(tensor)
            return None if outer is None else [outer] if hasattr(outer, "graph") else []
        if op.type in ("ReadVariableOp", "ResourceGather"):
            return None if _is_assigned(op.inputs[0]) else op.inputs[1:]
        if op.type == "StridedSlice" and op.inputs[0].shape.rank == 1:
            one, other = (inferred.entries_of(tensor) for inferred in self._inferred)
            if one is not None and other is not None:
                return [] if one == other else None
        if op.type in ("Shape", "Size", "ZerosLike", "OnesLike"):
            sizes = self.sizes(op.inputs[0])
            return [] if sizes is not None and set(sizes) <= {EQUAL} else None
        if op.type == "Rank":
            return []
        stateful = op.op_def is None or op.op_def.is_stateful
        return None if stateful or op.type == "PlaceholderWithDefault" else op.inputs

    # Sizes.

    def sizes(self, tensor: tf.Tensor) -> Sizes:
        """Return the kind of size of each axis; None where the number of axes is unknown."""
        one, other = (inferred.of(tensor).shape for inferred in self._inferred)
        return None if one.rank is None else list(map(_kind_of_size, one, other))


def _kind_of_size(one: int | None, other: int | None) -> str:
    if one is None or other is None:
        return UNKNOWN
    if one == other:
        return EQUAL
    return OF_ROWS if other == 2 * one and one % _ROWS == 0 else UNKNOWN


def are_chosen(values: tf.Tensor, inside: tf.Graph) -> bool:
    """Return whether a graph lets data decide how many values there are, as a mask does."""
    sources = computed_from([values])
    if not any(one.op.type in (*_CHOOSING, "Unique", "UniqueV2") for one in sources):
        return False
    sizes = RowDependence(inside, exact=True).sizes(values)
    return sizes is None or sizes[0] == UNKNOWN


def have_rows(tensors: Sequence[tf.Tensor], inside: tf.Graph) -> bool:
    """Return whether all tensors are numbers or booleans of rows, as far as a graph shows."""
    dense = tensors and all(isinstance(one, tf.Tensor) and one.shape.rank for one in tensors)
    if not dense or any(one.dtype in (tf.string, tf.variant, tf.resource) for one in tensors):
        return False
    if tf.executing_eagerly():
        return True
    known = RowDependence(inside)
    return not any((known.sizes(one) or [UNKNOWN])[0] == EQUAL for one in tensors)


def adds_up(values: tf.Tensor, inputs: Sequence[tf.Tensor], inside: tf.Graph) -> bool:
    """Return whether a graph shows that a loss is made of sums over rows of its inputs.

    Its values, if they are not one for each row, must be sums over rows, or a quotient of two; and
    no row may be computed from a number of the whole batch, such as its count of positives. That
    rows are not compared with each other is not shown here, but by trying it.
    """
    known = RowDependence(inside, exact=True)
    ends = {one.ref() for one in inputs}
    if values.shape.rank != 0:
        return _is_by_row(values, ends, known)
    return all(_is_sum(term, ends, known) for _, term in linear_terms(values, set()))


def is_mean(values: tf.Tensor, inputs: Sequence[tf.Tensor], inside: tf.Graph) -> bool:
    """Return whether a graph shows that a loss is a mean over rows of its inputs.

    Its values are as many for each row, or are the mean of such. Rows that are compared with each
    other are not shown, as in `adds_up`.
    """
    known = RowDependence(inside, exact=True)
    ends = {one.ref() for one in inputs}

    def are_of_each_row(rows: tf.Tensor) -> bool:
        sizes = known.sizes(rows) or []
        return sizes.count(OF_ROWS) == 1 and UNKNOWN not in sizes and _is_by_row(rows, ends, known)

    if values.shape.rank != 0:
        return are_of_each_row(values)
    terms = [term.op for _, term in linear_terms(values, set())]
    return all(op.type == "Mean" and are_of_each_row(op.inputs[0]) for op in terms)


def _is_sum(
    scalar: tf.Tensor, ends: set[Hashable], known: RowDependence, strictly: bool = False
) -> bool:
    """Return whether a scalar is a sum over rows; or, unless strictly, a mean or a quotient."""
    op = scalar.op
    if known.is_equal(scalar):
        return not strictly
    if op.type in ("Sum", "Mean"):
        rows = op.inputs[0]
        if op.type == "Mean" and strictly:
            return False
        sizes = known.sizes(rows)
        if sizes is None or op.type == "Mean" and UNKNOWN in sizes:
            return False  # a mean over rows that a mask has chosen
        if set(sizes) <= {EQUAL}:
            return _is_sum(rows, ends, known, strictly)
        return _is_by_row(rows, ends, known)
    if op.type in ("Identity", "Cast", "Reshape", "Squeeze", "Neg"):
        return _is_sum(op.inputs[0], ends, known, strictly)
    if op.type in ("Mul", "RealDiv", "DivNoNan"):
        one, other = op.inputs
        by_shape = depends_on_data(other) and op.type != "Mul" and strictly
        if _is_factor(other, known) and not by_shape:
            return _is_sum(one, ends, known, strictly)
        if op.type == "Mul":
            return _is_factor(one, known) and _is_sum(other, ends, known, strictly)
        of_scalars = one.shape.rank == other.shape.rank == 0 and not strictly
        return of_scalars and all(_is_sum(part, ends, known, True) for part in (one, other))
    return False


def _is_factor(scalar: tf.Tensor, known: RowDependence) -> bool:
    """Return whether a scalar is no number of the data but, at most, of all its rows."""
    shapes = ("Shape", "Size")
    counted = [one.op.inputs[0] for one in computed_from([scalar]) if one.op.type in shapes]
    # The size of rows that a mask has chosen is a number of the data.
    if any(UNKNOWN in (known.sizes(one) or [UNKNOWN]) for one in counted if one.shape.rank != 0):
        return False
    return not depends_on_data(scalar, by_shape=False)


def _is_by_row(rows: tf.Tensor, ends: set[Hashable], known: RowDependence) -> bool:
    """Return whether rows are computed without a number of the whole batch, or pairs of rows."""
    for one in computed_from([rows], ("Shape", "Size", "Rank"), ends):
        sizes = None if one.dtype in (tf.resource, tf.variant) else known.sizes(one)
        if sizes is not None and sizes.count(OF_ROWS) > 1:
            return False
        if sizes is None or not set(sizes) <= {EQUAL} or known.is_equal(one):
            continue
        if depends_on_data(one, by_shape=False):
            return False
    return True


class _Inferred:
    """A step's ops, made again in a graph whose data has so many rows."""

    def __init__(self, inside: tf.Graph | None, rows: int, exact: bool):
        self._inside, self._rows, self._exact = inside, rows, exact
        self._graph = tf.Graph()
        self._made: dict[Hashable, tf.Tensor] = {}

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the tensor in the other graph, with the shape that it has there."""
        left, begun = [tensor], set()
        while left:
            one = left[-1]
            missing = [i for i in _sources(one) if i.ref() not in self._made]
            if one.ref() in self._made:
                left.pop()
            elif missing and one.ref() not in begun:  # a cycle in the graph leads back here
                begun.add(one.ref())
                left += missing
            else:
                self._make(one)
        return self._made[tensor.ref()]

    def entries_of(self, sizes: tf.Tensor) -> list[int] | None:
        """Return the entries of a vector, or the one of a scalar, where shapes determine them."""
        made = self.of(sizes)
        if made.dtype not in (tf.int32, tf.int64) or made.shape.rank is None:
            return None
        with self._graph.as_default():
            try:
                shape = tf.zeros(tf.reshape(made, [-1])).shape
            except ValueError:  # negative
                return None
        return None if shape.rank is None or None in shape.as_list() else shape.as_list()

    def _make(self, tensor: tf.Tensor) -> None:
        """Make all outputs of a tensor's op; where that fails, with the shapes known before."""
        outputs = tensor.op.outputs
        with self._graph.as_default():
            try:
                made = self._again(tensor.op)
            except _NOT_MADE:
                made = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in outputs]
        self._made |= {t.ref(): one for t, one in zip(outputs, made, strict=True)}

    def _again(self, op: tf.Operation) -> Sequence[tf.Tensor]:
        output = op.outputs[0]
        outer = captured(output) if op.type == "Placeholder" else None
        if outer is not None:
            return [self._made[outer.ref()]]
        inputs = [self._made[one.ref()] for one in _sources(output)]
        if op.type in _DATA:  # data is cut by rows, along its first axis
            if self._inside is not None and op.graph is not self._inside:
                raise ValueError("the input of another function")
            return [self._with_rows(t, True, _ENTRIES) for t in op.outputs]
        if op.type in _CHOOSING:
            of_rows = not self._exact and self._has_rows(inputs[0])
            return [self._with_rows(t, of_rows) for t in op.outputs]
        if op.type == "RaggedTensorToTensor":
            return [self._with_rows(output, self._has_rows(inputs[1]))]
        if op.type in ("LookupTableFind", "LookupTableFindV2"):
            return [tf.compat.v1.placeholder(output.dtype, inputs[0].shape)]
        if op.type == "ResourceGather":
            behind = output.shape[op.inputs[1].shape.rank :]
            return [tf.compat.v1.placeholder(output.dtype, inputs[0].shape.concatenate(behind))]
        attributes = {k: v for k, v in op.node_def.attr.items() if not k.startswith("_")}
        kinds = [t.dtype for t in op.outputs]
        made = self._graph.create_op(op.type, inputs, kinds, attrs=attributes, op_def=op.op_def)
        if op.type == "Range" and self._has_rows(made.outputs[0]):
            raise ValueError("as many as there are rows, and not one for each")
        return made.outputs

    def _with_rows(self, like: tf.Tensor, of_rows: bool, others: int | None = None) -> tf.Tensor:
        """Make a tensor whose first axis has rows; `others` is the size of axes of unknown size."""
        sizes = None if like.shape.rank is None else [n or others for n in like.shape]
        if sizes:
            sizes[0] = self._rows if of_rows else None
        return tf.compat.v1.placeholder(like.dtype, sizes)

    def _has_rows(self, made: tf.Tensor) -> bool:
        return any(n and n % self._rows == 0 for n in made.shape)


def _sources(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors that decide the shape of one: inputs, or what a placeholder captures."""
    if tensor.op.type == "Placeholder":
        outer = captured(tensor)
        return [outer] if hasattr(outer, "graph") else []
    return [one for one in tensor.op.inputs if one.dtype not in (tf.resource, tf.variant)]


def captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """Return the tensor outside a function that a placeholder in it captures, if any."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def _is_assigned(handle: tf.Tensor) -> bool:
    """Return whether this graph assigns to a variable, such as the state of a random generator."""
    return any(op.type.startswith("Assign") for op in handle.consumers())
