"""How gradients get from workers to parameter servers.

A worker does not touch weights. It puts its gradients into a *mailbox*, a few variables on the
servers, and when the chief decides that a step is complete, the servers apply what lies in the
mailboxes of that step. So a worker that dies while sending has changed nothing, its step can be
given to another, and every gradient is applied exactly once.

    worker  --- push --->  mailbox on ps 0 | mailbox on ps 1     (one message per server, dtype)
    chief   --- apply -->  optimizer runs on ps 0 | on ps 1      (weights never pass the chief)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from dtk.strategies import adopt, extended


@dataclasses.dataclass(frozen=True)
class Slot:
    """One variable of a mailbox.

    Attributes:
        device: The server it is on.
        dtype: Of its elements.
        holds: Indices of the weights whose gradients lie in it, one after the other.
        indices: Whether it holds row numbers, whose rows lie in the next slot.
    """

    device: str
    dtype: tf.DType
    holds: tuple[int, ...]
    indices: bool = False


class Layout:
    """Which gradient lies where in a mailbox.

    Args:
        weights: Keras variables, none partitioned (see `adopt.Part`).
        sparse: Ids of those whose gradients are rows.
    """

    def __init__(self, weights: Sequence, sparse: set[int]):
        self.weights = list(weights)
        self.devices = [weight._value.device for weight in self.weights]
        dense: dict[tuple, list[int]] = {}
        rows: list[Slot] = []
        for index, weight in enumerate(self.weights):
            device, dtype = self.devices[index], weight._value.dtype
            if id(weight) in sparse:
                rows.append(Slot(device, tf.int64, (index,), indices=True))
                rows.append(Slot(device, dtype, (index,)))
            else:
                dense.setdefault((device, dtype), []).append(index)
        self.slots = [
            Slot(device, dtype, tuple(held)) for (device, dtype), held in dense.items()
        ] + rows

    def put(self, gradients: Sequence, handles: Sequence[tf.Tensor]) -> tf.Tensor:
        """Write gradients into a mailbox; traced on a worker.

        Args:
            gradients: One per weight; None where there is none.
            handles: Resource handles of the mailbox's slots.

        Returns:
            Bytes sent, an int64 scalar.
        """
        sent = tf.constant(0, tf.int64)
        for slot, handle in zip(self.slots, handles, strict=True):
            content = self._content(slot, gradients)
            tf.raw_ops.AssignVariableOp(resource=handle, value=content)
            sent += tf.size(content, tf.int64) * slot.dtype.size
        return sent

    def _content(self, slot: Slot, gradients: Sequence) -> tf.Tensor:
        first = gradients[slot.holds[0]]
        if slot.indices:
            if first is None:
                return tf.zeros([0], tf.int64)
            return tf.cast(adopt.as_slices(first).indices, tf.int64)
        if len(slot.holds) == 1 and isinstance(first, tf.IndexedSlices):
            return tf.reshape(first.values, [-1])
        parts = []
        for index in slot.holds:
            gradient, weight = gradients[index], self.weights[index]
            if gradient is None:
                parts.append(tf.zeros([weight.shape.num_elements()], slot.dtype))
            else:
                parts.append(tf.reshape(tf.cast(tf.convert_to_tensor(gradient), slot.dtype), [-1]))
        return tf.concat(parts, 0)

    def take(self, mailboxes: Sequence[Sequence[tf.Tensor]]) -> list:
        """The sum of the gradients in several mailboxes; traced once, runs on the servers.

        Args:
            mailboxes: Resource handles of each mailbox's slots.

        Returns:
            One gradient per weight, a tensor or `IndexedSlices`, each on its weight's server.
        """
        gradients: list = [None] * len(self.weights)
        row_numbers: tf.Tensor | None = None
        for number, slot in enumerate(self.slots):
            with tf.device(slot.device):
                contents = [
                    tf.raw_ops.ReadVariableOp(resource=handles[number], dtype=slot.dtype)
                    for handles in mailboxes
                ]
                if slot.indices:
                    row_numbers = tf.concat(contents, 0)
                elif row_numbers is not None:
                    index = slot.holds[0]
                    shape = tuple(self.weights[index].shape)
                    rows = tf.reshape(tf.concat(contents, 0), (-1, *shape[1:]))
                    gradients[index] = tf.IndexedSlices(rows, row_numbers, shape)
                    row_numbers = None
                else:
                    self._split(slot, tf.add_n(contents), gradients)
        return gradients

    def _split(self, slot: Slot, flat: tf.Tensor, gradients: list) -> None:
        shapes = [tuple(self.weights[index].shape) for index in slot.holds]
        sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
        for index, shape, part in zip(slot.holds, shapes, tf.split(flat, sizes), strict=True):
            gradients[index] = tf.reshape(part, shape)


class Mailbox:
    """Where one piece of work leaves its gradients.

    Args:
        layout: What it holds.
    """

    def __init__(self, layout: Layout):
        self._variables = []
        for slot in layout.slots:
            with tf.device(slot.device):
                # Declared empty: its content has any length.
                self._variables.append(tf.Variable(tf.zeros([0], slot.dtype), trainable=False))
        self.handles = [variable.handle for variable in self._variables]


def parts_of(variable: Any, known: dict[int, list]) -> list:
    """A Keras variable in a list, or its parts where it is partitioned.

    Args:
        variable: The variable.
        known: Remembers the parts made so far, by id.
    """
    shards = extended.shards_of(variable._value)
    if shards is None:
        return [variable]
    if id(variable) not in known:
        known[id(variable)] = [adopt.Part(variable, index) for index in range(len(shards))]
    return known[id(variable)]


def split_gradient(gradient: Any, variable: Any) -> list:
    """A variable's gradient, as one per part."""
    shards = extended.shards_of(variable._value)
    if shards is None or gradient is None:
        return [gradient] * (len(shards) if shards else 1)
    sizes = [shard.shape[0] for shard in shards]
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.split(gradient, sizes)
    split, first = [], 0
    indices = tf.cast(gradient.indices, tf.int64)
    for shard, size in zip(shards, sizes, strict=True):
        mine = (indices >= first) & (indices < first + size)
        rows = tf.boolean_mask(gradient.values, mine)
        split.append(
            tf.IndexedSlices(rows, tf.boolean_mask(indices, mine) - first, tuple(shard.shape))
        )
        first += size
    return split


def near_inputs(op: Any) -> str:
    """Device function: compute where the first input from a server is.

    Clipping, loss scaling and the like name no device. They shall not pull gradients to the chief.
    """
    if op.device:
        return op.device
    for tensor in op.inputs:
        if "/job:ps" in tensor.device:
            return tensor.device
    return ""


def pull(variables: Iterable) -> tuple[list[tuple[Any, tf.Tensor]], int]:
    """Read variables from their servers, once; traced on a worker.

    Returns:
        (Keras variable, its value) pairs, and the bytes read.
    """
    pairs = [(variable, tf.convert_to_tensor(variable._value)) for variable in variables]
    read = sum(value.shape.num_elements() * value.dtype.size for _, value in pairs)
    return [(variable, tf.identity(value)) for variable, value in pairs], read


class Report:
    """Small results of a step as one tensor: each tensor fetched from a worker is a message.

    Args:
        results: A structure of numbers, traced; all fit into float64 exactly or are float64.
    """

    def __init__(self, results: Any):
        flat = [tf.convert_to_tensor(result) for result in tf.nest.flatten(results)]
        self._structure = results
        self._kinds = [(tuple(t.shape), t.dtype.as_numpy_dtype) for t in flat]
        parts = [tf.reshape(tf.cast(t, tf.float64), [-1]) for t in flat]
        self.tensor = tf.concat([*parts, tf.zeros([0], tf.float64)], 0)

    def read(self, numbers: np.ndarray) -> Any:
        """The structure again, of arrays."""
        results, first = [], 0
        for shape, dtype in self._kinds:
            last = first + math.prod(shape)
            results.append(numbers[first:last].reshape(shape).astype(dtype))
            first = last
        return tf.nest.pack_sequence_as(self._structure, results)


def spec_of(data: Any) -> Any:
    """Specification of batches like this one, with any number of rows.

    Args:
        data: A structure of tensors, or of their specifications.
    """
    return tf.nest.map_structure(_without_rows, data)


def _without_rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor | tf.RaggedTensorSpec):
        splits = leaf.row_splits_dtype if isinstance(leaf, tf.RaggedTensorSpec) else None
        splits = splits or leaf.row_splits.dtype
        return tf.RaggedTensorSpec([None, *leaf.shape[1:]], leaf.dtype, leaf.ragged_rank, splits)
    if isinstance(leaf, tf.SparseTensor | tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    if isinstance(leaf, tf.Tensor | tf.TensorSpec):
        return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    return leaf


def key_of(spec: Any) -> Any:
    """A specification as a dictionary key."""
    return str(spec)
