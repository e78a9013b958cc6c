"""The running replica of a `tf.distribute.Strategy`: its index and its part in reductions."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
)
from tensorflow.python.eager import context as eager_context

from dtk.communicators.base import Communicator, with_values
from dtk.compat.replacing import replaced
from dtk.nests import Function, Nest

# A tensor, or a structure of tensors, `tf.IndexedSlices` and None.
_Structure = TypeVar("_Structure", bound=Nest)


def op_name(reduce_op: tf.distribute.ReduceOp | str) -> str:
    """Return a communicator's name for a reduction."""
    return str(getattr(reduce_op, "value", reduce_op)).lower()


def global_seed() -> int | None:
    """Return TensorFlow's global seed; None when none was set."""
    return eager_context.global_seed()


def replica_index() -> int:
    """Return the index of the running replica in the job; call in a replica context."""
    replica = tf.distribute.get_replica_context()
    return int(replica._replica_id_in_sync_group)


# Whether the running replica has rows; one flag per thread, as replicas may be threads.
_presence = threading.local()


# With fewer elements, multiplying is cheaper than branching.
_FEW = 1 << 14


@contextlib.contextmanager
def counted_if(present: tf.Tensor | None) -> Iterator[None]:
    """Return a context in which this replica adds zeros to sums over replicas unless it has rows.

    With None, its values always count.
    """
    outer = getattr(_presence, "flag", None)
    _presence.flag = present
    try:
        yield
    finally:
        _presence.flag = outer


def if_present(value: _Structure) -> _Structure:
    """Replace values by zeros where the running replica has no rows."""
    present = getattr(_presence, "flag", None)
    flat = tf.nest.flatten(value)
    if present is None or not flat:
        return value
    # Indices stay out of the branch, which would hide their origin in the graph.
    given = [
        v.values if isinstance(v, tf.IndexedSlices) else tf.convert_to_tensor(v)
        for v in flat
        if v is not None
    ]
    elements = [v.shape.num_elements() for v in given]
    if None not in elements and sum(elements) < _FEW:
        counted = [_times(v, present) for v in given]
    else:
        counted = tf.cond(
            present,
            lambda: [tf.identity(v) for v in given],
            lambda: [tf.zeros_like(v) for v in given],
        )
    remaining = iter(counted)
    flat = [None if v is None else _with(v, next(remaining)) for v in flat]
    return tf.nest.pack_sequence_as(value, flat)


def _with(value: tf.Tensor | tf.IndexedSlices, counted: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    return with_values(value, counted) if isinstance(value, tf.IndexedSlices) else counted


def _times(value: tf.Tensor, present: tf.Tensor) -> tf.Tensor:
    if value.dtype.is_floating:
        return tf.math.multiply_no_nan(value, tf.cast(present, value.dtype))
    return tf.where(present, value, tf.zeros_like(value))


# Whether this thread computes a step as if there were one replica.
_whole = threading.local()


@contextlib.contextmanager
def as_one_replica(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Return a context in which one replica computes a step and nothing is reduced."""
    _whole.flag = True
    try:
        with (
            tf.device(strategy.extended.worker_devices[0]),
            distribute_lib.ReplicaContext(strategy, 0),
        ):
            yield
    finally:
        _whole.flag = False


def is_whole() -> bool:
    """Return whether this thread computes a step as if there were one replica."""
    return getattr(_whole, "flag", False)


def in_replica(strategy: tf.distribute.Strategy) -> tf.distribute.ReplicaContext:
    """Return a context in which Keras acts as the only replica of a strategy."""
    return distribute_lib.ReplicaContext(strategy, 0)


def scope_kept() -> AbstractContextManager[None]:
    """Return a context in which `keras.utils.clear_session()` keeps the open scope.

    It replaces the graph that holds the scopes of strategies: later variables would be made outside
    the scope, and leaving it would fail.
    """
    return replaced(tf.compat.v1, reset_default_graph=lambda: None)


def undivided(flat: list[Nest]) -> tuple[list[Nest], Callable[[list[Nest]], list[Nest]]]:
    """Return values undivided, and a function that joins them: it changes nothing."""
    return flat, list


def all_reduce(
    communicator: Communicator,
    reduce_op: tf.distribute.ReduceOp,
    value: _Structure,
    divide: Function[tuple[list[Nest], Function[list[Nest]]]] = undivided,
) -> _Structure:
    """Reduce a structure of tensors and `tf.IndexedSlices` over all ranks."""
    flat = tf.nest.flatten(value)
    if not flat:
        return value
    divided, join = divide(flat)
    reduced = communicator.allreduce(divided, op_name(reduce_op))
    return tf.nest.pack_sequence_as(value, join(reduced))
