"""MPI's own collectives, on the tensors' memory.

MPI matches ranks by the order in which they post collectives on one of its communicators. The
sequencer keeps that order within a lane. Lanes run beside each other, and the buckets of one list
become ready in any order, so each has its own communicator.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from mpi4py import MPI

from dtk.communicators import dtype_casts
from dtk.communicators.base import LOCAL_REDUCE
from dtk.communicators.local import LocalTransport
from dtk.communicators.mpi.requests import PendingRequest, RequestProgress
from dtk.communicators.transport import Transport
from dtk.even_division import even_sizes_in_graph
from dtk.nests import Array, Function

_OPS = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX, "prod": MPI.PROD}
# Collectives of one list that may be under way, each on its own communicator.
_BESIDE = 8
# Bytes before the values of a broadcast: their length, and padding that keeps the memory aligned.
_HEAD = 64
# MPI tells groups made at the same time apart by a tag; the standard guarantees this many tags.
_TAGS = 32767

# A request; the memory for its result; what returns how many elements came, by MPI's status, if
# only the sender knows.
Posted: TypeAlias = tuple[MPI.Request, Array, Callable[[MPI.Status], int] | None]


@dataclasses.dataclass
class _Lane:
    """A communicator of MPI, and the op that was last traced to post on it."""

    comm: MPI.Intracomm
    posted: tf.Operation | None = None


class _Site:
    """Queue where a graph waits for results of one of its collectives, if they are late."""

    def __init__(self, dtype: tf.DType, device: str) -> None:
        with tf.init_scope(), tf.device(device):
            self.queue = tf.queue.FIFOQueue(1, [dtype])
        self._device = device
        # Where the graph goes on in the thread that delivers, it may begin again there.
        self._lock = threading.RLock()
        self._turn = 0
        self._late = False

    def begin(self) -> int:
        """Return the number of the execution that begins.

        Drop the result that a failed step did not wait for: the next execution must not get it.
        """
        with self._lock:
            self._turn += 1
            if self._late and int(self.queue.size()):
                self.queue.dequeue()
            self._late = False
            return self._turn

    def deliver(self, turn: int, result: Array) -> None:
        """Give the graph a result, unless it has begun again meanwhile."""
        with self._lock, tf.device(self._device):
            self._late = True
            if turn == self._turn:
                tf.raw_ops.QueueEnqueueV2(handle=self.queue.queue_ref, components=[_tensor(result)])


class MPITransport(Transport):
    """Ranks joined by MPI."""

    name = "mpi"

    # Some of Open MPI's instructions add 8-bit integers with saturation. MPI has no 16-bit floats:
    # `_reduce_halves` adds them.
    reduces = frozenset({tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64})
    moves = (reduces - {tf.bfloat16}) | {tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16}

    def __init__(
        self,
        comm: MPI.Intracomm,
        members: Sequence[int],
        progress: RequestProgress,
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm = comm
        self._pairs = _Lane(comm.Dup())  # messages of two ranks
        self._members = tuple(members)
        self._progress = progress
        self._lanes = {("", 0): _Lane(comm)}

    def reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        def post(comm: MPI.Intracomm, array: Array) -> Posted:
            result = self._room(array.size, array.dtype)
            return comm.Iallreduce(array, result, _OPS[op]), result, None

        return [
            self._reduce_halves(tensor, op, label, self._lane(i))
            if tensor.dtype.size == 2
            else tf.ensure_shape(self._call(self._lane(i), post, [tensor], label), tensor.shape)
            for i, tensor in enumerate(flat)
        ]

    def _reduce_halves(self, flat: tf.Tensor, op: str, label: str, lane: _Lane) -> tf.Tensor:
        """Have each rank combine one block in float32, round it once, and send it to all.

        So all ranks get the same bits, for as many bytes as an all-reduce round a ring.
        """
        halves, back = dtype_casts.for_moving(flat, self.moves)
        blocks = even_sizes_in_graph(tf.size(halves, tf.int64), self.size)
        matrix = tf.tile(blocks[None], [self.size, 1])
        mine = self._exchange_in(lane, halves, matrix, label)
        mine = tf.reshape(mine, tf.stack([tf.constant(self.size, tf.int64), blocks[self.rank]]))
        combined = LOCAL_REDUCE[op](tf.cast(back(mine), tf.float32), axis=0)
        rounded, _ = dtype_casts.for_moving(tf.cast(combined, flat.dtype), self.moves)
        return tf.ensure_shape(back(self._gather_in(lane, rounded, blocks, label)), flat.shape)

    def gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        rows = self._gather_in(self._lane(lane), flat, sizes, label)
        return tf.split(rows, sizes, num=self.size)

    def _gather_in(self, lane: _Lane, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> tf.Tensor:
        def post(comm: MPI.Intracomm, array: Array, counts: Array) -> Posted:
            result = self._room(int(counts.sum()), array.dtype)
            received = [_plain(result), counts.tolist()]
            return comm.Iallgatherv(_plain(array), received), result, None

        return self._call(lane, post, [flat, sizes], label)

    def alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        rows = self._exchange_in(self._lane(0), flat, sizes, label)
        return tf.split(rows, sizes[:, self.rank], num=self.size)

    def _exchange_in(self, lane: _Lane, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> tf.Tensor:
        def post(comm: MPI.Intracomm, array: Array, matrix: Array) -> Posted:
            sent, received = matrix[self.rank], matrix[:, self.rank]
            result = self._room(int(received.sum()), array.dtype)
            request = comm.Ialltoallv(
                [_plain(array), sent.tolist()], [_plain(result), received.tolist()]
            )
            return request, result, None

        return self._call(lane, post, [flat, sizes], label)

    def broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        def post(comm: MPI.Intracomm, array: Array) -> Posted:
            head = _HEAD // array.dtype.itemsize
            sent = self._room(head + array.size, array.dtype)
            length, result = sent[:head].view(np.int64), sent[head:]
            if comm.rank == root:
                length[0] = array.size
                np.copyto(result, array)
            return comm.Ibcast(_plain(sent), root), result, lambda _: int(length[0])

        return [
            tf.ensure_shape(self._call(self._lane(i), post, [tensor], label), tensor.shape)
            for i, tensor in enumerate(flat)
        ]

    def send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        def post(comm: MPI.Intracomm, array: Array) -> Posted:
            return comm.Isend(_plain(array), dest, _tag(tag)), np.zeros(1, array.dtype), None

        return self._call(self._pairs, post, [flat], f"to rank {dest}", dest)

    def receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        def post(comm: MPI.Intracomm, array: Array) -> Posted:
            result = self._room(array.size, array.dtype)
            request = comm.Irecv(_plain(result), source, _tag(tag))
            return request, result, lambda status: status.Get_count(MPI.BYTE) // result.itemsize

        received = self._call(self._pairs, post, [room], f"from rank {source}", source)
        return tf.ensure_shape(received, room.shape)

    def _room(self, elements: int, dtype: tf.DType) -> Array:
        return self._progress.buffers.take(elements, dtype)

    # -- posting them

    def _lane(self, number: int) -> _Lane:
        """Return MPI's communicator for the running lane and a number within it.

        All ranks make it while they trace the first collective that needs it. Eager collectives
        have their own: otherwise a rank at the end of its data could take part in a step of the
        others with an eager number, MPI would take it for sizes, and all would go on with them.
        """
        key = ("eager" if tf.executing_eagerly() else self.lane_name, number % _BESIDE)
        if key not in self._lanes:
            tag = zlib.crc32(repr(key).encode()) % _TAGS
            with self._progress.explaining("a new group of ranks"):
                self._lanes[key] = _Lane(self._comm.Create_group(self._comm.group, tag))
        return self._lanes[key]

    def _call(
        self,
        lane: _Lane,
        post: Function[Posted],
        inputs: list[tf.Tensor],
        label: str,
        peer: int | None = None,
    ) -> tf.Tensor:
        """Post a collective or a message when its inputs are ready; return its result.

        The result has the dtype of the first input.
        """
        ranks = range(self.size) if peer is None else (self.rank, peer)
        members = frozenset(self._members[rank] for rank in ranks)
        what = f"the collective {label!r}" if peer is None else f"a message {label}"

        def begin(arrays: Sequence[Array]) -> PendingRequest:
            with self._progress.explaining(what):
                request, result, came = post(lane.comm, *arrays)
            return PendingRequest(request, result, arrays, members, what, came)

        if tf.executing_eagerly():
            return _tensor(self._progress.wait(begin([_array(tensor) for tensor in inputs])))
        dtype = inputs[0].dtype
        site = _Site(dtype, self.device)

        def start(*arrays: Array) -> tuple[np.bool_, Array]:
            turn = site.begin()
            job = begin(arrays)
            if self._progress.soon(job):
                return np.True_, job.result
            self._progress.later(job, functools.partial(site.deliver, turn))
            return np.False_, job.result[:0]

        graph = tf.compat.v1.get_default_graph()
        # Keep the order of collectives that share a communicator; across graphs the sequencer does.
        waits = [lane.posted] if lane.posted is not None and lane.posted.graph is graph else []
        with tf.device(self.device), tf.control_dependencies(waits):
            # Stateful functions would run in trace order, whatever is ready. The sequencer's inputs
            # and outputs keep TensorFlow from leaving this one out, or running it too early. Stop
            # gradients, which `dtk.layers.collectives` defines: a tape would ask for the queue's.
            tensors = [tf.stop_gradient(tensor) for tensor in inputs]
            done, result = tf.numpy_function(start, tensors, [tf.bool, dtype], stateful=False)
            lane.posted = done.op
            done.set_shape([])
            result.set_shape([None])
            value = tf.cond(done, lambda: result, site.queue.dequeue)
        value.set_shape([None])
        return value

    def group(
        self, ranks: Sequence[int], groups: Sequence[Sequence[int]], number: int
    ) -> Transport:
        with self._progress.explaining("a new group of ranks"):
            comm = MPI.Intracomm(self._comm.Split(ranks[0], ranks.index(self.rank)))
        if len(ranks) == 1:
            return LocalTransport(0, 1)
        return MPITransport(comm, [self._members[rank] for rank in ranks], self._progress)


def _plain(array: Array) -> Array:
    """Return the same bytes in a dtype that MPI has."""
    return array.view(np.uint16) if array.dtype == np.float16 else array


def _tag(tag: int) -> int:
    most = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or _TAGS
    return tag if 0 <= tag <= most else zlib.crc32(str(tag).encode()) % most


def _array(tensor: tf.Tensor) -> Array:
    """Return a tensor as an array, without a copy if it is in the host's memory."""
    if "GPU" in tensor.device:
        return tensor.numpy()
    return np.asarray(memoryview(tensor))


def _tensor(array: Array) -> tf.Tensor:
    """Return an array's memory as a tensor; the caller must no longer write to it."""
    if array.size == 0 or array.dtype == np.bool_:  # dlpack does not take these
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
