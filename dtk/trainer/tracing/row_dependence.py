"""Find the tensors of a step's graph that are equal on all replicas, or have entries for each row.

Tensors computed from constants, weights and sizes other than the number of rows are equal on all
replicas. Sizes are followed through the operations listed at the end; for other operations only
static shapes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

import tensorflow as tf

# The size of an axis: the same on all replicas, a multiple of the batch's rows, or unknown.
EQUAL, OF_ROWS, UNKNOWN = "equal", "of rows", "unknown"
# One for each axis; None where the number of axes is unknown.
Sizes: TypeAlias = "list[str] | None"

# How many operations to follow a size through; each takes a few levels of Python's stack.
_DEEPEST = 100


class RowDependence:
    """Values and sizes of tensors in a step's graph."""

    def __init__(self, inside: tf.Graph | None):
        self.inside = inside
        self._equal: dict[Hashable, bool] = {}
        self._sizes: dict[Hashable, Sizes] = {}
        self._depth = 0

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
            entries = self._taken(op)
            if entries is not None:
                return [] if set(entries) <= {EQUAL} else None
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
        if tensor.ref() not in self._sizes:
            self._sizes[tensor.ref()] = None  # unknown while a cycle in the graph leads back here
            self._depth += 1
            if self._depth < _DEEPEST:
                self._sizes[tensor.ref()] = self._find_sizes(tensor)
            self._depth -= 1
        return self._sizes[tensor.ref()]

    def _find_sizes(self, tensor: tf.Tensor) -> Sizes:
        rank = tensor.shape.rank
        if rank is None:
            return None
        found = _RULES.get(tensor.op.type, _nothing)(self, tensor)
        if found is None or len(found) != rank:
            found = [UNKNOWN] * rank
        return [
            EQUAL if size is not None and said == UNKNOWN else said
            for size, said in zip(tensor.shape, found, strict=True)
        ]

    def entry_sizes(self, vector: tf.Tensor) -> Sizes:
        """Return the kinds of the entries of a vector of sizes."""
        op = vector.op
        if vector.shape.rank != 1 or vector.shape[0] is None:
            return None
        if op.type in ("Identity", "Cast"):
            return self.entry_sizes(op.inputs[0])
        if op.type == "Shape":
            return self.sizes(op.inputs[0])
        if op.type == "Pack":
            return [self._scalar(one) for one in op.inputs]
        if op.type == "ConcatV2":
            parts = [self.entry_sizes(one) for one in op.inputs[:-1]]
            return None if None in parts else [size for part in parts for size in part or ()]
        if op.type == "StridedSlice" and op.inputs[0].shape.rank == 1:
            return self._taken(op)
        return [EQUAL if self.is_equal(vector) else UNKNOWN] * vector.shape[0]

    def _scalar(self, size: tf.Tensor) -> str:
        """Return the kind of one size."""
        while size.op.type in ("Identity", "Cast"):
            size = size.op.inputs[0]
        if size.op.type == "StridedSlice" and size.op.inputs[0].shape.rank == 1:
            taken = self._taken(size.op)
            if taken:
                return taken[0]
        if size.op.type == "Mul":
            return _product([self._scalar(one) for one in size.op.inputs])
        return EQUAL if self.is_equal(size) else UNKNOWN

    def _taken(self, op: tf.Operation) -> Sizes:
        """Return the entries of a vector of sizes that a slice takes."""
        entries = self.entry_sizes(op.inputs[0])
        bounds = [tf.get_static_value(one) for one in op.inputs[1:]]
        if entries is None or any(b is None or len(b) != 1 for b in bounds):
            return None
        begin, end, step = (int(b[0]) for b in bounds)
        if op.get_attr("shrink_axis_mask"):
            return [entries[begin]] if -len(entries) <= begin < len(entries) else None
        first = None if op.get_attr("begin_mask") else begin
        last = None if op.get_attr("end_mask") else end
        return entries[first:last:step]


def _product(sizes: Sequence[str]) -> str:
    if set(sizes) <= {EQUAL}:
        return EQUAL
    return UNKNOWN if UNKNOWN in sizes else OF_ROWS


def captured(placeholder: tf.Tensor) -> tf.Tensor | None:
    """Return the tensor outside a function that a placeholder in it captures, if any."""
    captures = getattr(placeholder.graph, "captures", ())
    return next((outer for outer, inner in captures if inner is placeholder), None)


def _is_assigned(handle: tf.Tensor) -> bool:
    """Return whether this graph assigns to a variable, such as the state of a random generator."""
    return any(op.type.startswith("Assign") for op in handle.consumers())


def _number(tensor: tf.Tensor) -> int | None:
    value = tf.get_static_value(tensor)
    return None if value is None or value.ndim else int(value)


# Rules: the sizes of an operation's output from the sizes of its inputs.


def _nothing(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    del known, tensor
    return None


def _of_data(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Data is cut by rows, along its first axis."""
    if tensor.op.type == "Placeholder":
        outer = captured(tensor)
        if outer is not None:
            return known.sizes(outer) if hasattr(outer, "graph") else None
        if known.inside is not None and tensor.graph is not known.inside:
            return None
    rank = tensor.shape.rank
    return [OF_ROWS] * (rank > 0) + [EQUAL] * (rank - 1)


def _as_given(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Return the sizes of the inputs, aligned and broadcast."""
    given = [known.sizes(one) for one in tensor.op.inputs]
    rank = tensor.shape.rank
    aligned: list[list[str]] = []
    for sizes, one in zip(given, tensor.op.inputs, strict=True):
        if one.dtype == tf.resource:
            continue
        if sizes is None:
            return None
        # An axis of one entry is broadcast: the other input decides.
        own = ["" if n == 1 else s for n, s in zip(one.shape, sizes, strict=True)]
        aligned.append([""] * (rank - len(own)) + own)
    return [_agreed(column) for column in zip(*aligned, strict=True)]


def _agreed(column: Sequence[str]) -> str:
    said = {size for size in column if size}
    if OF_ROWS in said:
        return OF_ROWS
    return EQUAL if said <= {EQUAL} else UNKNOWN


def _of_values(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Return the sizes of the second input, such as the keys of a table lookup."""
    return known.sizes(tensor.op.inputs[1])


def _of_first(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    return known.sizes(tensor.op.inputs[0])


def _gathered(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    params, indices = tensor.op.inputs[:2]
    if tensor.op.type == "GatherV2":
        if _number(tensor.op.inputs[2]) != 0 or tensor.op.get_attr("batch_dims"):
            return None
        behind = known.sizes(params)
    else:
        behind = [EQUAL] * (tensor.shape.rank - (indices.shape.rank or 0) + 1)
    first = known.sizes(indices)
    return None if first is None or behind is None else [*first, *behind[1:]]


def _expanded(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    sizes, axis = known.sizes(tensor.op.inputs[0]), _number(tensor.op.inputs[1])
    if sizes is None or axis is None:
        return None
    axis = axis + len(sizes) + 1 if axis < 0 else axis
    return [*sizes[:axis], EQUAL, *sizes[axis:]]


def _squeezed(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    sizes = known.sizes(tensor.op.inputs[0])
    axes = tensor.op.get_attr("squeeze_dims")
    if sizes is None or not axes:
        return None
    gone = {axis % len(sizes) for axis in axes}
    return [size for axis, size in enumerate(sizes) if axis not in gone]


def _joined(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    axis = _number(tensor.op.inputs[-1])
    given = [known.sizes(one) for one in tensor.op.inputs[:-1]]
    if axis is None or None in given:
        return None
    sizes = [_agreed(column) for column in zip(*(g or [] for g in given), strict=True)]
    along = {(g or [])[axis] for g in given}
    # The joined axis is of rows only if it is of rows in all inputs.
    sizes[axis] = along.pop() if len(along) == 1 else UNKNOWN
    return sizes


def _packed(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    given = [known.sizes(one) for one in tensor.op.inputs]
    if None in given:
        return None
    sizes = [_agreed(column) for column in zip(*(g or [] for g in given), strict=True)]
    axis = tensor.op.get_attr("axis") % (len(sizes) + 1)
    return [*sizes[:axis], EQUAL, *sizes[axis:]]


def _sliced(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Keep the size of an axis that is `EQUAL` or taken whole; any other is unknown."""
    op = tensor.op
    sizes = known.sizes(op.inputs[0])
    bounds = [tf.get_static_value(one) for one in op.inputs[1:]]
    masks = {name: op.get_attr(f"{name}_mask") for name in _MASKS}
    if sizes is None or any(b is None for b in bounds) or masks["ellipsis"] or masks["new_axis"]:
        return None
    found = []
    for axis, size in enumerate(sizes):
        bit, given = 1 << axis, axis < len(bounds[0])
        if given and masks["shrink_axis"] & bit:
            continue
        whole = not given or (
            masks["begin"] & bit and masks["end"] & bit and abs(bounds[2][axis]) == 1
        )
        found.append(size if whole or size == EQUAL else UNKNOWN)
    return found


_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def _given(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Read the sizes from the first input (Fill) or the second (Reshape, BroadcastTo)."""
    wanted = tensor.op.inputs[0 if tensor.op.type == "Fill" else 1]
    sizes = known.entry_sizes(wanted)
    if tensor.op.type != "Reshape" or sizes is None:
        return sizes
    static = tf.get_static_value(wanted, partial=True)
    if static is None:
        return None
    rest = [i for i, n in enumerate(static) if n == -1]
    before = known.sizes(tensor.op.inputs[0])
    if len(rest) == 1:
        others = _product([s for i, s in enumerate(sizes) if i not in rest])
        whole = UNKNOWN if before is None else _product(before)
        # The axis given as -1 has the rows, unless another axis may have them.
        sizes[rest[0]] = UNKNOWN if others != EQUAL else whole
    return sizes


def _tiled(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    sizes, times = (
        known.sizes(tensor.op.inputs[0]),
        known.entry_sizes(tensor.op.inputs[1]),
    )
    if sizes is None or times is None:
        return None
    return [_product(pair) for pair in zip(sizes, times, strict=True)]


def _transposed(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    sizes, order = known.sizes(tensor.op.inputs[0]), tf.get_static_value(tensor.op.inputs[1])
    return None if sizes is None or order is None else [sizes[axis] for axis in order]


def _ranged(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    return [EQUAL if all(map(known.is_equal, tensor.op.inputs)) else UNKNOWN]


def _chosen(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Return sizes of chosen entries, some for each row."""
    sizes = known.sizes(tensor.op.inputs[0])
    of_rows = sizes is not None and OF_ROWS in sizes
    return [OF_ROWS if of_rows else UNKNOWN] + [EQUAL] * (tensor.shape.rank - 1)


def _padded(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Return sizes of padded rows; the longest row decides the other axes."""
    values = known.sizes(tensor.op.inputs[1])
    of_rows = values is not None and values[0] == OF_ROWS
    return [OF_ROWS if of_rows else UNKNOWN] + [UNKNOWN] * (tensor.shape.rank - 1)


def _reduced(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    op, sizes = tensor.op, known.sizes(tensor.op.inputs[0])
    axes = tf.get_static_value(op.inputs[1])
    if sizes is None or axes is None:
        return None
    gone = {int(axis) % len(sizes) for axis in axes.ravel()}
    if "keep_dims" in op.node_def.attr and op.get_attr("keep_dims"):
        return [EQUAL if axis in gone else size for axis, size in enumerate(sizes)]
    return [size for axis, size in enumerate(sizes) if axis not in gone]


def _multiplied(known: RowDependence, tensor: tf.Tensor) -> Sizes:
    """Return sizes of a matrix product without transposition."""
    left, right = (known.sizes(one) for one in tensor.op.inputs[:2])
    flags = [name for name in tensor.op.node_def.attr if name.startswith(("transpose_", "adj_"))]
    if left is None or not right or any(tensor.op.get_attr(name) for name in flags):
        return None
    return [*left[:-1], right[-1]]


_DATA = ("Placeholder", "PlaceholderWithDefault", "IteratorGetNext", "OptionalGetValue")

# fmt: off
_ELEMENTWISE = (
    "Abs", "Add", "AddV2", "AsString", "BitwiseAnd", "BitwiseOr", "Bucketize", "Cast", "Ceil",
    "CheckNumerics", "ClipByValue", "Elu", "EnsureShape", "Equal", "Erf", "Exp", "Floor",
    "FloorDiv", "FloorMod", "Gelu", "Greater", "GreaterEqual", "Identity", "IsNan", "Less",
    "LessEqual", "Log", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod",
    "Mul", "Neg", "NotEqual", "OnesLike", "Pow", "RealDiv", "Relu", "Rint", "Round", "Rsqrt",
    "Select", "SelectV2", "Sigmoid", "Sign", "Snapshot", "Softmax", "Softplus", "Sqrt",
    "Square", "SquaredDifference", "StopGradient", "StringLower", "StringStrip",
    "StringToHashBucketFast", "StringToHashBucketStrong", "StringToNumber", "StringUpper",
    "Sub", "Tanh", "ZerosLike",
)
# fmt: on

_RULES: dict[str, Callable[[RowDependence, tf.Tensor], Sizes]] = {
    **dict.fromkeys(_DATA, _of_data),
    **dict.fromkeys(_ELEMENTWISE, _as_given),
    **dict.fromkeys(("LookupTableFind", "LookupTableFindV2"), _of_values),
    **dict.fromkeys(("BiasAdd", "Cumsum", "Reverse", "ReverseV2", "StaticRegexReplace"), _of_first),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _gathered),
    **dict.fromkeys(("Fill", "Reshape", "BroadcastTo"), _given),
    **dict.fromkeys(("DynamicPartition", "StringSplitV2", "Where"), _chosen),
    **dict.fromkeys(("ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"), _reduced),
    **dict.fromkeys(("MatMul", "BatchMatMulV2"), _multiplied),
    "ConcatV2": _joined,
    "ExpandDims": _expanded,
    "Pack": _packed,
    "RaggedTensorToTensor": _padded,
    "Range": _ranged,
    "Squeeze": _squeezed,
    "StridedSlice": _sliced,
    "Tile": _tiled,
    "Transpose": _transposed,
}
