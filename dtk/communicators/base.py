"""The contract every communicator keeps: how bytes move between ranks.

Names and semantics follow MPI. One suite (tests/communicators) holds every backend to it, at world
sizes 1, 2 and 3, eagerly and inside `tf.function`.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, cast, overload

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.cluster.environment import Environment
from dtk.communicators import determinism, objects
from dtk.communicators.costs import Costs
from dtk.errors import CommunicatorError, at_rank
from dtk.nests import Array

_Value = TypeVar("_Value")
REDUCE_OPS = ("sum", "mean", "min", "max", "prod")
_COLLECTIVES = frozenset(
    ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast", "send", "recv", "barrier")
)


class AlignedSlices(tf.IndexedSlices):
    """Slices with the same indices on all ranks: a sum adds the values of each index."""


def with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """Return slices of the same class and indices, with other values."""
    return type(slices)(values, slices.indices, slices.dense_shape)


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

    Attributes:
        rank: This process's index in the group, `0 <= rank < size`.
        size: Number of ranks.
        local_rank: Index among the ranks of the same host.
        local_size: Number of ranks on this host.
        hosts: One host name per rank, in rank order.
        alike: Whether all ranks compute with the same kind of processor and as many threads, so
            that equal operations give equal bits; False until `learn` is called.
        environment: The launcher's facts, if the communicator spans all ranks of a job; None if it
            spans a part of them or this process alone.
    """

    name: str = "abstract"
    alike: bool = False
    environment: Environment | None = None
    _costs: Costs | None = None

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Keep AutoGraph from rewriting the collectives: that is slow and gains nothing."""
        super().__init_subclass__(**kwargs)
        for name in _COLLECTIVES & vars(cls).keys():
            setattr(cls, name, tf.autograph.experimental.do_not_convert(vars(cls)[name]))

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
    @abc.abstractmethod
    def bytes_sent(self) -> int:
        """Payload bytes this rank has handed to the transport so far, padding included.

        Counted when a collective runs, so a `tf.function` counts at every execution. The transport
        may move more or less: a ring all-reduce moves 2(size-1)/size of each byte.
        """

    @property
    def seconds_communicating(self) -> float:
        """Seconds this rank has spent in collectives so far, waiting for other ranks included.

        The time of a collective begins when this rank's own values are ready. Collectives in graphs
        count 0 if TensorFlow was asked to be deterministic: it then has no clock in graphs.
        """
        return 0.0

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

    @abc.abstractmethod
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

    @abc.abstractmethod
    def allgather(
        self, value: tf.Tensor, rows: Sequence[int] | tf.Tensor | None = None
    ) -> tf.Tensor:
        """Concatenate every rank's rows along axis 0, in rank order.

        Args:
            value: Shape `[rows, ...]`. Ragged: row counts may differ. A scalar counts as one row:
                the result has shape `[size]`.
            rows: Row count of each rank, shape `[size]`, if every rank knows it; that saves a
                message.

        Returns:
            All rows, of the dtype of `value`.

        Raises:
            ValueError: `rows` does not fit this rank's rows.
        """

    @abc.abstractmethod
    def reduce_scatter(self, value: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """Reduce, then keep this rank's block of rows.

        Blocks are `rows // size` rows; the first `rows % size` ranks get one more.

        Args:
            value: Shape `[rows, ...]`, the same on all ranks.
            op: As in `allreduce`.

        Returns:
            This rank's rows, as many as `dtk.even_division.even_sizes` says, in rank order.

        Raises:
            ValueError: `value` is a scalar, or the op does not fit its dtype.
        """

    @abc.abstractmethod
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

    @overload
    def broadcast(self, value: Sequence[tf.Tensor], root: int = 0) -> list[tf.Tensor]: ...

    @overload
    def broadcast(self, value: tf.Tensor, root: int = 0) -> tf.Tensor: ...

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    @abc.abstractmethod
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

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open the links that `send` and `recv` will use.

        Every rank calls it, with the same pairs.

        Only Horovod beyond two ranks needs it; elsewhere links open by themselves.

        Args:
            pairs: Pairs of ranks, each in both directions.
        """
        del pairs

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return only after every rank has called it."""

    @abc.abstractmethod
    def split(self, color: int, key: int | None = None) -> Communicator:
        """Make one new communicator per `color`; ranks in it are ordered by `(key, rank)`.

        Args:
            color: Ranks of the same color form a group.
            key: Orders ranks within the group; this rank's number when None.

        Returns:
            The communicator of this rank's group.
        """

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Name the collectives traced inside by their position, so a retrace finds them again.

        TensorFlow may retrace a `tf.function` on some ranks only, if only their slice of a batch
        changed shape. Collectives traced inside `sequence("train_step")` are matched by
        (name, position), not by how many were traced before them in this process.

        Args:
            name: The same on every rank; nested names are joined.
        """
        del name
        yield

    @contextlib.contextmanager
    def concurrent(self, name: str) -> Iterator[None]:
        """Let the collectives traced inside run beside all others.

        Collectives in a graph run in the order they were traced. Concurrent ones are ordered only
        among collectives of the same name, so they start when their values are ready.
        `seconds_communicating` leaves them out: the step meanwhile waits for others.

        Args:
            name: The same on every rank.
        """
        del name
        yield

    def next_number(self) -> int:
        """Return a new number for the name of a sequence, the same on every rank.

        The communicator counts, since two strategies of a process may share it.
        """
        self._last_number = getattr(self, "_last_number", -1) + 1
        return self._last_number

    def resynchronize(self) -> None:
        """Agree on the numbers that name later collectives. Every rank calls it.

        For ranks that go on after an exception: it may have stopped some of them before they had
        called `next_number` as often as the others.
        """
        numbers = tf.constant(self._counters(), tf.int64)
        self._set_counters(self.allreduce(numbers, "max").numpy().tolist())

    def _counters(self) -> list[int]:
        return [getattr(self, "_last_number", -1)]

    def _set_counters(self, counters: list[int]) -> None:
        (self._last_number,) = counters

    # Python values are sent as bytes by the tensor collectives.

    def broadcast_object(self, value: _Value | None = None, root: int = 0) -> _Value:
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
            return cast(_Value, value)
        payload, failure = _written(value) if self.rank == root else (b"", None)
        length = int(self.broadcast(tf.constant(len(payload), tf.int64), root))
        self._check_written([length], failure, first=root)
        rows = np.frombuffer(payload.ljust(length), np.uint8)
        return cast(_Value, _read(self.broadcast(tf.constant(rows), root)))

    def allgather_object(self, value: _Value) -> list[_Value]:
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
        found = [_read(rows[end - n : end]) for n, end in zip(lengths, ends, strict=True)]
        return cast(list[_Value], found)

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
