"""Gradient buffers: how gradients get from workers to parameter servers.

A worker does not touch weights. It puts its gradients into a *gradient buffer*, a few variables on
the servers. When the chief decides that a step is complete, the servers apply the gradient buffers
of that step. So a worker that dies while sending has changed nothing, another worker can take its
step, and every gradient is applied exactly once.

    worker  --- push --->  buffer on ps 0 | buffer on ps 1       (one message per server, dtype)
    chief   --- apply -->  optimizer runs on ps 0 | on ps 1      (weights never pass the chief)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_variables
from dtk.nests import Array, Specs
from dtk.parameter_server import functional_step
from dtk.trainer.tracing import lookups

# A structure of numbers: tensors while a step is traced, arrays when it has run.
ReportT = TypeVar("ReportT")

# A Keras variable, or a part of one that is partitioned over servers.
Weight: TypeAlias = keras.Variable | keras_variables.VariablePart
# None if a weight has no gradient.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


@dataclasses.dataclass(frozen=True)
class BufferSlot:
    """Variable of a gradient buffer."""

    device: str  # server of the slot
    dtype: tf.DType  # dtype of the elements
    holds: tuple[int, ...]  # indices of the weights; the slot holds their gradients in this order
    indices: bool = False  # whether the slot holds row numbers; the next slot then holds the rows


class BufferLayout:
    """Layout of a gradient buffer: the slots and their gradients."""

    def __init__(self, weights: Sequence[Weight], sparse: set[int]):
        self.weights = list(weights)
        self.tagged: set[int] = set()
        self.devices = [keras_variables.stored(weight).device for weight in self.weights]
        dense: dict[tuple[str, tf.DType], list[int]] = {}
        rows: list[BufferSlot] = []
        for index, weight in enumerate(self.weights):
            device, dtype = self.devices[index], keras_variables.stored(weight).dtype
            if id(weight) in sparse:
                rows.append(BufferSlot(device, tf.int64, (index,), indices=True))
                rows.append(BufferSlot(device, dtype, (index,)))
            else:
                dense.setdefault((device, dtype), []).append(index)
        self.dense = [
            BufferSlot(device, dtype, tuple(held)) for (device, dtype), held in dense.items()
        ]
        self.rows = rows
        self.slots = [*self.dense, *rows]

    def contents(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        """Return the contents of a buffer's slots for some gradients; called while tracing."""
        return [self._content(slot, gradients) for slot in [*self.dense, *self.rows]]

    def compress(
        self, contents: Sequence[tf.Tensor], rate: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the contents to send and the rest to keep, here nothing; called while tracing."""
        del rate
        return list(contents), self.zeros()

    def put(self, contents: Sequence[tf.Tensor], handles: Sequence[tf.Tensor]) -> tf.Tensor:
        """Write into a gradient buffer and return the bytes; traced, runs on a worker."""
        sent = tf.constant(0, tf.int64)
        for content, handle in zip(contents, handles, strict=True):
            tf.raw_ops.AssignVariableOp(resource=_of_any_length(handle), value=content)
            sent += tf.size(content, tf.int64) * content.dtype.size
        return sent

    def add(self, contents: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up two contents; called while tracing."""
        dense = len(self.dense)
        return [a + b for a, b in zip(contents[:dense], more[:dense], strict=True)] + [
            tf.concat([a, b], 0) for a, b in zip(contents[dense:], more[dense:], strict=True)
        ]

    def zeros(self) -> list[tf.Tensor]:
        """Return the contents of a zero gradient; called while tracing."""
        sizes = [sum(self._size(index) for index in slot.holds) for slot in self.dense]
        return [tf.zeros([n], slot.dtype) for n, slot in zip(sizes, self.dense, strict=True)] + [
            tf.zeros([0], slot.dtype) for slot in self.rows
        ]

    def _size(self, index: int) -> int:
        return int(np.prod(tuple(self.weights[index].shape)))

    def _content(self, slot: BufferSlot, gradients: Sequence[Gradient]) -> tf.Tensor:
        if slot in self.rows:
            first = gradients[slot.holds[0]]
            if first is None:
                return tf.zeros([0], slot.dtype)
            sparse = functional_step.as_slices(first)
            if slot.indices:
                return tf.cast(sparse.indices, tf.int64)
            return tf.reshape(tf.cast(sparse.values, slot.dtype), [-1])
        parts = []
        for index in slot.holds:
            gradient, weight = gradients[index], self.weights[index]
            if gradient is None:
                parts.append(tf.zeros([weight.shape.num_elements()], slot.dtype))
            else:
                parts.append(tf.reshape(tf.cast(tf.convert_to_tensor(gradient), slot.dtype), [-1]))
        return tf.concat(parts, 0)

    def take(self, buffers: Sequence[Sequence[tf.Tensor]]) -> list[Gradient]:
        """Sum the gradients in several gradient buffers; traced once, runs on the servers."""
        gradients: list[Gradient] = [None] * len(self.weights)
        row_numbers: list[tf.Tensor] = []
        for slot in self.dense:
            with tf.device(slot.device):
                self._split(slot, tf.add_n(self._read_dense(slot, buffers)), gradients)
        for slot in self.rows:
            with tf.device(slot.device):
                content = self._read(slot, buffers)
                if slot.indices:
                    row_numbers = content
                else:
                    gradients[slot.holds[0]] = self._rows(slot.holds[0], content, row_numbers)
        return gradients

    def _rows(
        self, index: int, contents: Sequence[tf.Tensor], row_numbers: Sequence[tf.Tensor]
    ) -> tf.IndexedSlices:
        """Put the rows of several gradient buffers together."""
        shape = tuple(self.weights[index].shape)
        rows = [tf.reshape(content, (-1, *shape[1:])) for content in contents]
        if id(self.weights[index]) not in self.tagged:
            return functional_step.rows_of(tf.concat(rows, 0), tf.concat(row_numbers, 0), shape)
        pairs = zip(rows, row_numbers, strict=True)
        found = lookups.sum_of_tagged(
            [functional_step.rows_of(*pair, shape) for pair in pairs], shape[0]
        )
        return functional_step.rows_of(found.values, found.indices, shape)

    def _read(self, slot: BufferSlot, buffers: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        number = next(n for n, other in enumerate(self.slots) if other is slot)
        found = [
            tf.raw_ops.ReadVariableOp(resource=_of_any_length(handles[number]), dtype=slot.dtype)
            for handles in buffers
        ]
        # A handle without a length has no rank either. Contents are flat; say so, since optimizers
        # need the rank of rows that they gather by row numbers.
        return [tf.ensure_shape(flat, [None]) for flat in found]

    def _read_dense(
        self, slot: BufferSlot, buffers: Sequence[Sequence[tf.Tensor]]
    ) -> list[tf.Tensor]:
        return self._read(slot, buffers)

    def _split(self, slot: BufferSlot, flat: tf.Tensor, gradients: list[Gradient]) -> None:
        shapes = [tuple(self.weights[index].shape) for index in slot.holds]
        sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
        for index, shape, part in zip(slot.holds, shapes, tf.split(flat, sizes), strict=True):
            gradients[index] = tf.reshape(part, shape)


class GradientBuffer:
    """Buffer on the servers for the gradients of one task."""

    def __init__(self, layout: BufferLayout):
        self._variables = []
        for slot in layout.slots:
            with tf.device(slot.device):
                # Declared empty; the contents have any length.
                self._variables.append(tf.Variable(tf.zeros([0], slot.dtype), trainable=False))
        self.handles = [variable.handle for variable in self._variables]


def _of_any_length(handle: tf.Tensor) -> tf.Tensor:
    """Return a gradient buffer's handle without the declared length of 0.

    Graph optimization would take the length for true, and compute sizes from it.
    """
    return tf.raw_ops.PlaceholderWithDefault(input=handle, shape=[])


def parts_of(variable: keras.Variable, known: dict[int, list[Weight]]) -> list[Weight]:
    """Return the parts of a Keras variable; the variable alone if it is not partitioned."""
    shards = keras_variables.shards_of(keras_variables.stored(variable))
    if shards is None:
        return [variable]
    if id(variable) not in known:
        known[id(variable)] = [
            keras_variables.VariablePart(variable, index) for index in range(len(shards))
        ]
    return known[id(variable)]


def split_gradient(gradient: Gradient, variable: keras.Variable) -> list[Gradient]:
    """Split a variable's gradient into one per part."""
    shards = keras_variables.shards_of(keras_variables.stored(variable))
    if shards is None or gradient is None:
        return [gradient] * (len(shards) if shards else 1)
    sizes = [shard.shape[0] for shard in shards]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, sizes)
    split, first = [], 0
    # Tags of rows stay valid in the parts.
    indices = tf.cast(gradient.indices, tf.int64)
    lines, tags = indices % sum(sizes), indices // sum(sizes)
    for shard, size in zip(shards, sizes, strict=True):
        mine = (lines >= first) & (lines < first + size)
        rows = tf.boolean_mask(gradient.values, mine)
        numbers = tf.boolean_mask(lines - first + tags * size, mine)
        split.append(functional_step.rows_of(rows, numbers, shard.shape))
        first += size
    return split


def near_inputs(op: tf.Operation) -> str:
    """Return the device of an operation; if it has none, of its first input on a server.

    Clipping, loss scaling and the like name no device, and must not pull gradients to the chief.
    This is a device function for `tf.compat.v1.device`.
    """
    if op.device:
        return op.device
    for tensor in op.inputs:
        if "/job:ps" in tensor.device:
            return tensor.device
    return ""


def pull(variables: Iterable[keras.Variable]) -> tuple[list[tuple[keras.Variable, tf.Tensor]], int]:
    """Read variables once from their servers, with the bytes; traced, runs on a worker."""
    pairs = [
        (variable, tf.convert_to_tensor(keras_variables.stored(variable))) for variable in variables
    ]
    read = sum(value.shape.num_elements() * value.dtype.size for _, value in pairs)
    return [(variable, tf.identity(value)) for variable, value in pairs], read


class PackedResults(Generic[ReportT]):
    """Small results of a step in one tensor: fetching a tensor from a worker takes a message."""

    def __init__(self, results: ReportT):
        flat = [tf.convert_to_tensor(result) for result in tf.nest.flatten(results)]
        self._structure = results
        self._kinds = [(tuple(t.shape), t.dtype.as_numpy_dtype) for t in flat]
        parts = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat]
        self.tensor = tf.concat([*parts, tf.zeros([0], tf.float64)], 0)

    def read(self, numbers: Array) -> ReportT:
        """Return the results of a step that has run."""
        results: list[Array] = []
        first = 0
        for shape, dtype in self._kinds:
            last = first + math.prod(shape)
            results.append(numbers[first:last].reshape(shape).astype(dtype))
            first = last
        return tf.nest.pack_sequence_as(self._structure, results)


def key_of(spec: Specs) -> str:
    """Return a specification as a dictionary key."""
    return str(spec)
