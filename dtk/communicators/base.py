"""The communicator: ranks that exchange tensors, over one backend or another.

Names and semantics follow MPI. `Communicator` turns what users pass (lists, `IndexedSlices`,
scalars, any shape, any dtype, unequal rows) into flat tensors of the backend's own dtypes, and
back. A backend has two sets of dtypes and seven methods:

    allreduce          -> _reduce(buckets, op)
    allgather          -> _gather(flat, sizes)         ragged: sizes differ by rank
    alltoall           -> _alltoall(flat, sizes)       ragged: a size for each peer
    reduce_scatter     -> _scatter: an all-to-all and a local sum in rank order, if not overridden
    broadcast          -> _broadcast(buckets, root)
    send, recv         -> _send, _receive
    split              -> _group(ranks)
    barrier, Python values, buckets, order, names, counts: made of these

One suite (tests/communicators) holds every backend to the same, at world sizes 1, 2 and 3, eagerly
and inside `tf.function`.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar, cast, overload

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.cluster import progress
from dtk.cluster.place import Place
from dtk.communicators import aligned_slices, buckets, determinism, dtype_casts, objects
from dtk.communicators.aligned_slices import AlignedSlices, with_values
from dtk.communicators.costs import Costs
from dtk.communicators.dtype_casts import REDUCE_OPS as REDUCE_OPS
from dtk.communicators.meeting import Call, a, differing, rows_of, shape_of
from dtk.communicators.row_blocks import RowBlocks, checked_counts, checked_splits
from dtk.communicators.sequencer import CollectiveMessage, CollectiveSequencer, Span
from dtk.errors import CommunicatorError, at_rank, script_line
from dtk.even_division import even_sizes, even_sizes_in_graph
from dtk.nests import Array
from dtk.patches import temporarily

Value = TypeVar("Value")
_Given = ParamSpec("_Given")
LOCAL_REDUCE = {
    "sum": tf.reduce_sum,
    "min": tf.reduce_min,
    "max": tf.reduce_max,
    "prod": tf.reduce_prod,
}
_COMBINE = {"sum": tf.add, "min": tf.minimum, "max": tf.maximum, "prod": tf.multiply}


def unconverted(function: Value) -> Value:
    """Keep AutoGraph from rewriting a function: that is slow and gains nothing."""
    kept: Value = tf.autograph.experimental.do_not_convert(function)
    return kept


def _beside_its_messages(method: Callable[_Given, Value]) -> Callable[_Given, Value]:
    """Let a method of a communicator compute on the device of its messages.

    Otherwise TensorFlow takes the bytes of the host to the GPU, shifts them there and brings them
    back. In a graph, floats are packed where they are.
    """

    @functools.wraps(method)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> Value:
        own = cast(Communicator, args[0])
        if not tf.executing_eagerly():
            values = tf.nest.flatten([args[1:], kwargs])
            dtypes = [tf.as_dtype(one.dtype) for one in values if hasattr(one, "dtype")]
            if own.gpu_transport is None or any(map(placement.is_on_card, dtypes)):
                return method(*args, **kwargs)
        with tf.device(own.device):
            return method(*args, **kwargs)

    return unconverted(run)


class Communicator(abc.ABC):
    """A group of ranks that exchange tensors.

    The invariant: **every rank of the group calls the same collectives, in the same order, with
    the same dtypes** (and, unless a method is called ragged, the same shapes). Inside `tf.function`
    that holds for the order in which the ops are *traced*: collectives of one communicator run one
    after the other, in that order (but see `concurrent`). `send` and `recv` are the exception: only
    the two ranks involved call them.

    Every method takes floating point (16 to 64 bits), integers and bool; results keep the dtype.
    Moving values (gather, broadcast, all-to-all, send) keeps every bit. Reducing floats happens in
    their own dtype unless the backend lacks it; integers wrap as numpy's do and never pass through
    floating point; bool follows numpy too: sum and max are "or", min and prod are "and". The mean
    of integers or bools is refused, since their dtype cannot hold it. Send strings by `*_object`.

    Args:
        rank: This process's index in the group.
        hosts: One host name per rank, in rank order.
        device: Where messages are; `dtk.placement` says it when None.

    Attributes:
        rank: This process's index in the group, `0 <= rank < size`.
        size: Number of ranks.
        local_rank: Index among the ranks of the same host.
        local_size: Number of ranks on this host.
        hosts: One host name per rank, in rank order.
        alike: Whether all ranks compute with the same kind of processor and as many threads, so
            that equal operations give equal bits; False until `learn` is called.
        place: The launcher's facts, if the communicator spans all ranks of a job; None if it
            spans a part of them or this process alone.
    """

    name: str = "abstract"
    # The same ranks, from GPU to GPU; None where everything goes through the host.
    gpu_transport: Communicator | None = None
    # The communicator of which this one is the `gpu_transport`.
    host: Communicator | None = None
    alike: bool = False
    place: Place | None = None
    bucket_bytes = buckets.DEFAULT_LIMIT

    # What a backend brings: the dtypes that it adds up, and the dtypes that it moves, as they are.
    reduces: frozenset[tf.DType] = frozenset()
    moves: frozenset[tf.DType] = frozenset()

    @abc.abstractmethod
    def _reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        """Reduce flat tensors of dtypes in `reduces` by "sum", "min", "max" or "prod"."""

    @abc.abstractmethod
    def _gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        """Return one flat tensor per rank; all ranks know their `sizes` (int64, shape [size]).

        Gathers of other lanes may be under way.
        """

    @abc.abstractmethod
    def _alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Send `sizes[rank, j]` elements to rank j; return the elements from each rank."""

    def _scatter(self, flat: tf.Tensor, sizes: tf.Tensor, op: str, label: str) -> list[tf.Tensor]:
        """Return the parts that combine to this rank's block; all ranks cut into equal `sizes`."""
        del op
        return self._alltoall(flat, sizes, label)

    @abc.abstractmethod
    def _broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        """Broadcast flat tensors of dtypes in `moves`."""

    @abc.abstractmethod
    def _send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        """Send; return any tensor that becomes ready when the send is over."""

    @abc.abstractmethod
    def _receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        """Receive a flat tensor with the shape and dtype of `room`."""

    @abc.abstractmethod
    def _group(self, ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the communicator of this rank's group; all ranks know all `groups`."""

    def __init__(self, rank: int, hosts: Sequence[str], device: str | None = None) -> None:
        self.rank, self.size = rank, len(hosts)
        self.set_hosts(hosts)
        self.device = device or placement.messages()
        self._costs: Costs | None = None
        # By the name of what runs concurrently; "" is the order of all others. Each is made when
        # it is needed: a world of one leaves TensorFlow alone until then.
        self._sequencers: dict[str, CollectiveSequencer] = {}
        self._lane_name = ""
        self._sequence = ""
        self._splits = 0
        self._labels = weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]]()
        self._last_number = -1
        self._thread: threading.Thread | None = None  # None: collectives may be in any
        self._met = 0  # collectives outside of graphs so far

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Set which host each rank is on, once that is known.

        Args:
            hosts: One host name per rank, in rank order.
        """
        self.hosts = tuple(hosts)
        self.local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        self.local_size = self.hosts.count(self.hosts[self.rank])

    @property
    def costs(self) -> Costs | None:
        """Measured seconds of a message and a byte, or None; `print` says what dtk does with them.

        None if TensorFlow was asked to be deterministic: the costs decide in which order numbers
        are added up.
        """
        return None if determinism.is_asked_for() else self._costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._costs = costs

    @property
    def bytes_sent(self) -> int:
        """Payload bytes this rank has handed to the transport so far, padding included.

        Counted when a collective runs, so a `tf.function` counts at every execution. The transport
        may move more or less: a ring all-reduce moves 2(size-1)/size of each byte.
        """
        cards = 0 if self.gpu_transport is None else self.gpu_transport.bytes_sent
        return cards + sum(sequencer.bytes for sequencer in self._sequencers.values())

    @property
    def seconds_communicating(self) -> float:
        """Seconds this rank has spent in collectives so far, waiting for other ranks included.

        The time of a collective begins when this rank's own values are ready. Collectives in graphs
        count 0 if TensorFlow was asked to be deterministic: it then has no clock in graphs.
        """
        cards = 0.0 if self.gpu_transport is None else self.gpu_transport.seconds_communicating
        return cards + (self._sequencers[""].seconds if "" in self._sequencers else 0.0)

    @property
    def eager_seconds_communicating(self) -> float:
        """The part of `seconds_communicating` that was spent outside of graphs."""
        cards = (
            0.0 if self.gpu_transport is None else self.gpu_transport.eager_seconds_communicating
        )
        return cards + (self._sequencers[""].eager_seconds if "" in self._sequencers else 0.0)

    def spans(self) -> list[Span]:
        """Return when each message of a graph was last sent, where `dtk run` asked for steps."""
        cards = [] if self.gpu_transport is None else self.gpu_transport.spans()
        return cards + [span for order in self._sequencers.values() for span in order.spans()]

    @functools.cached_property
    def watched(self) -> tf.Variable:
        """A scalar zero that gradient tapes watch because it is a variable.

        Every rank differentiates what is computed from it, see `dtk.layers.collectives`.
        """
        with tf.init_scope(), tf.device(placement.messages()):
            return tf.Variable(0.0, trainable=True, name="watched")

    @overload
    def allreduce(self, value: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]: ...

    @overload
    def allreduce(self, value: tf.Tensor, op: str = "sum") -> tf.Tensor: ...

    @_beside_its_messages
    def allreduce(
        self, value: tf.Tensor | Sequence[tf.Tensor], op: str = "sum"
    ) -> tf.Tensor | list[tf.Tensor]:
        """Combine `value` over all ranks; every rank gets the result.

        Args:
            value: A tensor, a `tf.IndexedSlices`, or a list of these. A list of tensors is packed
                into buckets, one op per bucket. The buckets depend on which shapes are known when a
                function is traced, so these must agree on all ranks.
            op: One of "sum", "mean", "min", "max", "prod"; "sum" or "mean" for `tf.IndexedSlices`.

        Returns:
            The same structure, shapes and dtypes. An `IndexedSlices` holds the rows of every rank,
            one after the other; the rows of `AlignedSlices` are added up.

        Raises:
            ValueError: The op is unknown, or makes no sense for a dtype or for `tf.IndexedSlices`.
        """
        if not isinstance(value, (list, tuple)):
            return self.allreduce([value], op)[0]
        results = [v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v) for v in value]
        dtype_casts.check((item.dtype for item in results), op)
        if op not in ("sum", "mean") and any(isinstance(v, tf.IndexedSlices) for v in results):
            message = f"op {op!r} on IndexedSlices; only 'sum' and 'mean' make sense"
            raise ValueError(at_rank(self.rank, message))
        if self.size == 1 or not results:
            return results
        routed = self._routed(
            results, lambda group, places: group.allreduce([results[i] for i in places], op)
        )
        if routed is not None:
            return routed
        tables = [i for i in range(len(results)) if aligned_slices.is_gathered(results[i])]
        dense = [i for i in range(len(results)) if i not in tables]
        summed = [self._row_sum(results[i], op) for i in tables]
        aligned = {i: results[i] for i in dense if isinstance(results[i], AlignedSlices)}
        whole = [aligned[i].values if i in aligned else results[i] for i in dense]
        digits = [aligned_slices.digits_of(list(aligned.values()))] if aligned else []
        messages = [self._reduction([*whole, *digits], op)] if dense else []
        signature = [*map(shape_of, whole), op]
        reduced = self._sequencer.run_together([*messages, *summed], signature=signature)
        combined = reduced.pop(0) if dense else []
        for i, tensor in zip(dense, combined, strict=False):  # digits come last
            results[i] = tensor
        if digits:
            same = tf.equal(combined[-1], digits[0] * (1 if op == "mean" else self.size))
            values = [results[i] for i in aligned]
            values = aligned_slices.assert_equal(values, tf.reduce_all(same), self.rank)
            for i, value in zip(aligned, values, strict=True):
                results[i] = with_values(aligned[i], value)
        for i, slices in zip(tables, reduced, strict=True):
            results[i] = slices
        return results

    def _routed(
        self,
        tensors: Sequence[tf.Tensor],
        send: Callable[[Communicator, list[int]], list[tf.Tensor]],
    ) -> list[tf.Tensor] | None:
        """Send what goes from GPU to GPU, then the others; None if all go through the host."""
        on_card = [i for i, one in enumerate(tensors) if placement.is_on_card(one.dtype)]
        if not on_card or self.gpu_transport is None:
            return None
        others = [i for i in range(len(tensors)) if i not in on_card]
        received = [*send(self.gpu_transport, on_card), *send(self, others)]
        by_place = dict(zip([*on_card, *others], received, strict=True))
        return [by_place[i] for i in range(len(tensors))]

    def _card_for(self, dtype: tf.DType) -> Communicator | None:
        return self.gpu_transport if placement.is_on_card(dtype) else None

    def _reduction(self, tensors: list[tf.Tensor], op: str) -> CollectiveMessage:
        """Return the collective that reduces dense tensors in buckets."""
        limit = buckets.limit_for(tensors, self.bucket_bytes, self.costs)
        packed, layout = buckets.pack(tensors, limit)
        encoded = [dtype_casts.for_reducing(one, op, self.size, self.reduces) for one in packed]
        # Only bool changes its op, so there are one or two.
        labels = {
            one: self._label(f"reduce/{one}") for one in dict.fromkeys(item[1] for item in encoded)
        }

        def send(flat: list[tf.Tensor], lane: int) -> list[tf.Tensor]:
            del lane
            outputs = list(flat)
            for one, label in labels.items():
                places = [i for i, item in enumerate(encoded) if item[1] == one]
                reduced = self._reduce([flat[i] for i in places], one, label)
                for i, output in zip(places, reduced, strict=True):
                    outputs[i] = output
            return outputs

        def finish(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
            decoded = [decode(one) for (_, _, decode), one in zip(encoded, outputs, strict=True)]
            return buckets.unpack(decoded, tensors, layout)

        return CollectiveMessage([item[0] for item in encoded], send, finish)

    def _row_sum(self, slices: tf.IndexedSlices, op: str) -> CollectiveMessage:
        """Return the collective that gathers slices, and adds up aligned ones."""
        # The row numbers of a step are known long before the gradients of the rows.
        host = self.host or self
        with host.concurrent("rows"):
            counts = self._count_rows(slices.indices, [rows_of(slices.values), op])
            indices = host.allgather(slices.indices, counts)
        gathering = self._gathering(slices.values, counts)

        def finish(parts: list[tf.Tensor]) -> tf.IndexedSlices:
            values: tf.Tensor = gathering.finish(parts)
            aligned = isinstance(slices, AlignedSlices)
            if aligned:
                values = tf.reduce_sum(self._aligned(values, indices, slices), 0)
            if op == "mean":
                values = values / tf.cast(self.size, values.dtype)
            if aligned:
                return with_values(slices, values)
            return tf.IndexedSlices(values, indices, slices.dense_shape)

        return gathering._replace(finish=finish)

    def _aligned(self, values: tf.Tensor, indices: tf.Tensor, mine: tf.IndexedSlices) -> tf.Tensor:
        """Stack the ranks' values of aligned slices; fail if the ranks' indices differ."""
        everyone = tf.tile(mine.indices, [self.size])
        equal = tf.cond(
            tf.equal(tf.size(indices), tf.size(everyone)),
            lambda: tf.reduce_all(tf.equal(indices, everyone)),
            lambda: tf.constant(False),
        )
        (values,) = aligned_slices.assert_equal([values], equal, self.rank)
        return tf.reshape(values, tf.concat([[self.size], tf.shape(mine.values)], 0))

    @overload
    def allgather(
        self, value: Sequence[tf.Tensor], rows: Sequence[Sequence[int]] | None = None
    ) -> list[tf.Tensor]: ...

    @overload
    def allgather(
        self, value: tf.Tensor, rows: Sequence[int] | tf.Tensor | None = None
    ) -> tf.Tensor: ...

    @_beside_its_messages
    def allgather(
        self,
        value: tf.Tensor | Sequence[tf.Tensor],
        rows: Sequence[int] | tf.Tensor | Sequence[Sequence[int] | tf.Tensor] | None = None,
    ) -> tf.Tensor | list[tf.Tensor]:
        """Concatenate every rank's rows along axis 0, in rank order.

        Args:
            value: Shape `[rows, ...]`. Ragged: row counts may differ. A scalar counts as one row:
                the result has shape `[size]`. The tensors of a list are sent side by side, each
                once it is computed.
            rows: Row count of each rank, shape `[size]`, if every rank knows it; that saves a
                message. A list of tensors needs a list of them.

        Returns:
            All rows, of the dtype of `value`.

        Raises:
            ValueError: `rows` does not fit this rank's rows.
        """
        if not isinstance(value, (list, tuple)):
            return self.allgather([value], None if rows is None else [rows])[0]
        tensors = [tf.convert_to_tensor(one) for one in value]
        dtype_casts.check(tensor.dtype for tensor in tensors)
        tensors = [tf.reshape(t, [1]) if t.shape.rank == 0 else t for t in tensors]
        row_counts = list(rows or [None] * len(tensors))
        known = [
            None if of_one is None else checked_counts(tensor, of_one, self.rank, self.size)
            for tensor, of_one in zip(tensors, row_counts, strict=True)
        ]
        if self.size == 1:
            return tensors
        routed = self._routed(
            tensors,
            lambda group, places: group.allgather(
                [tensors[i] for i in places], [row_counts[i] for i in places]
            ),
        )
        if routed is not None:
            return routed
        counts = [
            self._count_rows(tensor, [rows_of(tensor)]) if of_one is None else of_one
            for tensor, of_one in zip(tensors, known, strict=True)
        ]
        messages = list(map(self._gathering, tensors, counts))
        return self._sequencer.run_together(
            messages, name="all-gather", signature=list(map(rows_of, tensors))
        )

    def _gathering(self, tensor: tf.Tensor, counts: tf.Tensor) -> CollectiveMessage:
        """Return the collective that gathers the rows of all ranks, `counts` for each."""
        rows = RowBlocks(tensor, self.moves)
        label = self._label(f"gather/{rows.encoded.dtype.name}")
        return CollectiveMessage(
            [rows.encoded],
            lambda flat, lane: self._gather(flat[0], rows.words(counts), label, lane),
            lambda parts: rows.joined(parts, counts),
        )

    def _count_rows(self, tensor: tf.Tensor, signature: Sequence[str]) -> tf.Tensor:
        return self.sizes_of_ranks(tf.shape(tensor, tf.int64)[:1], "gather", signature)[:, 0]

    @_beside_its_messages
    def sizes_of_ranks(
        self, mine: tf.Tensor, kind: str, signature: Sequence[str] = ()
    ) -> tf.Tensor:
        """Return every rank's small vector of counts.

        Args:
            mine: This rank's counts, int64, shape [n].
            kind: What is counted, for the message's name.
            signature: What all ranks must have given alike, see `meet`.

        Returns:
            The counts of all ranks, int64, shape [size, n].
        """
        if self.host is not None:
            return self.host.sizes_of_ranks(mine, kind, signature)
        label = self._label(f"{kind}/sizes")
        rows = self._sequencer.run(
            [mine],
            lambda flat: self._gather_sizes(flat[0], label),
            name=f"count of rows to {kind}",
            signature=signature,
        )
        return tf.ensure_shape(tf.stack(rows), [self.size, *mine.shape])

    def _gather_sizes(self, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Gather vectors of equal length; a backend may know a shorter way."""
        lengths = tf.constant([sizes.shape[0]] * self.size, tf.int64)
        return self._gather(sizes, lengths, label, 0)

    @overload
    def reduce_scatter(
        self,
        value: Sequence[tf.Tensor],
        op: str = "sum",
        rows: Sequence[Sequence[int] | None] | None = None,
    ) -> list[tf.Tensor]: ...

    @overload
    def reduce_scatter(
        self, value: tf.Tensor, op: str = "sum", rows: Sequence[int] | None = None
    ) -> tf.Tensor: ...

    @_beside_its_messages
    def reduce_scatter(
        self,
        value: tf.Tensor | Sequence[tf.Tensor],
        op: str = "sum",
        rows: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    ) -> tf.Tensor | list[tf.Tensor]:
        """Reduce, then keep this rank's block of rows.

        Blocks are `rows // size` rows; the first `rows % size` ranks get one more.

        Args:
            value: Shape `[rows, ...]`, the same on all ranks. The tensors of a list are sent one
                after the other, each once it is computed.
            op: As in `allreduce`.
            rows: Rows of each rank's block, in place of the above. A list of tensors needs a list
                of them.

        Returns:
            This rank's rows, as many as `dtk.even_division.even_sizes` or `rows` says, in rank
            order.

        Raises:
            ValueError: `value` is a scalar, the op does not fit its dtype, or `rows` do not add up.
        """
        if not isinstance(value, (list, tuple)):
            return self.reduce_scatter([value], op, [cast("Sequence[int]", rows)])[0]
        tensors = [tf.convert_to_tensor(one) for one in value]
        dtype_casts.check((tensor.dtype for tensor in tensors), op)
        if any(tensor.shape.rank == 0 for tensor in tensors):
            raise ValueError(at_rank(self.rank, "reduce_scatter needs rows, got a scalar"))
        block_sizes = cast("list[Sequence[int] | None]", list(rows or [None] * len(tensors)))
        blocks = [
            None if of_one is None else self._checked_blocks(tensor, of_one)
            for tensor, of_one in zip(tensors, block_sizes, strict=True)
        ]
        if self.size == 1:
            return tensors
        routed = self._routed(
            tensors,
            lambda group, places: group.reduce_scatter(
                [tensors[i] for i in places], op, [block_sizes[i] for i in places]
            ),
        )
        if routed is not None:
            return routed
        return self._sequencer.run_together(
            [self._scattering(*one, op) for one in zip(tensors, blocks, strict=True)],
            name="reduce-scatter",
            signature=[*map(shape_of, tensors), op],
        )

    def _checked_blocks(self, value: tf.Tensor, rows: Sequence[int]) -> list[int]:
        if len(rows) != self.size or value.shape[0] not in (None, sum(rows)):
            message = (
                f"reduce_scatter got rows={list(rows)} for {value.shape[0]} rows, expected one "
                f"number for each of {self.size} ranks, that add up to the rows"
            )
            raise ValueError(at_rank(self.rank, message))
        return list(rows)

    def _scattering(self, value: tf.Tensor, known: list[int] | None, op: str) -> CollectiveMessage:
        """Return the collective that gives each rank the sum of its block of rows.

        Blocks go straight to their owner, which adds them in rank order: each rank sends
        (size-1)/size of its bytes, and the result does not depend on timing.
        """
        encoded, op, decode = dtype_casts.for_reducing(value, op, self.size, self.reduces)
        if known is None:
            blocks = even_sizes_in_graph(tf.shape(encoded, tf.int64)[0], self.size)
            count = value.shape[0]
            mine = None if count is None else even_sizes(count, self.size)[self.rank]
        else:
            blocks, mine = tf.constant(known, tf.int64), known[self.rank]
        rows = RowBlocks(encoded, self.moves)
        words = rows.words(tf.stack([blocks] * self.size))
        label = self._label(f"alltoall/{rows.encoded.dtype.name}")

        def finish(parts: list[tf.Tensor]) -> tf.Tensor:
            shape = tf.concat([blocks[self.rank][None], tf.shape(encoded, tf.int64)[1:]], axis=0)
            added = [tf.reshape(rows.decode(part), shape) for part in parts]
            total = functools.reduce(_COMBINE[op], added)
            return tf.ensure_shape(decode(total), [mine, *value.shape[1:]])

        return CollectiveMessage(
            [rows.blocks(blocks, self.size)],
            lambda flat, lane: self._scatter(flat[0], words, op, label),
            finish,
        )

    @_beside_its_messages
    def alltoall(
        self, value: tf.Tensor, splits: Sequence[int] | tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Send block j of the rows to rank j (ragged).

        Args:
            value: Shape `[rows, ...]`.
            splits: Rows for each rank, shape `[size]`; equal blocks when None. If every rank knows
                all others' splits, give them as shape `[size, size]`, row i for rank i; that saves
                a message.

        Returns:
            The received rows in rank order, and how many came from each rank (int32, shape
            `[size]`).

        Raises:
            ValueError: `splits` has a wrong shape or, eagerly, does not add up to the rows.
        """
        value = tf.convert_to_tensor(value)
        dtype_casts.check([value.dtype])
        matrix = checked_splits(value, splits, self.rank, self.size)
        if self.size == 1:
            return value, tf.cast(tf.reshape(matrix, [1]), tf.int32)
        if (card := self._card_for(value.dtype)) is not None:
            return card.alltoall(value, matrix)
        if matrix.shape.rank == 1:
            matrix = self.sizes_of_ranks(matrix, "alltoall", [rows_of(value)])
        rows = RowBlocks(value, self.moves)
        received = matrix[:, self.rank]
        words = rows.words(matrix)
        label = self._label(f"alltoall/{rows.encoded.dtype.name}")
        parts = self._sequencer.run(
            [rows.blocks(matrix[self.rank], self.size)],
            lambda flat: self._alltoall(flat[0], words, label),
            name="all-to-all",
            signature=[rows_of(value)],
        )
        return rows.joined(parts, received), tf.cast(received, tf.int32)

    @overload
    def broadcast(self, value: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]: ...

    @overload
    def broadcast(self, value: tf.Tensor, root: int = 0) -> tf.Tensor: ...

    @_beside_its_messages
    def broadcast(
        self, value: tf.Tensor | Sequence[tf.Tensor], root: int = 0
    ) -> tf.Tensor | list[tf.Tensor]:
        """Give every rank `root`'s value.

        Shapes and dtypes must agree on all ranks.

        Args:
            value: A tensor or a list of them.
            root: The rank whose value counts.

        Returns:
            The same structure as `value`, with `root`'s numbers.

        Raises:
            ValueError: `root` is not a rank.
        """
        if not isinstance(value, (list, tuple)):
            return self.broadcast([value], root)[0]
        self._check_rank(root, "root")
        tensors = [tf.convert_to_tensor(v) for v in value]
        dtype_casts.check(tensor.dtype for tensor in tensors)
        if self.size == 1 or not tensors:
            return tensors
        routed = self._routed(
            tensors, lambda group, places: group.broadcast([tensors[i] for i in places], root)
        )
        if routed is not None:
            return routed
        packed, layout = buckets.pack(tensors, self.bucket_bytes)
        encoded = [dtype_casts.for_moving(bucket, self.moves) for bucket in packed]
        label = self._label("broadcast")
        outputs = self._sequencer.run(
            [item for item, _ in encoded],
            lambda flat: self._broadcast(flat, root, label),
            name="broadcast",
            signature=[*map(shape_of, tensors), f"root {root}"],
        )
        decoded = [
            back(output)[: tf.size(bucket)]
            for output, (_, back), bucket in zip(outputs, encoded, packed, strict=True)
        ]
        return buckets.unpack(decoded, tensors, layout)

    @_beside_its_messages
    def send(self, value: tf.Tensor, dest: int, tag: int = 0) -> None:
        """Send one tensor to `dest`, which calls `recv` with the same tag.

        May wait until `dest` receives, like MPI's send: two ranks that both send first wait for
        each other. Use `alltoall` to exchange in both directions.

        Args:
            value: Any shape; `dest` must know it, and the dtype.
            dest: The rank that receives.
            tag: Tells messages between the same two ranks apart.

        Raises:
            ValueError: `dest` is not another rank.
        """
        self._check_rank(dest, "dest")
        value = tf.convert_to_tensor(value)
        dtype_casts.check([value.dtype])
        if (card := self._card_for(value.dtype)) is not None and not self._lane_name:
            return card.send(value, dest, tag)
        encoded, _ = dtype_casts.for_moving(tf.reshape(value, [-1]), self.moves)
        self._sequencer.run(
            [encoded],
            lambda flat: [self._send(flat[0], dest, tag)],
            name=f"send to {dest}",
            of_pair=True,
        )
        return None

    @_beside_its_messages
    def recv(
        self, shape: Sequence[int], dtype: tf.DType | str, source: int, tag: int = 0
    ) -> tf.Tensor:
        """Receive one tensor of known shape and dtype from `source`.

        Args:
            shape: Shape of the tensor sent.
            dtype: Dtype of the tensor sent, a `tf.DType` or its name.
            source: The rank that sends.
            tag: The sender's tag.

        Returns:
            The tensor.

        Raises:
            ValueError: `source` is not another rank.
        """
        self._check_rank(source, "source")
        like = tf.zeros(shape, dtype)
        dtype_casts.check([like.dtype])
        if (card := self._card_for(like.dtype)) is not None and not self._lane_name:
            return card.recv(shape, dtype, source, tag)
        encoded, decode = dtype_casts.for_moving(tf.reshape(like, [-1]), self.moves)
        received = self._sequencer.run(
            [encoded],
            lambda flat: [self._receive(flat[0], source, tag)],
            sends=False,
            name=f"receive from {source}",
            of_pair=True,
        )[0]
        return tf.reshape(decode(received)[: tf.size(like)], shape)

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            message = f"{what}={rank} is not a rank of {self.size} (0 to {self.size - 1})"
            raise ValueError(at_rank(self.rank, message))
        if what != "root" and rank == self.rank:
            raise ValueError(at_rank(self.rank, f"{what}={rank} is this rank itself"))

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open the links that `send` and `recv` will use.

        Every rank calls it, with the same pairs.

        Only Horovod beyond two ranks needs it; elsewhere links open by themselves.

        Args:
            pairs: Pairs of ranks, each in both directions.
        """
        del pairs

    @_beside_its_messages
    def barrier(self) -> None:
        """Return only after every rank has called it."""
        if self.size == 1:
            return
        label = self._label("barrier")
        ready = [tf.zeros([1], tf.int32)]
        self._sequencer.run(ready, lambda flat: self._reduce(flat, "sum", label), name="barrier")

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Make one new communicator per `color`; ranks in it are ordered by `(key, rank)`.

        Args:
            color: Ranks of the same color form a group.
            key: Orders ranks within the group; this rank's number when None.

        Returns:
            The communicator of this rank's group.
        """
        self._splits += 1
        wishes = self.allgather_object((color, self.rank if key is None else key))
        groups: dict[int, list[int]] = {}
        for rank in sorted(range(len(wishes)), key=lambda rank: wishes[rank][1]):
            groups.setdefault(wishes[rank][0], []).append(rank)
        return self._group(groups[color], list(groups.values()))

    # Order and names of collectives.

    @property
    def _sequencer(self) -> CollectiveSequencer:
        name = self._lane_name
        if name not in self._sequencers:
            order = self._order_of_card()
            self._sequencers[name] = CollectiveSequencer(
                self.device, timed=not name, order=order, meet=self.meet
            )
        return self._sequencers[name]

    def keep_to_thread(self) -> None:
        """Refuse collectives outside of graphs in other threads than this one, from now on.

        Those of two threads would mix, in another order on each rank.
        """
        self._thread = threading.current_thread()

    def meet(self, name: str, signature: Sequence[str] = ()) -> None:
        """Raise on all ranks if some are in another collective, before any waits in one.

        All collectives outside of graphs begin with it. Afterwards all ranks may call another one.

        Args:
            name: The kind of the collective.
            signature: What all ranks must give alike: shapes and types, then the op or root.

        Raises:
            CommunicatorError: Some ranks are in another collective or give something else; or this
                thread has no part in the communicator's collectives.
        """
        if self.host is not None:
            return self.host.meet(name, signature)
        thread = threading.current_thread()
        if self._thread not in (None, thread):
            message = (
                f"{script_line()} is in {a(name)} in the thread {thread.name!r}, and the thread "
                f"{self._thread.name!r} takes part in this communicator's collectives: their order "
                "would differ by rank. Let that thread make a communicator for this one, by "
                "communicator.split(0) on all ranks"
            )
            raise CommunicatorError(at_rank(self.rank, message))
        self._met += 1
        number = self._met
        try:
            with tf.device(self.device):
                mine = tf.constant(
                    [number, zlib.crc32(repr([name, *signature]).encode())], tf.int64
                )
                told_by_ranks = tf.stack(self._gather_sizes(mine, "eager/meet")).numpy()
        except (CommunicatorError, tf.errors.OpError) as error:
            error.add_note(
                f"rank {self.rank} waited for the others in {a(name)}, at {script_line()}: each "
                "rank must call fit, evaluate, predict and what saves, not rank 0 alone"
            )
            raise
        if (told_by_ranks != told_by_ranks[0]).any():
            progress.refused()
            self._met = int(told_by_ranks[:, 0].max())  # which is the same on all ranks
            where = f"number {number} outside of steps, at {script_line()}"
            places = self.allgather_object(Call(name, list(signature), where))
            raise CommunicatorError(at_rank(self.rank, differing(places)))
        return None

    def _order_of_card(self) -> tf.Tensor | None:
        """Return the resource that orders the messages of all groups; None: each has its order."""
        return None

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Give the collectives traced inside names of their own, beside those of other functions.

        Args:
            name: The same on every rank; nested names are joined.
        """
        joined = f"{self._sequence}/{name}" if self._sequence else name
        of_cards = (
            contextlib.nullcontext()
            if self.gpu_transport is None
            else self.gpu_transport.sequence(name)
        )
        with temporarily(self, _sequence=joined), of_cards:
            yield

    def concurrent(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Let the collectives traced inside run beside all others.

        Collectives in a graph run in the order they were traced. Concurrent ones are ordered only
        among collectives of the same name, so they start when their values are ready.
        `seconds_communicating` leaves them out: the step meanwhile waits for others.

        From GPU to GPU all messages have one order. What is sent to one rank out of turn would wait
        for a message that comes later there, and goes through the host.

        Args:
            name: The same on every rank.
        """
        return temporarily(self, _lane_name=name)

    def _label(self, kind: str) -> str:
        """Return a name for the next collective, the same one on every rank.

        Eager collectives run one after the other, so all of a kind share one name: reuse is safe
        once the first use is over, and transports, which remember names, need not remember more.
        """
        if tf.executing_eagerly():
            return f"eager/{kind}"
        # One rank may trace a function again when others do not, for a slice with fewer rows, and
        # must find the same names. So collectives are counted within the graph of the innermost
        # function: a function that it calls may not be traced again. The digits in a graph's name
        # differ by rank.
        graph = tf.compat.v1.get_default_graph()
        while getattr(graph, "is_control_flow_graph", False):
            graph = graph.outer_graph
        function = re.sub(r"\d", "", getattr(graph, "name", ""))
        place = f"{self._sequence or 'loop'}/{function}/{self._lane_name}/{kind}"
        places = self._labels.setdefault(graph, collections.Counter())
        places[place] += 1
        return f"{place}/{places[place]}"

    def next_number(self) -> int:
        """Return a new number for the name of a sequence, the same on every rank.

        The communicator counts, since two strategies of a process may share it.
        """
        self._last_number += 1
        return self._last_number

    def resynchronize(self) -> None:
        """Agree on the number that names later sequences. Every rank calls it.

        For ranks that go on after an exception: it may have stopped some of them before they had
        called `next_number` as often as the others.
        """
        number = tf.constant(self._last_number, tf.int64)
        self._met = 0
        self._last_number = int(self.allreduce(number, "max"))
        if self.gpu_transport is not None:
            self.gpu_transport.resynchronize()

    # Python values are sent as bytes by the tensor collectives.

    def broadcast_object(self, value: Value | None = None, root: int = 0) -> Value:
        """Give every rank `root`'s Python value, see `dtk.communicators.objects`.

        Args:
            value: The value to send; ignored on all ranks but `root`.
            root: The rank whose value counts.

        Returns:
            The value of `root`.

        Raises:
            CommunicatorError: On every rank, if `root`'s value cannot be sent or read.
        """
        if self.size == 1 and root == 0:
            return cast(Value, value)
        payload, failure = _written(value) if self.rank == root else (b"", None)
        length = int(self.broadcast(tf.constant(len(payload), tf.int64), root))
        self._check_written([length], failure, first=root)
        rows = np.frombuffer(payload.ljust(length), np.uint8)
        return cast(Value, _read(self.broadcast(tf.constant(rows), root)))

    def allgather_object(self, value: Value) -> list[Value]:
        """Return one Python value per rank, in rank order, on every rank.

        Args:
            value: This rank's value; see `dtk.communicators.objects`.

        Raises:
            CommunicatorError: On every rank, if one of the values cannot be sent or read.
        """
        if self.size == 1:
            return [value]
        written, failure = _written(value)
        payload = np.frombuffer(written, np.uint8)
        lengths = self.allgather(tf.constant([payload.size], tf.int64), [1] * self.size).numpy()
        self._check_written(lengths.tolist(), failure)
        rows = self.allgather(tf.constant(payload), lengths.tolist()).numpy()
        ends = np.cumsum(lengths)
        values = [_read(rows[end - n : end]) for n, end in zip(lengths, ends, strict=True)]
        return cast(list[Value], values)

    def _check_written(
        self, lengths: Sequence[int], failure: Exception | None, first: int = 0
    ) -> None:
        """Raise on every rank if one could not write its value: that rank sends no byte."""
        if failure is not None:
            raise failure
        if 0 in lengths:
            rank = first + lengths.index(0)
            raise CommunicatorError(
                at_rank(self.rank, f"rank {rank} has a value that cannot be sent, and says why")
            )

    def learn(self, alike: bool, costs: Costs | None) -> None:
        """Set whether ranks compute alike, and what messages take.

        Every rank calls it, with equal arguments: the order of sums depends on them.

        Args:
            alike: Whether all ranks compute with the same kind of processor.
            costs: What a message and a byte take; None if that was not measured.
        """
        self.alike, self.costs = alike, costs
        if self.gpu_transport is not None:
            self.gpu_transport.learn(alike, costs)

    def link(self, device: str) -> None:  # noqa: B027
        """Send floats of 16 and 32 bits from GPU to GPU from now on, if the backend can.

        Every rank calls it, with a GPU of its own.

        Args:
            device: This rank's GPU, such as "/gpu:0".
        """

    def close(self) -> None:  # noqa: B027
        """Release what the communicator holds; safe to call twice."""


def _written(value: object) -> tuple[bytes, Exception | None]:
    """Return a value as bytes for other ranks; or no bytes, and the error."""
    try:
        return objects.dumps(value), None
    except Exception as error:  # pickling raises whatever the value's class raises
        return b"", error


def _read(payload: tf.Tensor | Array) -> object:
    return objects.loads(np.asarray(payload, np.uint8).tobytes())
