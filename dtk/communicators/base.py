"""The communicator: ranks that exchange tensors, over one backend or another.

Names and semantics follow MPI. `Communicator` turns what users pass (lists, `IndexedSlices`,
scalars, any shape, any dtype, unequal rows) into flat tensors of the backend's own dtypes, and
back. A `Transport` moves these: each backend has one through the host's memory, and some have
another from GPU to GPU.

One suite (tests/communicators) holds every backend to the same, at world sizes 1, 2 and 3, eagerly
and inside `tf.function`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ParamSpec, TypeVar, cast

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.cluster import progress
from dtk.cluster.place import Place
from dtk.communicators import aligned_slices, buckets, dtype_casts, objects
from dtk.communicators.aligned_slices import AlignedSlices, with_values
from dtk.communicators.costs import Costs
from dtk.communicators.dtype_casts import REDUCE_OPS as REDUCE_OPS
from dtk.communicators.meeting import Call, a, differing, rows_of, shape_of
from dtk.communicators.row_blocks import RowBlocks, checked_counts, checked_splits
from dtk.communicators.sequencer import CollectiveMessage, Span
from dtk.communicators.transport import Transport
from dtk.errors import CommunicatorError, at_rank, script_line
from dtk.even_division import even_sizes, even_sizes_in_graph
from dtk.nests import Array, Function
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


def _collective(method: Callable[_Given, Value]) -> Callable[_Given, Value]:
    """Keep AutoGraph from rewriting a collective; outside of graphs, compute on the host."""

    @functools.wraps(method)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> Value:
        if not tf.executing_eagerly():
            return method(*args, **kwargs)
        with tf.device(cast(Communicator, args[0]).device):
            return method(*args, **kwargs)

    return unconverted(run)


class Communicator:
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
        transport: Moves tensors through the host's memory.
        hosts: One host name per rank, in rank order.

    Attributes:
        host_transport: Moves tensors through the host's memory.
        gpu_transport: Moves floats of 16 and 32 bits from GPU to GPU; None where `link` was not
            called, or the backend cannot.
        local_rank: Index among the ranks of the same host.
        local_size: Number of ranks on this host.
        hosts: One host name per rank, in rank order.
        alike: Whether all ranks compute with the same kind of processor and as many threads, so
            that equal operations give equal bits; False until `learn` is called.
        place: The launcher's facts, if the communicator spans all ranks of a job; None if it
            spans a part of them or this process alone.
    """

    alike: bool = False
    place: Place | None = None
    bucket_bytes = buckets.DEFAULT_LIMIT

    def __init__(self, transport: Transport, hosts: Sequence[str]) -> None:
        self.host_transport = transport
        self.gpu_transport: Transport | None = None
        self.set_hosts(hosts)
        self._sequence = ""
        self._splits = 0
        self._labels = weakref.WeakKeyDictionary[tf.Graph, collections.Counter[str]]()
        self._last_number = -1
        self._thread: threading.Thread | None = None  # None: collectives may be in any
        self._met = 0  # collectives outside of graphs so far

    @property
    def name(self) -> str:
        """Name of the backend."""
        return self.host_transport.name

    @property
    def rank(self) -> int:
        """This process's index in the group, `0 <= rank < size`."""
        return self.host_transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.host_transport.size

    @property
    def device(self) -> str:
        """Where messages through the host are."""
        return self.host_transport.device

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
        return self.host_transport.costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self.host_transport.costs = costs

    @property
    def _transports(self) -> list[Transport]:
        gpus = [] if self.gpu_transport is None else [self.gpu_transport]
        return [*gpus, self.host_transport]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes this rank has handed to its transports so far, padding included.

        Counted when a collective runs, so a `tf.function` counts at every execution. They
        may move more or less: a ring all-reduce moves 2(size-1)/size of each byte.
        """
        return sum(transport.bytes for transport in self._transports)

    @property
    def seconds_communicating(self) -> float:
        """Seconds this rank has spent in collectives so far, waiting for other ranks included.

        The time of a collective begins when this rank's own values are ready. Collectives in graphs
        count 0 if TensorFlow was asked to be deterministic: it then has no clock in graphs.
        """
        return sum(transport.seconds for transport in self._transports)

    @property
    def eager_seconds_communicating(self) -> float:
        """The part of `seconds_communicating` that was spent outside of graphs."""
        return sum(transport.eager_seconds for transport in self._transports)

    def spans(self) -> list[Span]:
        """Return when each message of a graph was last sent, where `dtk run` asked for steps."""
        return [span for transport in self._transports for span in transport.spans()]

    @functools.cached_property
    def watched(self) -> tf.Variable:
        """A scalar zero that gradient tapes watch because it is a variable.

        Every rank differentiates what is computed from it, see `dtk.layers.collectives`.
        """
        with tf.init_scope(), tf.device(placement.messages()):
            return tf.Variable(0.0, trainable=True, name="watched")

    @_collective
    def allreduce(self, value: Value, op: str = "sum") -> Value:
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
            return cast(Value, results)
        return cast(Value, self._by_transport(results, functools.partial(self._allreduce, op=op)))

    def _allreduce(
        self, transport: Transport, values: list[tf.Tensor | tf.IndexedSlices], op: str
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        results = list(values)
        tables = [i for i in range(len(results)) if aligned_slices.is_gathered(results[i])]
        dense = [i for i in range(len(results)) if i not in tables]
        summed = [self._row_sum(transport, results[i], op) for i in tables]
        aligned = {i: results[i] for i in dense if isinstance(results[i], AlignedSlices)}
        whole = [aligned[i].values if i in aligned else results[i] for i in dense]
        digits = [aligned_slices.digits_of(list(aligned.values()))] if aligned else []
        messages = [self._reduction(transport, [*whole, *digits], op)] if dense else []
        signature = [*map(shape_of, whole), op]
        reduced = self._run(transport, [*messages, *summed], "all-reduce", signature)
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

    def _by_transport(
        self,
        tensors: Sequence[tf.Tensor],
        send: Function[list[tf.Tensor]],
        *facts: Sequence[object],
    ) -> list[tf.Tensor]:
        """Send what goes from GPU to GPU, then the others, with the facts of each tensor."""
        chosen = [self._transport_of(tensor.dtype) for tensor in tensors]
        results: dict[int, tf.Tensor] = {}
        for transport in self._transports:
            places = [i for i, one in enumerate(chosen) if one is transport]
            if places:
                given = [[values[i] for i in places] for values in (tensors, *facts)]
                with self._beside(transport):
                    results.update(zip(places, send(transport, *given), strict=True))
        return [results[i] for i in range(len(tensors))]

    def adds_up(self, dtype: tf.DType) -> bool:
        """Return whether ranks add up values of a dtype as they are, and not in another dtype.

        Args:
            dtype: The dtype of the values.
        """
        return dtype in self._transport_of(dtype).reduces

    def _transport_of(self, dtype: tf.DType) -> Transport:
        if self.gpu_transport is not None and placement.is_on_card(dtype):
            return self.gpu_transport
        return self.host_transport

    def _beside(self, transport: Transport) -> contextlib.AbstractContextManager[None]:
        """Compute on the device of a transport's messages; in a graph, pack floats where they are.

        Otherwise TensorFlow takes the bytes of the host to the GPU, shifts them there and brings
        them back.
        """
        through_host = self.gpu_transport is not None and transport is self.host_transport
        if tf.executing_eagerly() or through_host:
            return tf.device(transport.device)
        return contextlib.nullcontext()

    def _run(
        self,
        transport: Transport,
        messages: Sequence[CollectiveMessage],
        name: str,
        signature: Sequence[str] = (),
    ) -> list[tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]:
        """Run a collective of several messages; outside of graphs, the ranks `meet` first."""
        meet = functools.partial(self.meet, name, signature)
        return transport.sequencer.run_together(messages, name, meet)

    def _reduction(
        self, transport: Transport, tensors: list[tf.Tensor], op: str
    ) -> CollectiveMessage:
        """Return the collective that reduces dense tensors in buckets."""
        limit = buckets.limit_for(tensors, self.bucket_bytes, self.costs)
        packed, layout = buckets.pack(tensors, limit)
        encoded = [
            dtype_casts.for_reducing(one, op, self.size, transport.reduces) for one in packed
        ]
        # Only bool changes its op, so there are one or two.
        labels = {
            one: self._label(f"reduce/{one}") for one in dict.fromkeys(item[1] for item in encoded)
        }

        def send(flat: list[tf.Tensor], lane: int) -> list[tf.Tensor]:
            del lane
            outputs = list(flat)
            for one, label in labels.items():
                places = [i for i, item in enumerate(encoded) if item[1] == one]
                reduced = transport.reduce([flat[i] for i in places], one, label)
                for i, output in zip(places, reduced, strict=True):
                    outputs[i] = output
            return outputs

        def finish(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
            decoded = [decode(one) for (_, _, decode), one in zip(encoded, outputs, strict=True)]
            return buckets.unpack(decoded, tensors, layout)

        return CollectiveMessage([item[0] for item in encoded], send, finish)

    def _row_sum(
        self, transport: Transport, slices: tf.IndexedSlices, op: str
    ) -> CollectiveMessage:
        """Return the collective that gathers slices, and adds up aligned ones."""
        # The row numbers of a step are known long before the gradients of the rows.
        with self.concurrent("rows"):
            counts = self._count_rows(slices.indices, [rows_of(slices.values), op])
            indices = self.allgather(slices.indices, counts)
        gathering = self._gathering(transport, slices.values, counts)

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

    @_collective
    def allgather(
        self,
        value: Value,
        rows: Sequence[int] | tf.Tensor | Sequence[Sequence[int] | tf.Tensor] | None = None,
    ) -> Value:
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
            return cast(Value, tensors)
        return cast(Value, self._by_transport(tensors, self._allgather, known))

    def _allgather(
        self, transport: Transport, tensors: list[tf.Tensor], known: list[tf.Tensor | None]
    ) -> list[tf.Tensor]:
        counts = [
            self._count_rows(tensor, [rows_of(tensor)]) if of_one is None else of_one
            for tensor, of_one in zip(tensors, known, strict=True)
        ]
        messages = [self._gathering(transport, *one) for one in zip(tensors, counts, strict=True)]
        return self._run(transport, messages, "all-gather", list(map(rows_of, tensors)))

    def _gathering(
        self, transport: Transport, tensor: tf.Tensor, counts: tf.Tensor
    ) -> CollectiveMessage:
        """Return the collective that gathers the rows of all ranks, `counts` for each."""
        rows = RowBlocks(tensor, transport.moves)
        label = self._label(f"gather/{rows.encoded.dtype.name}")
        return CollectiveMessage(
            [rows.encoded],
            lambda flat, lane: transport.gather(flat[0], rows.words(counts), label, lane),
            lambda parts: rows.joined(parts, counts),
        )

    def _count_rows(self, tensor: tf.Tensor, signature: Sequence[str]) -> tf.Tensor:
        return self.sizes_of_ranks(tf.shape(tensor, tf.int64)[:1], "gather", signature)[:, 0]

    @_collective
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
        transport, label = self.host_transport, self._label(f"{kind}/sizes")
        message = CollectiveMessage(
            [mine],
            lambda flat, lane: transport.gather_sizes(flat[0], label),
            lambda rows: tf.ensure_shape(tf.stack(rows), [self.size, *mine.shape]),
        )
        with self._beside(transport):
            return self._run(transport, [message], f"count of rows to {kind}", signature)[0]

    @_collective
    def reduce_scatter(
        self,
        value: Value,
        op: str = "sum",
        rows: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    ) -> Value:
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
            return cast(Value, tensors)
        send = functools.partial(self._reduce_scatter, op=op)
        return cast(Value, self._by_transport(tensors, send, blocks))

    def _reduce_scatter(
        self,
        transport: Transport,
        tensors: list[tf.Tensor],
        blocks: list[list[int] | None],
        op: str,
    ) -> list[tf.Tensor]:
        messages = [
            self._scattering(transport, *one, op) for one in zip(tensors, blocks, strict=True)
        ]
        signature = [*map(shape_of, tensors), op]
        return self._run(transport, messages, "reduce-scatter", signature)

    def _checked_blocks(self, value: tf.Tensor, rows: Sequence[int]) -> list[int]:
        if len(rows) != self.size or value.shape[0] not in (None, sum(rows)):
            message = (
                f"reduce_scatter got rows={list(rows)} for {value.shape[0]} rows, expected one "
                f"number for each of {self.size} ranks, that add up to the rows"
            )
            raise ValueError(at_rank(self.rank, message))
        return list(rows)

    def _scattering(
        self, transport: Transport, value: tf.Tensor, known: list[int] | None, op: str
    ) -> CollectiveMessage:
        """Return the collective that gives each rank the sum of its block of rows.

        Blocks go straight to their owner, which adds them in rank order: each rank sends
        (size-1)/size of its bytes, and the result does not depend on timing.
        """
        encoded, op, decode = dtype_casts.for_reducing(value, op, self.size, transport.reduces)
        if known is None:
            blocks = even_sizes_in_graph(tf.shape(encoded, tf.int64)[0], self.size)
            count = value.shape[0]
            mine = None if count is None else even_sizes(count, self.size)[self.rank]
        else:
            blocks, mine = tf.constant(known, tf.int64), known[self.rank]
        rows = RowBlocks(encoded, transport.moves)
        words = rows.words(tf.stack([blocks] * self.size))
        label = self._label(f"alltoall/{rows.encoded.dtype.name}")

        def finish(parts: list[tf.Tensor]) -> tf.Tensor:
            shape = tf.concat([blocks[self.rank][None], tf.shape(encoded, tf.int64)[1:]], axis=0)
            added = [tf.reshape(rows.decode(part), shape) for part in parts]
            total = functools.reduce(_COMBINE[op], added)
            return tf.ensure_shape(decode(total), [mine, *value.shape[1:]])

        return CollectiveMessage(
            [rows.blocks(blocks, self.size)],
            lambda flat, lane: transport.scatter(flat[0], words, op, label),
            finish,
        )

    @_collective
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
        transport = self._transport_of(value.dtype)
        with self._beside(transport):
            matrix = checked_splits(value, splits, self.rank, self.size)
            if self.size == 1:
                return value, tf.cast(tf.reshape(matrix, [1]), tf.int32)
            if matrix.shape.rank == 1:
                matrix = self.sizes_of_ranks(matrix, "alltoall", [rows_of(value)])
            rows = RowBlocks(value, transport.moves)
            received = matrix[:, self.rank]
            words = rows.words(matrix)
            label = self._label(f"alltoall/{rows.encoded.dtype.name}")
            message = CollectiveMessage(
                [rows.blocks(matrix[self.rank], self.size)],
                lambda flat, lane: transport.alltoall(flat[0], words, label),
                lambda parts: rows.joined(parts, received),
            )
            (joined,) = self._run(transport, [message], "all-to-all", [rows_of(value)])
            return joined, tf.cast(received, tf.int32)

    @_collective
    def broadcast(self, value: Value, root: int = 0) -> Value:
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
            return cast(Value, tensors)
        return cast(
            Value, self._by_transport(tensors, functools.partial(self._broadcast, root=root))
        )

    def _broadcast(
        self, transport: Transport, tensors: list[tf.Tensor], root: int
    ) -> list[tf.Tensor]:
        packed, layout = buckets.pack(tensors, self.bucket_bytes)
        encoded = [dtype_casts.for_moving(bucket, transport.moves) for bucket in packed]
        label = self._label("broadcast")

        def finish(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
            decoded = [
                back(output)[: tf.size(bucket)]
                for output, (_, back), bucket in zip(outputs, encoded, packed, strict=True)
            ]
            return buckets.unpack(decoded, tensors, layout)

        message = CollectiveMessage(
            [item for item, _ in encoded],
            lambda flat, lane: transport.broadcast(flat, root, label),
            finish,
        )
        signature = [*map(shape_of, tensors), f"root {root}"]
        (received,) = self._run(transport, [message], "broadcast", signature)
        return received

    @_collective
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
        transport = self._transport_of_pair(value.dtype)
        with self._beside(transport):
            encoded, _ = dtype_casts.for_moving(tf.reshape(value, [-1]), transport.moves)
            transport.sequencer.run(
                [encoded],
                lambda flat: [transport.send(flat[0], dest, tag)],
                name=f"send to {dest}",
            )

    @_collective
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
        dtype = tf.as_dtype(dtype)
        dtype_casts.check([dtype])
        transport = self._transport_of_pair(dtype)
        with self._beside(transport):
            like = tf.zeros(shape, dtype)
            encoded, decode = dtype_casts.for_moving(tf.reshape(like, [-1]), transport.moves)
            received = transport.sequencer.run(
                [encoded],
                lambda flat: [transport.receive(flat[0], source, tag)],
                sends=False,
                name=f"receive from {source}",
            )[0]
            return tf.reshape(decode(received)[: tf.size(like)], shape)

    def _transport_of_pair(self, dtype: tf.DType) -> Transport:
        """Return what carries a message of two ranks: see `concurrent`."""
        is_concurrent = self.host_transport.lane_name != ""
        return self.host_transport if is_concurrent else self._transport_of(dtype)

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
        self.host_transport.connect(pairs)

    @_collective
    def barrier(self) -> None:
        """Return only after every rank has called it."""
        if self.size == 1:
            return
        transport, label = self.host_transport, self._label("barrier")
        with self._beside(transport):
            message = CollectiveMessage(
                [tf.zeros([1], tf.int32)],
                lambda flat, lane: transport.reduce(flat, "sum", label),
                list,
            )
            self._run(transport, [message], "barrier")

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
        ranks = groups[color]
        transport = self.host_transport.group(ranks, list(groups.values()), self._splits)
        part = Communicator(transport, [self.hosts[rank] for rank in ranks])
        if self.gpu_transport is not None:
            part.link(self.gpu_transport.device)
        return part

    # Order and names of collectives.

    def keep_to_thread(self) -> None:
        """Refuse collectives outside of graphs in other threads than this one, from now on.

        Those of two threads would mix, in another order on each rank.
        """
        self._thread = threading.current_thread()
        progress.trains_here()

    def is_kept_to(self, thread: threading.Thread | None) -> bool:
        """Return whether `keep_to_thread` was called in a thread.

        Args:
            thread: Any thread; None for one that is over.
        """
        return thread is not None and thread is self._thread

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
                told_by_ranks = tf.stack(
                    self.host_transport.gather_sizes(mine, "eager/meet")
                ).numpy()
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

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Give the collectives traced inside names of their own, beside those of other functions.

        Args:
            name: The same on every rank; nested names are joined.
        """
        joined = f"{self._sequence}/{name}" if self._sequence else name
        with temporarily(self, _sequence=joined):
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
        return temporarily(self.host_transport, lane_name=name)

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
        place = f"{self._sequence or 'loop'}/{function}/{self.host_transport.lane_name}/{kind}"
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
        self._check_rank(root, "root")
        is_absent = self.host_transport.is_pretended and root != self.rank
        if self.size == 1 or is_absent:
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

    def link(self, device: str) -> None:
        """Send floats of 16 and 32 bits from GPU to GPU from now on, if the backend can.

        Every rank calls it, with a GPU of its own.

        Args:
            device: This rank's GPU, such as "/gpu:0".
        """
        if self.gpu_transport is None:
            self.gpu_transport = self.host_transport.linked(device)


def _written(value: object) -> tuple[bytes, Exception | None]:
    """Return a value as bytes for other ranks; or no bytes, and the error."""
    try:
        return objects.dumps(value), None
    except Exception as error:  # pickling raises whatever the value's class raises
        return b"", error


def _read(payload: tf.Tensor | Array) -> object:
    return objects.loads(np.asarray(payload, np.uint8).tobytes())
