"""The base of backends: it turns users' structures into a few flat primitives.

A backend moves one-dimensional tensors of its own dtypes. This class turns users' values (lists,
`IndexedSlices`, scalars, any shape, any dtype, unequal rows) into such tensors and back:

    allreduce          -> _reduce(buckets, op)
    allgather          -> _gather(flat, sizes)         ragged: sizes differ by rank
    alltoall           -> _exchange(flat, sizes)       ragged: a size for each peer
    reduce_scatter     -> _exchange, then a local sum in rank order
    broadcast          -> _broadcast(buckets, root)
    send, recv         -> _send, _receive
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import tensorflow as tf

from dtk import placement
from dtk.communicators import buckets, wire
from dtk.communicators.base import AlignedSlices, Communicator, with_values
from dtk.communicators.bucket_reduction import BucketReduction, mean
from dtk.communicators.messages import CollectiveMessage, run_together
from dtk.communicators.row_blocks import RowBlocks, checked_counts, checked_splits
from dtk.communicators.sequencer import CollectiveSequencer
from dtk.errors import at_rank
from dtk.even_division import even_sizes, even_sizes_in_graph

LOCAL_REDUCE = {
    "sum": tf.reduce_sum,
    "mean": tf.reduce_sum,
    "min": tf.reduce_min,
    "max": tf.reduce_max,
    "prod": tf.reduce_prod,
}


@dataclasses.dataclass
class _Sequence:
    """A name, and the position of the next collective under it."""

    name: str
    position: int = 0


class PackedCommunicator(Communicator):
    """Base of the backends that really send."""

    # Dtypes that the backend adds up, and dtypes that it moves, without conversion.
    reduces: frozenset[tf.DType] = frozenset()
    moves: frozenset[tf.DType] = frozenset()

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        bucket_bytes: int = buckets.DEFAULT_LIMIT,
        device: str | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(hosts)
        self.set_hosts(hosts)
        self.bucket_bytes = bucket_bytes
        self._device = device or placement.messages()
        self._sequencer = CollectiveSequencer(self._device)
        self._concurrent: dict[str, CollectiveSequencer] = {}
        self._sequence: _Sequence | None = None
        self._traced = 0

    def set_hosts(self, hosts: Sequence[str]) -> None:
        """Set which host each rank is on, once that is known."""
        self.hosts = tuple(hosts)
        self.local_rank = self.hosts[: self.rank].count(self.hosts[self.rank])
        self.local_size = self.hosts.count(self.hosts[self.rank])

    @property
    def bytes_sent(self) -> int:
        """Payload bytes handed to the transport so far."""
        return sum(sequencer.bytes for sequencer in (self._sequencer, *self._concurrent.values()))

    @property
    def seconds_communicating(self) -> float:
        """See `Communicator.seconds_communicating`."""
        return self._sequencer.seconds

    # -- methods that a backend provides

    @abc.abstractmethod
    def _reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        """Reduce flat tensors of dtypes in `reduces`; op is never "mean"."""

    @abc.abstractmethod
    def _gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        """Return one flat tensor per rank; all ranks know their `sizes` (int64, shape [size]).

        Gathers of other lanes may be under way.
        """

    @abc.abstractmethod
    def _gather_sizes(self, sizes: tf.Tensor, label: str) -> tf.Tensor:
        """Stack every rank's small int64 vector: shape [size, n]."""

    @abc.abstractmethod
    def _exchange(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Send `sizes[rank, j]` elements to rank j; return the elements from each rank."""

    @abc.abstractmethod
    def _broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        """Broadcast flat tensors of dtypes in `moves`."""

    @abc.abstractmethod
    def _send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        """Send; return any tensor that becomes ready when the send is over."""

    @abc.abstractmethod
    def _receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        """Receive a flat tensor with the shape and dtype of `room`."""

    # -- naming

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Name the collectives traced inside by (name, position).

        Nested names are joined; see `Communicator.sequence`.
        """
        outer = self._sequence
        self._sequence = _Sequence(f"{outer.name}/{name}" if outer else name)
        try:
            yield
        finally:
            self._sequence = outer

    @contextlib.contextmanager
    def concurrent(self, name: str) -> Iterator[None]:
        """See `Communicator.concurrent`."""
        outer = self._sequencer
        if name not in self._concurrent:
            self._concurrent[name] = CollectiveSequencer(self._device, timed=False)
        self._sequencer = self._concurrent[name]
        try:
            yield
        finally:
            self._sequencer = outer

    def _counters(self) -> list[int]:
        return [self._traced, *super()._counters()]

    def _set_counters(self, counters: list[int]) -> None:
        self._traced, *others = counters
        super()._set_counters(others)

    def _label(self, kind: str) -> str:
        """Return a name for the next collective, the same one on every rank.

        Eager collectives run one after the other, so all of a kind share one name: reuse is safe
        once the first use is over, and transports, which remember names, need not remember more.
        """
        if tf.executing_eagerly():
            return f"eager/{kind}"
        if self._sequence is not None:
            position = self._sequence.position
            self._sequence.position += 1
            return f"in/{self._sequence.name}/{position}"
        self._traced += 1
        return f"traced/{self._traced}"

    # -- the contract

    def allreduce(
        self, value: tf.Tensor | Sequence[tf.Tensor], op: str = "sum"
    ) -> tf.Tensor | list[tf.Tensor]:
        """See `Communicator.allreduce`."""
        if not isinstance(value, (list, tuple)):
            return self.allreduce([value], op)[0]
        results = [v if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v) for v in value]
        wire.check_all((item.dtype for item in results), op)
        tables = [i for i, item in enumerate(results) if _is_gathered(item)]
        dense = [i for i in range(len(results)) if i not in tables]
        summed = [self._row_sum(results[i], op) for i in tables]
        aligned = {i: results[i] for i in dense if isinstance(results[i], AlignedSlices)}
        whole = [aligned[i].values if i in aligned else results[i] for i in dense]
        messages = [self._reduction(whole, op)] if dense else []
        reduced = run_together([*messages, *summed], self._sequencer)
        if dense:
            for i, tensor in zip(dense, reduced.pop(0), strict=True):
                results[i] = with_values(aligned[i], tensor) if i in aligned else tensor
        for i, slices in zip(tables, reduced, strict=True):
            results[i] = slices
        return results

    def _reduction(self, tensors: list[tf.Tensor], op: str) -> CollectiveMessage:
        limit = buckets.limit_for(tensors, self.bucket_bytes, self.costs)
        reduction = BucketReduction(tensors, op, limit, self.reduces)
        return reduction.message(self._reduce, self.size, self._label)

    def _row_sum(self, slices: tf.IndexedSlices, op: str) -> CollectiveMessage:
        if op not in ("sum", "mean"):
            raise ValueError(
                at_rank(self.rank, f"op {op!r} on IndexedSlices; only 'sum' and 'mean' make sense")
            )
        # The row numbers of a step are known long before the gradients of the rows.
        with self.concurrent("rows"):
            counts = self._count_rows(slices.indices)
            indices = self.allgather(slices.indices, counts)
        gathering = self._gathering(slices.values, counts)

        def finish(parts: list[tf.Tensor]) -> tf.IndexedSlices:
            values = gathering.finish(parts)
            aligned = isinstance(slices, AlignedSlices)
            if aligned:
                values = tf.reduce_sum(self._aligned(values, indices, slices), 0)
            if op == "mean":
                values = mean(values, self.size)
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
        message = (
            "a table is looked up at other places on another rank, though its indices depend on no "
            "row of the batch (sequences are of other lengths there?). Pad the whole batch to one "
            "length before it is cut, in the dataset"
        )
        with tf.control_dependencies([tf.debugging.Assert(equal, [at_rank(self.rank, message)])]):
            shape = tf.concat([[self.size], tf.shape(mine.values)], 0)
            return tf.reshape(values, shape)

    def allgather(
        self, value: tf.Tensor, rows: Sequence[int] | tf.Tensor | None = None
    ) -> tf.Tensor:
        """See `Communicator.allgather`."""
        tensor = tf.convert_to_tensor(value)
        wire.check(tensor.dtype)
        tensor = tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor
        if rows is None:
            counts = self._count_rows(tensor)
        elif tf.is_tensor(rows):
            counts = tf.ensure_shape(tf.cast(rows, tf.int64), [self.size])
        else:
            counts = checked_counts(tensor, rows, self.rank, self.size)
        return run_together([self._gathering(tensor, counts)], self._sequencer)[0]

    def _count_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        return self._sizes(tf.shape(tensor, tf.int64)[:1], "gather")[:, 0]

    def _gathering(self, tensor: tf.Tensor, counts: tf.Tensor) -> CollectiveMessage:
        """Return the collective that gathers the rows of all ranks, `counts` for each."""
        rows = RowBlocks(tensor, self.moves)
        encoded, decode = rows.encode()
        label = self._label(f"gather/{encoded.dtype.name}")
        return CollectiveMessage(
            [encoded],
            lambda flat, lane: self._gather(flat[0], rows.words(counts), label, lane),
            lambda parts: rows.decode(parts, decode, counts),
        )

    def _sizes(self, mine: tf.Tensor, kind: str) -> tf.Tensor:
        label = self._label(f"{kind}/sizes")
        return self._sequencer.run([mine], lambda flat: [self._gather_sizes(flat[0], label)])[0]

    def alltoall(
        self, value: tf.Tensor, splits: Sequence[int] | tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.alltoall`."""
        value = tf.convert_to_tensor(value)
        wire.check(value.dtype)
        matrix = checked_splits(value, splits, self.rank, self.size)
        if matrix.shape.rank == 1:
            matrix = self._sizes(matrix, "alltoall")
        rows = RowBlocks(value, self.moves)
        parts, decode = self._exchange_blocks(rows, matrix)
        received = matrix[:, self.rank]
        return rows.decode(parts, decode, received), tf.cast(received, tf.int32)

    def _exchange_blocks(
        self, rows: RowBlocks, matrix: tf.Tensor
    ) -> tuple[list[tf.Tensor], wire.Decode]:
        """Send `matrix[rank, j]` rows to rank j; return each rank's part, and a part's decoder."""
        joined, decode = rows.encode_blocks(matrix[self.rank], self.size)
        words = rows.words(matrix)
        label = self._label(f"alltoall/{joined.dtype.name}")
        parts = self._sequencer.run([joined], lambda flat: self._exchange(flat[0], words, label))
        return parts, decode

    def reduce_scatter(self, value: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """See `Communicator.reduce_scatter`.

        Blocks go straight to their owner, which adds them in rank order: each rank sends
        (size-1)/size of its bytes, and the result does not depend on timing.
        """
        value = tf.convert_to_tensor(value)
        wire.check(value.dtype, op)
        if value.shape.rank == 0:
            raise ValueError(at_rank(self.rank, "reduce_scatter needs rows, got a scalar"))
        encoded, wire_op, decode = wire.for_reducing(value, op, self.reduces)
        rows = tf.shape(encoded, tf.int64)[0]
        blocks = even_sizes_in_graph(rows, self.size)
        matrix = tf.tile(blocks[None], [self.size, 1])
        parts, back = self._exchange_blocks(RowBlocks(encoded, self.moves), matrix)
        shape = tf.concat([blocks[self.rank][None], tf.shape(encoded, tf.int64)[1:]], axis=0)
        stacked = tf.stack([tf.reshape(back(part), shape) for part in parts])
        reduced = LOCAL_REDUCE[wire_op](stacked, axis=0)
        if wire_op == "mean":
            reduced = mean(reduced, self.size)
        count = value.shape[0]
        mine = None if count is None else even_sizes(count, self.size)[self.rank]
        return tf.ensure_shape(decode(reduced), [mine, *value.shape[1:]])

    def broadcast(
        self, value: tf.Tensor | Sequence[tf.Tensor], root: int = 0
    ) -> tf.Tensor | list[tf.Tensor]:
        """See `Communicator.broadcast`."""
        if not isinstance(value, (list, tuple)):
            return self.broadcast([value], root)[0]
        self._check_peer(root, "root")
        tensors = [tf.convert_to_tensor(v) for v in value]
        for tensor in tensors:
            wire.check(tensor.dtype)
        if not tensors:
            return []
        packed, layout = buckets.pack(tensors, self.bucket_bytes)
        encoded = [wire.for_moving(bucket, self.moves) for bucket in packed]
        label = self._label("broadcast")
        outputs = self._sequencer.run(
            [item for item, _ in encoded], lambda flat: self._broadcast(flat, root, label)
        )
        decoded = [
            back(output)[: tf.size(bucket)]
            for output, (_, back), bucket in zip(outputs, encoded, packed, strict=True)
        ]
        return buckets.unpack(decoded, tensors, layout)

    def send(self, value: tf.Tensor, dest: int, tag: int = 0) -> None:
        """See `Communicator.send`."""
        self._check_peer(dest, "dest")
        value = tf.convert_to_tensor(value)
        wire.check(value.dtype)
        encoded, _ = wire.for_moving(tf.reshape(value, [-1]), self.moves)
        self._sequencer.run([encoded], lambda flat: [self._send(flat[0], dest, tag)])

    def recv(
        self, shape: Sequence[int], dtype: tf.DType | str, source: int, tag: int = 0
    ) -> tf.Tensor:
        """See `Communicator.recv`."""
        self._check_peer(source, "source")
        like = tf.zeros(shape, dtype)
        wire.check(like.dtype)
        encoded, decode = wire.for_moving(tf.reshape(like, [-1]), self.moves)
        received = self._sequencer.run(
            [encoded], lambda flat: [self._receive(flat[0], source, tag)], sends=False
        )[0]
        return tf.reshape(decode(received)[: tf.size(like)], shape)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        label = self._label("barrier")
        self._sequencer.run(
            [tf.zeros([1], tf.int32)], lambda flat: self._reduce(flat, "sum", label)
        )

    def _check_peer(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(
                at_rank(
                    self.rank, f"{what}={rank} is not a rank of {self.size} (0 to {self.size - 1})"
                )
            )
        if what != "root" and rank == self.rank:
            raise ValueError(at_rank(self.rank, f"{what}={rank} is this rank itself"))


def _is_gathered(value: tf.Tensor | tf.IndexedSlices) -> bool:
    """Return whether ranks gather the slices of a value, since their number may differ by rank."""
    if not isinstance(value, tf.IndexedSlices):
        return False
    return not isinstance(value, AlignedSlices) or not value.values.shape.is_fully_defined()
