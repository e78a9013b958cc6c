"""Divide an optimizer over ranks: each holds a part of the slots, and updates that part of weights.

    gradients of all ranks      reduce-scatter: each rank gets the sum of its part
    weights                     each rank cuts its part out of them
    part of weights             Keras's own apply, with this rank's part of the slots
    parts of all ranks          all-gather: every rank has all new weights

Variables share buckets, last layers first, and all ranks share each bucket: the first buckets are
sent during the backward pass, and the first weights while others are still updated.

    a bucket    [ bias | kernel ......................... | table .............. ]
    its ranks     0000   0000000000000000000001111111111    111111111122222222222

A rank sees a part of each variable as a variable of its own: rows of a matrix, elements of all
others as one row, none if other ranks have them all. A variable that its optimizer needs whole, or
that has a constraint, belongs to one rank. Keras does the rest: clipping over parts is in
`shared_optimizer`.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020; stage 1, and stage 2 for the sums of an accumulation window, which are slots too.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.communicators import buckets
from dtk.communicators.base import Communicator
from dtk.communicators.shard import FlatShard
from dtk.compat import keras_optimizers
from dtk.compat.keras_variables import VariablePart, flat_shard_of, is_of_all, set_shard, stored
from dtk.errors import at_rank
from dtk.exchange import Dense
from dtk.exchange.contract import ExchangeState, Gradient, run_if
from dtk.exchange.dense import DenseOp
from dtk.exchange.factors import Factored
from dtk.nests import Array, Tree
from dtk.optimizers.layerwise import LayerwiseOptimizer
from dtk.trainer.strategy import Strategy

# Seconds after which a rank that saves alone is told so.
_LATE = 15.0

# Which variables are divided.


def needs_whole(member: keras.Optimizer, variable: keras.Variable) -> str | None:
    """Return, in words, why an optimizer needs the whole variable; None if it does not."""
    if keras_optimizers.has_own(member, "update_step"):
        return "has an update_step of its own, which may compute with the whole variable"
    if isinstance(member, keras.optimizers.Adafactor):
        return "scales steps by means over a whole variable"
    if isinstance(member, LayerwiseOptimizer):  # of which LAMB is a Keras Lamb, too
        by_norm = not member.skips(variable)
    else:
        by_norm = isinstance(member, keras.optimizers.Lamb)
    if by_norm:
        return "scales a step by the norm of the whole variable"
    if isinstance(member, keras.optimizers.Muon) and not keras_optimizers.takes_adamw(
        member, variable
    ):
        return "makes a whole matrix orthogonal"
    return None


def _check_methods(optimizer: keras.Optimizer, strategy: Strategy) -> None:
    """Refuse methods that would see parts of gradients, and may take them for the whole."""
    for member in keras_optimizers.members(optimizer):
        outermost = member is optimizer  # Keras calls `apply` of those inside it
        methods = keras_optimizers.own_methods(member, outermost)
        if methods:
            message = (
                f"optimizer {member.name!r} ({type(member).__name__}) has its own {methods[0]}, "
                "which with shard_optimizer=True would be given this rank's parts of gradients or "
                "weights only. Write its update_step, or use shard_optimizer=False"
            )
            raise ValueError(at_rank(strategy.rank, message))


class Division(NamedTuple):
    """The elements of variables that each rank updates."""

    sizes: list[list[int]]  # of each variable, the elements of each rank, in rank order
    buckets: list[list[int]]  # indices of variables: in the row of a bucket ranks follow each other


def divide(
    variables: Sequence[tf.Variable], undivided: Sequence[bool], ranks: int, limit: int
) -> Division:
    """Divide variables as evenly as can be; an undivided one goes to the rank that has least."""
    counts = [variable.shape.num_elements() for variable in variables]
    sizes = [[0] * ranks for _ in variables]
    loads = [0] * ranks
    owners = {}
    for i in sorted((i for i, one in enumerate(undivided) if one), key=lambda i: -counts[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += counts[i]
        sizes[i][owners[i]] = counts[i]
    # What is cut fills up what each rank lacks of an even share of everything.
    room = [max(0, -(-sum(counts) // ranks) - load) for load in loads]
    plan = []
    for kind in (False, True):
        places = [i for i in range(len(variables))[::-1] if undivided[i] == kind]
        dtypes = [variables[i].dtype for i in places]
        for members in buckets.plan(dtypes, [counts[i] for i in places], limit):
            bucket = [places[member] for member in members]
            if kind:
                bucket.sort(key=owners.__getitem__)
            else:
                _cut([variables[i].shape for i in bucket], [sizes[i] for i in bucket], room)
            plan.append(bucket)
    return Division(sizes, plan)


def _cut(shapes: Sequence[tf.TensorShape], sizes: Sequence[list[int]], room: Sequence[int]) -> None:
    """Cut one row of tensors in proportion to ranks' room, matrices between two rows."""
    total, offset = sum(shape.num_elements() for shape in shapes), 0
    ends = [total * end // max(1, sum(room)) for end in itertools.accumulate(room)]
    for shape, of_ranks in zip(shapes, sizes, strict=True):
        count, begin = shape.num_elements(), 0
        unit = max(1, shape[1]) if shape.rank == 2 else 1
        for rank, end_of_rank in enumerate(ends):
            inside = min(max(end_of_rank - offset, 0), count)
            end = round(inside / unit) * unit
            of_ranks[rank], begin = end - begin, end
        offset += count


def _part_shape(shape: Sequence[int], size: int, undivided: bool) -> tuple[int, ...]:
    """Return the shape in which an optimizer sees so many elements of a variable."""
    if undivided and len(shape):
        return tuple(shape) if size == math.prod(shape) else (0,) * len(shape)
    # One row is a vector: Keras would add it to others of its kind as a bias, and TensorFlow's
    # optimizer of graphs then refuses it ("Biases must be 1D").
    if len(shape) == 2 and size > shape[1]:
        return size // shape[1], shape[1]
    return (size,)


def _shard_of(part: VariablePart) -> FlatShard:
    shard = flat_shard_of(part)
    assert shard is not None
    return shard


def _rows_of(part: VariablePart) -> range | None:
    """Return the rows of the whole variable that a part has; None if it is no matrix of rows."""
    shape, whole = tuple(part.shape), tuple(part.whole.shape)
    if len(whole) != len(shape) or shape[1:] != whole[1:] or not math.prod(shape):
        return None
    first = _shard_of(part).offset // math.prod(whole[1:])
    return range(first, first + shape[0])


def _part_of(whole: tf.Tensor, part: VariablePart) -> tf.Tensor:
    """Cut this rank's part out of a tensor of the variable's shape."""
    rows = _rows_of(part)
    if rows is None:
        return tf.reshape(_shard_of(part).part(whole), part.shape)
    return whole if part.shape == whole.shape else whole[rows.start : rows.stop]


class ShardedOptimizer:
    """An optimizer of which this rank holds a part."""

    def __init__(self, optimizer: keras.Optimizer, strategy: Strategy):
        self._optimizer, self._strategy = optimizer, strategy
        self.communicator: Communicator = strategy.communicator
        self.variables: list[keras.Variable] = []  # those that it was built for
        self.parts: dict[int, VariablePart] = {}  # of this rank, by the variable's id
        self.buckets: list[list[keras.Variable]] = []
        # Whole slots by the part's id: gathered for one save, or read from a file on this rank.
        self.gathered: dict[int, Array] | None = None
        self.loaded: dict[int, Array] | None = None
        if any(member.built for member in keras_optimizers.members(optimizer)):
            raise ValueError(
                at_rank(
                    strategy.rank,
                    f"optimizer {optimizer.name!r} was built before it was compiled under a "
                    "strategy with shard_optimizer=True, so it holds whole slots; compile with a "
                    "new optimizer, or load the model inside `with strategy.scope():`",
                )
            )
        _check_methods(optimizer, strategy)

    def parts_of(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Return this rank's parts; a variable that its gradient replaces is its own part."""
        return [self.parts.get(id(variable), variable) for variable in variables]

    # Building.

    def divided(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        """Return the parts, which hold this rank's part of the weights until the build ends."""
        if not self.variables:
            self.variables = list(variables)
            replaced = [keras_optimizers.is_replaced(v) for v in variables]
            self._divide([v for v, one in zip(variables, replaced, strict=True) if not one])
        self._fill()
        return self.parts_of(variables)

    def _divide(self, variables: list[keras.Variable]) -> None:
        tensors = [stored(variable) for variable in variables]
        undivided = [
            variable.constraint is not None
            or any(
                needs_whole(member, variable)
                for member in keras_optimizers.members(self._optimizer)
            )
            for variable in variables
        ]
        communicator = self.communicator
        limit = buckets.limit_for(tensors, communicator.bucket_bytes, communicator.costs)
        division = divide(tensors, undivided, communicator.size, limit)
        self.buckets = [[variables[i] for i in bucket] for bucket in division.buckets]
        rows = zip(variables, tensors, division.sizes, undivided, strict=True)
        for variable, tensor, sizes, whole in rows:
            shard = FlatShard(0, tuple(sizes), communicator, tuple(tensor.shape))
            shape = _part_shape(shard.shape, shard.size, whole)
            with tf.device(placement.keeping(self._strategy)):
                # Keras looks for words in the names of TensorFlow's variables, too.
                name = tensor.name.partition(":")[0]
                room = tf.Variable(tf.zeros(shape, tensor.dtype), trainable=False, name=name)
            part = VariablePart(variable, room, variable.name)
            set_shard(part, shard)
            self.parts[id(variable)] = part

    def built(self) -> None:
        """Mark what has been built."""
        self._release()
        members = keras_optimizers.members(self._optimizer)
        self._mark_others(members)
        for member in members:
            keras_optimizers.exclude_parts(member, self.parts.values())

    def _mark_others(self, members: Sequence[keras.Optimizer]) -> None:
        """Mark slots of other shapes than their variable's, which only its owner has.

        Adafactor has the means of rows and columns. All ranks build the same variables in the same
        order; the owner's alone are not empty.
        """
        others = [
            v for member in members for v in keras_optimizers.own_variables(member) if is_of_all(v)
        ]
        if not any(v.shape.rank for v in others):
            return
        gathered = self.communicator.allgather_object([tuple(v.shape) for v in others])
        for variable, *shapes in zip(others, *gathered, strict=True):
            if len(set(shapes)) > 1:
                sizes = tuple(math.prod(shape) for shape in shapes)
                whole = max(shapes, key=math.prod)
                set_shard(variable, FlatShard(0, sizes, self.communicator, whole))

    # A step.

    def updated(self, update: Callable[[], Tree], in_step: bool = False) -> Tree:
        """Call what updates the parts of weights; then give all ranks all weights."""
        self._fill()
        result = update()
        inner = keras_optimizers.chain(self._optimizer)[-1]
        # Constraints and averages change weights within an accumulation window.
        always = inner.ema_overwrite_frequency or any(v.constraint for v in self.variables)
        if in_step and inner.gradient_accumulation_steps and not always:
            run_if(keras_optimizers.is_between_windows(inner), self._gather)
        else:
            self._gather()
        self._release()
        return result

    def _fill(self) -> None:
        """Cut this rank's parts out of the weights."""
        for variable in self.variables:
            part = self.parts.get(id(variable))
            if part is not None and math.prod(part.shape):
                part.fill(_part_of(tf.convert_to_tensor(stored(variable)), part))

    def _gather(self) -> None:
        """Put the parts of all ranks together to weights; all ranks call it."""
        rows = [
            tf.concat([tf.reshape(stored(self.parts[id(v)]), [-1]) for v in bucket], 0)
            for bucket in self.buckets
        ]
        gathered = self.communicator.allgather(rows, list(map(self.sizes_of, self.buckets)))
        for bucket, row in zip(self.buckets, gathered, strict=True):
            values = tf.split(row, [math.prod(variable.shape) for variable in bucket])
            for variable, value in zip(bucket, values, strict=True):
                stored(variable).assign(tf.reshape(value, variable.shape))

    def _release(self) -> None:
        zero = tf.minimum(tf.cast(self._optimizer.iterations, tf.int32), 0)
        for part in self.parts.values():
            if math.prod(part.shape):
                part.release(zero)

    def sizes_of(self, variables: Sequence[keras.Variable]) -> list[int]:
        """Return how many elements of all these variables each rank updates."""
        shards = [_shard_of(self.parts[id(variable)]) for variable in variables]
        return [sum(sizes) for sizes in zip(*(shard.sizes for shard in shards), strict=True)]

    def parts_of_slices(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> list[Gradient]:
        """Keep, of the slices of whole tables, those of this rank's rows."""
        return [
            self._slices_of(gradient, self.parts[id(variable)])
            if isinstance(gradient, tf.IndexedSlices)
            else gradient
            for gradient, variable in zip(gradients, variables, strict=True)
        ]

    def _slices_of(self, slices: tf.IndexedSlices, part: VariablePart) -> Gradient:
        size = math.prod(part.shape)
        if not size:
            return tf.zeros(part.shape, slices.values.dtype)
        mine, values, indices = _rows_of(part), slices.values, tf.cast(slices.indices, tf.int64)
        if mine is None:  # elements: each a slice, since optimizers square slices one by one
            width = math.prod(part.whole.shape[1:])
            values = tf.reshape(values, [-1])
            indices = tf.reshape(indices[:, None] * width + tf.range(width, dtype=tf.int64), [-1])
            first = _shard_of(part).offset
            mine = range(first, first + size)
        kept = (indices >= mine.start) & (indices < mine.stop)
        indices = tf.boolean_mask(indices, kept) - mine.start
        shape = tf.constant(tuple(part.shape), indices.dtype)
        return tf.IndexedSlices(tf.boolean_mask(values, kept), indices, shape)

    # Whole slots.

    def gather(self) -> None:
        """Gather whole slots for `save` on rank 0; all ranks call it, and `forget` later."""
        self.gathered = {}
        for variable in self._optimizer.variables:
            shard = flat_shard_of(variable)
            value = None if shard is None else shard.whole(stored(variable))
            if value is not None and self.communicator.rank == 0:
                self.gathered[id(variable)] = value.numpy()

    def scatter(self) -> None:
        """Give all ranks their parts of the slots that rank 0 has loaded; all ranks call it."""
        loaded = self.loaded or {}
        for variable in self._optimizer.variables:
            shard, whole = flat_shard_of(variable), loaded.get(id(variable))
            if shard is None:
                variable.assign(self.communicator.broadcast(stored(variable), 0))
                continue
            whole = tf.zeros(shard.shape, variable.dtype) if whole is None else whole
            value = self.communicator.broadcast(tf.cast(whole, variable.dtype), 0)
            variable.assign(tf.reshape(shard.part(value), variable.shape))

    def forget(self) -> None:
        """Free the whole slots."""
        self.gathered = self.loaded = None

    def save(self, member: keras.Optimizer, store: dict[str, Array]) -> None:
        """Save an optimizer's variables whole."""
        message = (
            "the optimizer's state is gathered to be saved, and other ranks do not come: with "
            "shard_optimizer=True call model.save and its like on every rank"
        )
        late = threading.Timer(_LATE, print, [f"dtk: {at_rank(self.communicator.rank, message)}"])
        late.start()
        try:
            for i, variable in enumerate(member.variables):
                shard = flat_shard_of(variable)
                if shard is None:
                    store[str(i)] = variable.numpy()
                elif self.gathered is None:  # every rank saves
                    store[str(i)] = shard.whole(stored(variable)).numpy()
                else:
                    store[str(i)] = self.gathered[id(variable)]
        finally:
            late.cancel()

    def load(
        self,
        member: keras.Optimizer,
        store: dict[str, Array],
        load: Callable[[dict[str, Array]], None],
    ) -> None:
        """Load this rank's part of whole variables; what does not fit goes to `load`."""
        if len(store.keys()) != len(member.variables):
            load(store)  # Keras warns
            return
        for i, variable in enumerate(member.variables):
            shard, value = flat_shard_of(variable), np.asarray(store[str(i)])
            if shard is None:
                variable.assign(value)
                continue
            if value.shape != shard.shape:
                raise ValueError(
                    at_rank(
                        self.communicator.rank,
                        f"optimizer variable {variable.path!r} has shape {shard.shape}, and a "
                        f"value of shape {value.shape} was loaded for it",
                    )
                )
            if self.loaded is not None:
                self.loaded[id(variable)] = value
            variable.assign(tf.reshape(shard.part(value), variable.shape))


class ShardedState:
    """Whole slots of a model's optimizers for a checkpoint; see `layers.whole.ModelInParts`."""

    def __init__(self, model: keras.Model, optimizers: Sequence[ShardedOptimizer]):
        self.whole = model
        self._optimizers = optimizers

    def build(self) -> keras.Model:
        """Return the model; whole slots that are loaded from now on are kept for `scatter`."""
        for one in self._optimizers:
            one.loaded = {}
        return self.whole

    def gather(self) -> None:
        """Gather whole slots on rank 0; all ranks call it."""
        for one in self._optimizers:
            one.gather()

    def scatter(self, world: Communicator) -> None:
        """Give all ranks the slots that rank 0 has loaded; all ranks call it."""
        del world
        for one in self._optimizers:
            one.scatter()
            one.forget()

    def forget(self) -> None:
        """Free the whole slots."""
        for one in self._optimizers:
            one.forget()


class ScatterOp(DenseOp):
    """A reduce-scatter: each rank gets the sum of its part of gradients.

    Factors are sent to all ranks if that is faster, of which each multiplies its part. Slices of
    tables are sent to all ranks: few rows have any.
    """

    in_parts = True

    def __init__(
        self,
        sharded: ShardedOptimizer,
        variables: Sequence[keras.Variable],
        state: ExchangeState,
        exchange: Dense,
    ):
        super().__init__(sharded.communicator, state, exchange=exchange)
        self._sharded, self._variables = sharded, variables

    def _product(self, place: int, factors: Factored) -> tf.Tensor:
        """Multiply the rows of this rank's part."""
        part = self._sharded.parts[id(self._variables[place])]
        width = part.whole.shape[1]
        first, size = _shard_of(part).offset // width, math.prod(part.shape)
        left = factors.left[:, first : first + size // width]
        return tf.reshape(Factored(left, factors.right).product(), part.shape)

    def _sums(
        self, places: Sequence[int], gradients: Sequence[Gradient]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Return the sums of this rank's parts of gradients, and all slices of tables."""
        sharded, wire = self._sharded, self.exchange.dtype
        grads = dict(zip(places, gradients, strict=True))
        # Further pieces of a table's gradient stand behind all gradients, at places of no variable.
        tables = {i: g for i, g in grads.items() if isinstance(g, tf.IndexedSlices)}
        dense = self._rows_of([i for i in places if i not in tables])
        of_rows = [[self._variables[i] for i in row] for row in dense]
        rows = [tf.concat([tf.reshape(grads[i], [-1]) for i in row], 0) for row in dense]
        narrow = [row if wire is None else tf.cast(row, wire) for row in rows]
        sizes = list(map(sharded.sizes_of, of_rows))
        summed = self.communicator.reduce_scatter(narrow, "sum", sizes)
        results = dict(zip(tables, self.communicator.allreduce(list(tables.values())), strict=True))
        for row, variables, sent, total in zip(dense, of_rows, rows, summed, strict=True):
            parts = sharded.parts_of(variables)
            values = tf.split(tf.cast(total, sent.dtype), [math.prod(p.shape) for p in parts])
            for i, one, value in zip(row, parts, values, strict=True):
                results[i] = tf.reshape(value, one.shape)
        return [results[i] for i in places]

    def _rows_of(self, places: Sequence[int]) -> list[list[int]]:
        """Return the places of gradients by bucket; a variable's second one is in a second row."""
        held: dict[int, list[int]] = {}
        for i in places:
            held.setdefault(id(self._variables[i]), []).append(i)
        rows = [
            [held[id(v)][turn] for v in bucket if turn < len(held.get(id(v), ()))]
            for turn in range(max(map(len, held.values()), default=0))
            for bucket in self._sharded.buckets
        ]
        return [row for row in rows if row]
