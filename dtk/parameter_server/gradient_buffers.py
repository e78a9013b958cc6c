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
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.aligned_slices import concatenated
from dtk.compat import keras_models, keras_optimizers, keras_variables, tf_replicas
from dtk.errors import NotDistributedError
from dtk.exchange import Downpour, codec, quantized
from dtk.nests import Array
from dtk.parameter_server import functional_step, served_optimizer
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.job_context import JobTrainer, Weight
from dtk.trainer.tracing import lookups, traced_step

# None if a weight has no gradient.
Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
# The handles of a buffer's variables.
Handles: TypeAlias = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class BufferSlot:
    """Variable of a gradient buffer."""

    device: str  # server of the slot
    dtype: tf.DType  # dtype of the elements
    holds: tuple[int, ...]  # indices of the weights; the slot holds their gradients in this order


class BufferLayout:
    """Layout of a gradient buffer: the slots and their gradients."""

    def __init__(self, weights: Sequence[Weight], sparse: set[int]):
        self.weights = list(weights)
        self.tagged: set[int] = set()
        self._shapes = [tuple(weight.shape) for weight in self.weights]
        dense: dict[tuple[str, tf.DType], list[int]] = {}
        # Of each table: the numbers of rows, and the rows.
        self._tables: list[tuple[BufferSlot, BufferSlot]] = []
        for index, weight in enumerate(self.weights):
            stored = keras_variables.stored(weight)
            device, dtype = stored.device, stored.dtype
            if id(weight) in sparse:
                numbers = BufferSlot(device, tf.int64, (index,))
                self._tables.append((numbers, BufferSlot(device, dtype, (index,))))
            else:
                dense.setdefault((device, dtype), []).append(index)
        self.dense = [
            BufferSlot(device, dtype, tuple(held)) for (device, dtype), held in dense.items()
        ]
        self.rows = [slot for table in self._tables for slot in table]
        self.slots = [*self.dense, *self.rows]

    # On a worker, while a step is traced.

    def contents(self, gradients: Sequence[Gradient]) -> list[tf.Tensor]:
        """Return the contents of the slots for some gradients."""
        dense = [[self._flat(i, gradients[i], slot) for i in slot.holds] for slot in self.dense]
        tables = [_rows_for(gradients[rows.holds[0]], rows.dtype) for _, rows in self._tables]
        return [*(tf.concat(parts, 0) for parts in dense), *(part for t in tables for part in t)]

    def _flat(self, index: int, gradient: Gradient, slot: BufferSlot) -> tf.Tensor:
        if gradient is None:
            return tf.zeros([self._size(index)], slot.dtype)
        return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), slot.dtype), [-1])

    def compress(
        self, contents: Sequence[tf.Tensor], rate: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the contents to send and the rest for the worker to keep, here nothing."""
        del rate
        return list(contents), self.zeros()

    def put(self, contents: Sequence[tf.Tensor], handles: Handles) -> tf.Tensor:
        """Write into a gradient buffer and return the bytes."""
        sent = tf.constant(0, tf.int64)
        for content, handle in zip(contents, handles, strict=True):
            tf.raw_ops.AssignVariableOp(resource=_of_any_length(handle), value=content)
            sent += tf.size(content, tf.int64) * content.dtype.size
        return sent

    def add(self, contents: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Add up two contents."""
        dense = len(self.dense)
        return [a + b for a, b in zip(contents[:dense], more[:dense], strict=True)] + [
            tf.concat([a, b], 0) for a, b in zip(contents[dense:], more[dense:], strict=True)
        ]

    def zeros(self) -> list[tf.Tensor]:
        """Return the contents of a zero gradient."""
        return [tf.zeros([sum(map(self._size, slot.holds))], slot.dtype) for slot in self.dense] + [
            tf.zeros([0], slot.dtype) for slot in self.rows
        ]

    def _size(self, index: int) -> int:
        return int(np.prod(self._shapes[index]))

    # On the servers; traced once.

    def take(self, buffers: Sequence[Handles]) -> list[Gradient]:
        """Sum the gradients in several gradient buffers."""
        gradients: list[Gradient] = [None] * len(self.weights)
        for slot in self.dense:
            with tf.device(slot.device):
                flat = tf.add_n(self._read_dense(slot, buffers))
                for index, part in zip(slot.holds, self._cut(slot, flat), strict=True):
                    gradients[index] = tf.reshape(part, self._shapes[index])
        for numbers, rows in self._tables:
            (index,) = rows.holds
            with tf.device(rows.device):
                read = self._read(rows, buffers), self._read(numbers, buffers)
                gradients[index] = self._rows(index, *read)
        return gradients

    def _cut(self, slot: BufferSlot, flat: tf.Tensor) -> list[tf.Tensor]:
        return tf.split(flat, [self._size(index) for index in slot.holds])

    def _rows(
        self, index: int, contents: Sequence[tf.Tensor], row_numbers: Sequence[tf.Tensor]
    ) -> tf.IndexedSlices:
        """Put the rows of several gradient buffers together."""
        shape = self._shapes[index]
        rows = [tf.reshape(content, (-1, *shape[1:])) for content in contents]
        pairs = zip(rows, row_numbers, strict=True)
        parts = [functional_step.rows_of(*pair, shape) for pair in pairs]
        if id(self.weights[index]) in self.tagged:
            return lookups.sum_of_tagged(parts, shape[0])
        return concatenated(parts)

    def _read(self, slot: BufferSlot, buffers: Sequence[Handles]) -> list[tf.Tensor]:
        number = next(n for n, other in enumerate(self.slots) if other is slot)
        contents = [
            tf.raw_ops.ReadVariableOp(resource=_of_any_length(handles[number]), dtype=slot.dtype)
            for handles in buffers
        ]
        # A handle without a length has no rank either. Contents are flat; say so, since optimizers
        # need the rank of rows that they gather by row numbers.
        return [tf.ensure_shape(flat, [None]) for flat in contents]

    def _read_dense(self, slot: BufferSlot, buffers: Sequence[Handles]) -> list[tf.Tensor]:
        return self._read(slot, buffers)


def _rows_for(gradient: Gradient, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the numbers of rows and the rows, flat."""
    if gradient is None:
        return tf.zeros([0], tf.int64), tf.zeros([0], dtype)
    sparse = functional_step.as_slices(gradient)
    return tf.cast(sparse.indices, tf.int64), tf.reshape(tf.cast(sparse.values, dtype), [-1])


class _Compressed(NamedTuple):
    """Contents of a dense slot after compression, all of them flat."""

    sent: tf.Tensor
    beside: tf.Tensor
    kept: tf.Tensor  # of the slot's length


class CompressedLayout(BufferLayout):
    """Layout with a second slot beside each dense one; rows of tables are sent whole."""

    beside_dtype: tf.DType

    def __init__(self, weights: Sequence[Weight], sparse: set[int]):
        super().__init__(weights, sparse)
        self._beside = [BufferSlot(s.device, self.beside_dtype, s.holds) for s in self.dense]
        self.slots = [*self.dense, *self._beside, *self.rows]

    def compress(
        self, contents: Sequence[tf.Tensor], rate: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the contents to send and the rest for the worker to keep."""
        dense, rows = contents[: len(self.dense)], contents[len(self.dense) :]
        encoded = [self.encode(*pair, rate) for pair in zip(self.dense, dense, strict=True)]
        sent = [*(one.sent for one in encoded), *(one.beside for one in encoded), *rows]
        return sent, [*(one.kept for one in encoded), *(row[:0] for row in rows)]

    def _read_dense(self, slot: BufferSlot, buffers: Sequence[Handles]) -> list[tf.Tensor]:
        beside = self._beside[self.dense.index(slot)]
        pairs = zip(self._read(slot, buffers), self._read(beside, buffers), strict=True)
        return [self.decode(slot, *pair) for pair in pairs]

    def encode(self, slot: BufferSlot, flat: tf.Tensor, rate: tf.Tensor) -> _Compressed:
        """Compress the contents of a dense slot."""
        raise NotImplementedError

    def decode(self, slot: BufferSlot, sent: tf.Tensor, beside: tf.Tensor) -> tf.Tensor:
        """Return the contents of a dense slot as `encode` was given them, but for the rest."""
        raise NotImplementedError


class FilteredLayout(CompressedLayout):
    """Layout with a few entries of each slot and their positions, or with all entries."""

    beside_dtype = tf.int32

    def __init__(self, weights: Sequence[Weight], sparse: set[int], significant: float):
        super().__init__(weights, sparse)
        self._significant = significant

    def encode(self, slot: BufferSlot, flat: tf.Tensor, rate: tf.Tensor) -> _Compressed:
        changes = tf.abs(flat) * tf.cast(rate, flat.dtype)
        # What is no number is sent: kept, it would hold back all later gradients of its weight.
        small = changes <= self._significant
        where = tf.cast(tf.where(tf.logical_not(small))[:, 0], tf.int32)
        values = tf.gather(flat, where)
        # A position takes four bytes.
        shorter = tf.size(where) * (4 + flat.dtype.size) < tf.size(flat) * flat.dtype.size
        rest = tf.tensor_scatter_nd_update(flat, where[:, None], tf.zeros_like(values))
        return _Compressed(
            tf.cond(shorter, lambda: values, lambda: flat),
            tf.cond(shorter, lambda: where, lambda: where[:0]),
            tf.cond(shorter, lambda: rest, lambda: tf.zeros_like(flat)),
        )

    def decode(self, slot: BufferSlot, sent: tf.Tensor, beside: tf.Tensor) -> tf.Tensor:
        size = sum(map(self._size, slot.holds))
        return tf.cond(
            tf.size(sent) == size,
            lambda: sent,
            lambda: tf.scatter_nd(beside[:, None], sent, [size]),
        )


class QuantizedLayout(CompressedLayout):
    """Layout with a few bits for each entry of a kernel; vectors are sent whole.

    The second slot holds the codes, and the dense slot only what is not coded.
    """

    beside_dtype = tf.uint8

    def __init__(self, weights: Sequence[Weight], sparse: set[int], bits: int):
        super().__init__(weights, sparse)
        self._bits = bits

    def encode(self, slot: BufferSlot, flat: tf.Tensor, rate: tf.Tensor) -> _Compressed:
        """Encode kernels; the worker keeps what the codes lose."""
        whole, codes, left = [], [], []
        for index, part in zip(slot.holds, self._cut(slot, flat), strict=True):
            if not self._is_coded(index):
                whole.append(part)
                left.append(tf.zeros_like(part))
                continue
            shape = self._shapes[index]
            matrix = codec.to_columns(tf.reshape(part, shape))
            codes.append(codec.encode(matrix, self._bits))
            lost = matrix - codec.decode(codes[-1], matrix.shape[1], self._bits)
            left.append(tf.reshape(codec.from_columns(lost, shape, slot.dtype), [-1]))
        sent = tf.concat([*whole, tf.zeros([0], slot.dtype)], 0)
        return _Compressed(sent, codec.to_bytes(codes), tf.concat(left, 0))

    def _is_coded(self, index: int) -> bool:
        dtype = tf.as_dtype(self.weights[index].dtype)
        return quantized.is_coded(self._shapes[index], dtype, self._bits)

    def decode(self, slot: BufferSlot, sent: tf.Tensor, beside: tf.Tensor) -> tf.Tensor:
        """Put decoded kernels and whole vectors together, in the order of the weights."""
        coded = [index for index in slot.holds if self._is_coded(index)]
        matrices = [codec.matrix_shape(self._shapes[index]) for index in coded]
        length = sum(codec.bytes_of(*matrix, self._bits) for matrix in matrices)
        codes = codec.from_bytes(
            tf.reshape(beside, (1, length)),
            [columns for columns, _ in matrices],
            [entries for _, entries in matrices],
            self._bits,
        )
        parts = {}
        for index, code, (_, entries) in zip(coded, codes, matrices, strict=True):
            matrix = codec.decode(code, entries, self._bits)
            flat = codec.from_columns(matrix, self._shapes[index], slot.dtype)
            parts[index] = tf.reshape(flat, [-1])
        others = [index for index in slot.holds if index not in parts]
        if others:
            parts |= zip(others, tf.split(sent, list(map(self._size, others))), strict=True)
        return tf.concat([parts[index] for index in slot.holds], 0)


def layout_for(
    exchange: Downpour | None, weights: Sequence[Weight], sparse: set[int]
) -> BufferLayout:
    if exchange is not None and exchange.significant:
        return FilteredLayout(weights, sparse, exchange.significant)
    if exchange is not None and exchange.bits:
        return QuantizedLayout(weights, sparse, exchange.bits)
    return BufferLayout(weights, sparse)


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


class GradientCommit:
    """Applies a step's gradients and its changes of statistics on the servers."""

    def __init__(self, trainer: JobTrainer):
        self._trainer, self._strategy, self._model = trainer, trainer.strategy, trainer.model
        self._buffers: list[GradientBuffer] = []
        self._plan: list[tuple[keras.Optimizer, list[Weight]]] = []
        self._without_gradient: set[int] = set()
        self._looked_up: set[int] = set()
        self._moving: list[keras.Variable] = []
        self._commits: dict[int, tf.types.experimental.ConcreteFunction] = {}

    @functools.cached_property
    def tables(self) -> list[keras.Variable]:
        """Variables that steps look rows up in; known when the first step is traced."""
        return list(keras_models.tables_of(self._model))

    @functools.cached_property
    def layout(self) -> BufferLayout:
        """Layout of gradient buffers; known when the first step is traced."""
        parts_of, variables = self._trainer.parts_of, self._model.trainable_variables
        weights = [part for v in variables for part in parts_of(v)]
        sparse = {id(part) for v in variables if self._is_sparse(v) for part in parts_of(v)}
        return layout_for(self._strategy.exchange, weights, sparse)

    def _is_sparse(self, variable: keras.Variable) -> bool:
        return id(variable) in {id(table) for table in self.tables} | self._looked_up

    # While a step is traced.

    def plan(self, traced: FunctionalStep) -> list[Gradient]:
        """Put gradients into the layout's order, and note which optimizer applies them."""
        if not traced.applied and self._model.trainable_variables:
            raise self._refusal(
                "handed no gradient to an optimizer that is an attribute of the model, so nothing "
                "would be trained; it must call self.optimizer.apply(gradients, "
                "self.trainable_variables)"
            )
        by_weight: dict[int, Gradient] = {}
        before = self._planned_ids() if self._plan else None
        self._plan = []
        for optimizer, gradients, variables, _ in traced.applied:
            planned: list[Weight] = []
            for gradient, variable in zip(gradients, variables, strict=True):
                parts = self._checked_parts(optimizer, variable)
                tagged = self._tagged(optimizer, gradient, variable, traced.step)
                split = split_gradient(tagged, variable)
                for part, one in zip(parts, split, strict=True):
                    if id(part) in by_weight:
                        raise self._refusal(
                            "updates a weight twice in a step; behind parameter servers a step "
                            "applies one gradient to each weight"
                        )
                    by_weight[id(part)] = one
                planned += parts
            self._plan.append((optimizer, planned))
        ordered = [by_weight.get(id(w)) for w in self.layout.weights]
        pairs = zip(self.layout.weights, ordered, strict=True)
        self._without_gradient = {id(w) for w, g in pairs if g is None}
        # Buffers of steps that were traced before are still on their way.
        if before not in (None, self._planned_ids()):
            raise self._refusal(
                "trains other weights, or by other optimizers, than when it was traced before; "
                "compile the model again before a fit that trains others"
            )
        return ordered

    def _planned_ids(self) -> tuple[list[tuple[int, list[int]]], set[int]]:
        plan = [(id(optimizer), [id(w) for w in weights]) for optimizer, weights in self._plan]
        return plan, self._without_gradient

    def _refusal(self, what: str) -> NotDistributedError:
        return NotDistributedError(f"the train_step of model {self._model.name!r} {what}")

    def _tagged(
        self,
        optimizer: keras.Optimizer,
        gradient: Gradient,
        variable: keras.Variable,
        step: traced_step.Step,
    ) -> Gradient:
        """Tag the slices of a table's gradient with their origin, if the optimizer needs it."""
        # No tags if a worker sums several batches: one process would not add their slices either.
        accrues = self._strategy.exchange is not None
        if gradient is None or accrues or keras_optimizers.is_linear(optimizer):
            return gradient
        if not self._is_sparse(variable):
            if isinstance(gradient, tf.IndexedSlices):
                self._make_room(variable)
            return gradient
        slices = functional_step.as_slices(gradient)
        pieces = lookups.known_pieces(slices, variable.path, self._strategy.rank, False, step)
        self.layout.tagged |= {id(part) for part in self._trainer.parts_of(variable)}
        return lookups.tagged(slices, pieces, variable.shape[0])

    def _make_room(self, variable: keras.Variable) -> None:
        """Change the layout, from the next trace on, for sparse gradients of a variable."""
        self._looked_up.add(id(variable))
        self.__dict__.pop("layout", None)
        self._buffers.clear()
        self._commits.clear()

    def _checked_parts(self, optimizer: keras.Optimizer, variable: keras.Variable) -> list[Weight]:
        parts = self._trainer.parts_of(variable)
        if not {id(part) for part in parts} <= {id(weight) for weight in self.layout.weights}:
            raise self._refusal(
                f"hands a gradient of {variable.path!r} to optimizer {optimizer.name!r}, which is "
                "no trainable weight of the model, so workers have no place to send it to; make "
                "the layer that has it an attribute of the model"
            )
        served_optimizer.check_parts(optimizer, variable, parts)
        return parts

    def moved_by(self, traced: FunctionalStep) -> list[tf.Tensor]:
        """Return by how much a step changes statistics, such as batch normalization's."""
        before = {id(variable): value for variable, value in traced.state}
        states = {id(variable) for variable in self._trainer.seed_states()}
        moving = (set(traced.step.assigned) & set(before)) - states
        self._moving = [v for v in self._model.non_trainable_variables if id(v) in moving]
        return [traced.value(v) - before[id(v)] for v in self._moving]

    # While steps are computed.

    def take_buffer(self) -> GradientBuffer:
        """Return an unused gradient buffer.

        The buffer of a lost worker is never reused: the worker may come back and write to it.
        """
        try:
            return self._buffers.pop()
        except IndexError:
            return GradientBuffer(self.layout)

    def release(self, buffer: GradientBuffer) -> None:
        """Take a gradient buffer back."""
        self._buffers.append(buffer)

    # On the servers.

    def apply(
        self,
        buffers: Sequence[GradientBuffer],
        shares: Sequence[float],
        moved: Sequence[Sequence[Array]],
    ) -> None:
        """Have the servers apply the gradients in some buffers."""
        count = len(buffers)
        if count not in self._commits:
            self._commits[count] = self._commit_function(count)
        changes = []
        for index, variable in enumerate(self._moving):
            dtype = keras_variables.stored(variable).dtype
            change = sum(share * m[index] for share, m in zip(shares, moved, strict=True))
            # Counts are sums of shares.
            changes.append(tf.cast(np.rint(change) if dtype.is_integer else change, dtype))
        self._commits[count]([buffer.handles for buffer in buffers], changes)

    def _commit_function(self, count: int) -> tf.types.experimental.ConcreteFunction:
        # A handle's own specification has the buffer's declared length of 0.
        handle = tf.TensorSpec([], tf.resource)
        function = tf.function(self._commit, autograph=False)
        return function.get_concrete_function(
            [[handle for _ in self.layout.slots] for _ in range(count)],
            [tf.TensorSpec(v.shape, keras_variables.stored(v).dtype) for v in self._moving],
        )

    def _commit(self, buffers: list[list[tf.Tensor]], moved: list[tf.Tensor]) -> None:
        """Apply the gradients in some buffers; traced on the chief, runs on the servers."""
        with tf_replicas.in_replica(self._strategy), tf.compat.v1.device(_near_inputs):
            gradients = {
                id(w): None if id(w) in self._without_gradient else g
                for w, g in zip(self.layout.weights, self.layout.take(buffers), strict=True)
            }
            for optimizer, parts in self._plan:
                # The step has called what a script may have set in its place.
                apply = type(optimizer).apply
                apply(optimizer, [gradients[id(p)] for p in parts], parts)
            for variable, change in zip(self._moving, moved, strict=True):
                keras_variables.stored(variable).assign_add(change)


def _near_inputs(op: tf.Operation) -> str:
    """Return the device of an operation; if it has none, of its first input on a server.

    Clipping, loss scaling and the like name no device, and must not pull gradients to the chief.
    """
    devices = [op.device] if op.device else [t.device for t in op.inputs if "/job:ps" in t.device]
    return devices[0] if devices else ""
