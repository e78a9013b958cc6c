"""The order of collectives, and the count of what they send: one small variable does both.

Inside `tf.function` nothing orders two collectives by itself: TensorFlow runs whatever is ready. So
two ranks may start them in opposite orders and wait for each other, and a key may be used again
before its first use is over. But TensorFlow does order all ops on the same *variable*, through
conditionals, loops and nested functions alike. So each collective reads the variable before it
starts, and when it is over adds the bytes it sent and the time it took:

    read -> collective -> add -> read -> collective -> add -> ...

This counts executions exactly, dynamic shapes included, at next to no cost.

Another variable is written when a batch has arrived, and read before each collective of its step:
see `begin_after`.
"""

from __future__ import annotations

import functools
import itertools
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.cluster import progress, recording
from dtk.communicators import determinism
from dtk.nests import Array, Tree

_FROM_0, _TO_END = np.array([0]), np.array([-1])


class CollectiveMessage(NamedTuple):
    """A collective about to run."""

    inputs: list[tf.Tensor]  # flat tensors, in dtypes the backend takes
    # takes the inputs and the message's first lane: how many inputs other messages have before it
    send: Callable[[list[tf.Tensor], int], list[tf.Tensor]]
    # turns the tensors from `send` into the result: a tensor, `tf.IndexedSlices`, or a list
    finish: Callable[[list[tf.Tensor]], tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]


class Span(NamedTuple):
    """When a message of a graph was last sent, in seconds since 1970."""

    name: str
    begin: float  # this rank's values were ready
    end: float


class CollectiveSequencer:
    """Runs a transport's collectives in trace order; counts their bytes and microseconds.

    Sequencers that share an `order` run theirs in one order.
    """

    def __init__(
        self,
        device: str | None = None,
        timed: bool = True,
        order: tf.Tensor | None = None,
    ) -> None:
        self._timed = timed
        self._device = device or placement.messages()
        self._eager_bytes = 0
        self.eager_seconds = 0.0  # in collectives outside of graphs so far
        self._lanes: dict[int, tf.Tensor] = {}
        self._noted: list[tuple[list[str], tf.Tensor]] = []
        # Counting on a GPU would copy a number to the host before every message, and wait there.
        self._handle = counters(
            placement.host() if placement.is_gpu(self._device) else self._device
        )
        self._order = self._handle if order is None else order
        _all.add(self)

    @property
    def bytes(self) -> int:
        """Bytes sent so far."""
        return self._eager_bytes + self._counted(0)

    @property
    def seconds(self) -> float:
        """Seconds in collectives so far, from when this rank's values were ready."""
        return self.eager_seconds + self._counted(1) / 1e6

    def spans(self) -> list[Span]:
        """Return the messages of all graphs, where the launcher asked for each step."""
        spans = []
        for names, handle in self._noted:
            with tf.init_scope():
                times = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()
            spans += [Span(name, *both) for name, both in zip(names, times.tolist(), strict=True)]
        return spans

    def lane(self, number: int) -> tf.Tensor:
        """Return a resource that orders the parts of one lane; other lanes run beside it."""
        if number not in self._lanes:
            self._lanes[number] = counters(self._device)
        return self._lanes[number]

    def _counted(self, place: int) -> int:
        with tf.init_scope():
            return int(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)[place])

    def _clock(self, ready: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the time in seconds once all of `ready` are computed."""
        if not self._timed or determinism.is_asked_for():
            return tf.zeros([], tf.float64)
        with tf.device(placement.host()), tf.control_dependencies(ready):
            return tf.timestamp()

    def run(
        self,
        inputs: Sequence[tf.Tensor],
        collective: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        name: str,
        sends: bool = True,
        meet: Callable[[], None] | None = None,
    ) -> list[tf.Tensor]:
        """Run a collective, or a message of two ranks, after every one before it.

        Outside of graphs, `meet` is called first: it finds ranks that are in another collective.
        """
        if tf.executing_eagerly():
            if sends:
                self._eager_bytes += _known_bytes(inputs)
            start = time.perf_counter()
            with progress.inside("collective"), tf.device(self._device):
                if meet is not None:
                    meet()
                outputs = collective(list(inputs))
            self.eager_seconds += time.perf_counter() - start
            return outputs
        # Outside the control dependencies below: TensorFlow omits them on an op whose inputs
        # already have them, and loses them when it folds constant inputs away.
        sent = _bytes(inputs if sends else [])
        # On a GPU, each number would be copied to the host when all before it is computed.
        with tf.device(placement.host()):
            before = tf.raw_ops.ReadVariableOp(resource=self._order, dtype=tf.int64)
            batches = tf.raw_ops.ReadVariableOp(resource=_batches(), dtype=tf.int64)
            begin, to_end = tf.constant(_FROM_0), tf.constant(_TO_END)
            zero = tf.minimum(tf.minimum(before, batches)[:1], 0)
        with tf.device(self._device):
            behind = [_behind(zero, to_end, t) for t in inputs]
            begins = self._clocks(behind)
            start = self._clock(behind)
            outputs = collective(behind)
        # Horovod does not mark its ops as stateful, so ranks that do not use a result would
        # optimize the op away. So use it here: count 0 of its elements, a number that the optimizer
        # cannot foresee. (An assertion would wait for the assertions of other sequencers.)
        flat = [o if o.shape.rank == 1 else tf.reshape(o, [-1]) for o in outputs]
        sizes = [tf.size(tf.slice(o, begin, zero), tf.int64) for o in flat]
        with tf.device(placement.host()):
            no_elements = tf.add_n(sizes)
            with tf.control_dependencies([no_elements]):
                took = tf.cast((self._clock(outputs) - start) * 1e6, tf.int64)
                update = tf.stack([sent + no_elements, took])
                tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=update)
                if self._order is not self._handle:
                    tf.raw_ops.AssignAddVariableOp(resource=self._order, value=update)
        if begins and len(inputs) == len(outputs):
            self._note([name + _size([one]) for one in behind], begins, self._clocks(outputs))
        elif begins:  # a gather has an output for each rank
            self._note([name + _size(behind)], [start], [self._clock(outputs)])
        return outputs

    def _clocks(self, ready: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return when each tensor is computed, if the launcher asked for each step.

        TensorFlow runs the clocks of a graph one after the other, as they are made here. Buckets of
        gradients are ready from the last one to the first.
        """
        recorder = recording.recorder()
        asked = recorder is not None and recorder.tells_each and self._timed
        if not asked or determinism.is_asked_for():
            return []
        return [self._clock([one]) for one in reversed(ready)][::-1]

    def _note(self, names: list[str], begins: list[tf.Tensor], ends: list[tf.Tensor]) -> None:
        """Keep when messages were last sent."""
        handle = _resource(np.zeros([len(names), 2]), placement.host())
        with tf.device(placement.host()):
            times = tf.stack([tf.stack(begins), tf.stack(ends)], 1)
            tf.raw_ops.AssignVariableOp(resource=handle, value=times)
        self._noted.append((names, handle))

    def run_together(
        self,
        messages: Sequence[CollectiveMessage],
        name: str,
        meet: Callable[[], None],
    ) -> list[tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]:
        """Send messages side by side, each once its own values are ready.

        A backend may have few lanes; messages that share a lane wait for each other.
        """
        lengths = []

        def send(flat: list[tf.Tensor]) -> list[tf.Tensor]:
            outputs: list[tf.Tensor] = []
            begin = 0
            for message in messages:
                end = begin + len(message.inputs)
                received = message.send(flat[begin:end], begin)
                lengths.append(len(received))
                outputs += received
                begin = end
            return outputs

        received = iter(
            self.run([t for m in messages for t in m.inputs], send, name, meet=meet)
        )
        return [
            message.finish(list(itertools.islice(received, length)))
            for message, length in zip(messages, lengths, strict=True)
        ]


_all: weakref.WeakSet[CollectiveSequencer] = weakref.WeakSet()


@functools.cache
def _batches() -> tf.Tensor:
    """Return the resource that counts batches as they arrive."""
    return counters(placement.host())


def _batches_so_far() -> int:
    """Return how many batches have arrived."""
    if not _batches.cache_info().currsize:  # nothing has: and TensorFlow may not have begun
        return 0
    with tf.init_scope():
        return int(tf.raw_ops.ReadVariableOp(resource=_batches(), dtype=tf.int64)[0])


progress.count_by(lambda: sum(one.bytes for one in list(_all)), _batches_so_far)


def ended_before() -> list[tf.Operation]:
    """Return what the next read of a batch in this graph must wait for: all that was traced.

    Where data have no more batches, TensorFlow cancels what is under way, on each rank something
    else.
    """
    operations = tf.compat.v1.get_default_graph().get_operations()
    return [op for op in operations if op.op_def.is_stateful]


def begin_after(batch: Tree) -> None:
    """Let no collective that is traced from now on begin before a batch has arrived.

    Where data have no more batches, TensorFlow still runs every op of the step that does not depend
    on them: a collective would begin on one rank and not on another. All collectives read a
    variable that is written here, behind the batch, and TensorFlow keeps the order of the two
    through conditionals, loops and calls of functions.
    """
    leaves = tf.nest.flatten(batch, expand_composites=True)
    arrivals = [leaf for leaf in leaves if tf.is_tensor(leaf)]
    with tf.device(placement.host()), tf.control_dependencies(arrivals):
        one = tf.constant([1, 0], tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=_batches(), value=one)


def counters(device: str) -> tf.Tensor:
    """Make two counters, a resource by which the graph orders ops.

    It is not a tf.Variable, so that no active strategy or scope mirrors or tracks it. An op that
    touches it runs on its device.
    """
    return _resource(np.zeros([2], np.int64), device)


def _resource(value: Array, device: str) -> tf.Tensor:
    with tf.init_scope(), tf.device(device):
        handle = tf.raw_ops.VarHandleOp(
            dtype=value.dtype, shape=value.shape, shared_name=f"dtk_lane_{uuid.uuid4().hex}"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(value))
        return handle


def _size(tensors: Sequence[tf.Tensor]) -> str:
    """Describe how large tensors are, if that is known."""
    known = all(t.shape.is_fully_defined() for t in tensors)
    return f" {_known_bytes(tensors):,} B" if known else ""


def _bytes(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the bytes of tensors; a constant if all shapes are known."""
    unknown = [t for t in tensors if t.shape.num_elements() is None]
    sizes = [tf.size(t, tf.int64) for t in unknown]  # where they are: else they would be copied
    with tf.device(placement.host()):
        bytes_ = [size * t.dtype.size for size, t in zip(sizes, unknown, strict=True)]
        return tf.add_n([tf.constant(_known_bytes(tensors), tf.int64), *bytes_])


def _known_bytes(tensors: Sequence[tf.Tensor]) -> int:
    """Return the bytes of those tensors whose shapes are known."""
    return sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)


def _behind(zero: tf.Tensor, to_end: tf.Tensor, flat: tf.Tensor) -> tf.Tensor:
    """Return the same tensor, made to depend on a value known only when the graph runs.

    While TensorFlow prepares a graph, it evaluates ops that depend on constants alone, on this rank
    and out of order; it takes Horovod's ops for such. Control dependencies do not stop it, and it
    looks through reshapes and placeholders. The count is never negative, so the slice below always
    starts at 0 (and copies nothing), but TensorFlow cannot know that before the graph runs.
    """
    same = tf.slice(flat, zero, to_end)
    same.set_shape(flat.shape)
    return same
