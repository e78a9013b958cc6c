"""Keras variables, the TensorFlow variables behind them, and marks on them.

for good   keras.Variable._map_aggregation    patch_map_aggregation

A mark says that a variable holds one rank's part of a tensor: an attribute that dtk adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, sharded_variable, values

from dtk.communicators.base import Communicator
from dtk.communicators.shard import FlatShard, OneRanks, Shard
from dtk.nests import Array, Function, Tree
from dtk.patches import patch_for_good

_MARK = "_dtk_part"


# Keras variables.


def stored(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Return the TensorFlow variable behind a Keras variable, in any scope; or that given."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def reference_to(variable: keras.Variable | tf.Variable) -> object:
    """Return what stands for a variable in a set."""
    return stored(variable).ref()


def is_variable(value: object) -> bool:
    """Return whether a value is a variable of Keras or TensorFlow."""
    return isinstance(value, keras.Variable | tf.Variable)


def path_of(variable: keras.Variable | tf.Variable) -> str:
    """Return a variable's path; optimizers update plain TensorFlow variables too, with a name."""
    return getattr(variable, "path", None) or variable.name.removesuffix(":0")


def made_outside_scope(variable: keras.Variable) -> bool:
    """Return whether a variable that is summed when read was created outside a scope."""
    return (
        variable.synchronization == "on_read"
        and variable._value is not None
        and not is_distributed(variable._value)
    )


def move_variable(variable: keras.Variable) -> None:
    """Give a Keras variable new storage in the current scope; it keeps its value."""
    if variable._value is not None and not is_distributed(variable._value):
        variable._initialize(variable._value.numpy())


def patch_map_aggregation(wanted: Callable[[], bool]) -> None:
    """Let replicas assign their own copies of Keras variables from now on, where it is wanted.

    All assign the same value, or dtk averages them, so TensorFlow need not reduce each assignment.
    """

    def aggregation(variable: keras.Variable, name: str, *, original: Function[object]) -> object:
        own = wanted() and variable.synchronization != "on_read"
        return original(variable, "none" if own else name)

    patch_for_good(keras.Variable, "_map_aggregation", aggregation)


class VariablePart(keras.Variable):
    """One part of a variable, as an optimizer sees it; it may have another number of axes."""

    def __init__(self, whole: keras.Variable, part: tf.Variable, name: str):
        self.whole = whole
        self._part = part
        super().__init__(
            initializer=lambda shape, dtype: None,
            shape=part.shape,
            dtype=whole.dtype,
            name=name,
        )
        self._path = path_of(whole)
        self.constraint = whole.constraint

    def _initialize_with_initializer(self, initializer: Function[tf.Tensor]) -> None:
        self._value = self._part

    def fill(self, value: tf.Tensor) -> None:
        """Assign a value where `release` may have left none."""
        value = tf.ensure_shape(value, self.shape)
        tf.raw_ops.AssignVariableOp(resource=self._part.handle, value=value)

    def release(self, zero: tf.Tensor) -> None:
        """Free the memory of the value until `fill`, given a zero that no graph knows ahead."""
        empty = tf.zeros(tf.fill([len(self.shape)], zero), self._part.dtype)
        tf.raw_ops.AssignVariableOp(resource=self._part.handle, value=empty)


# Marks.


def set_shard(variable: keras.Variable, shard: Shard) -> None:
    """Mark a variable as one rank's part of a tensor.

    Checkpoints, clipping by the global norm and checks between ranks read the mark.
    """
    if variable.shape is not None:
        shard.whole_shape(variable.shape)
    setattr(variable, _MARK, shard)


def shard_of(variable: keras.Variable) -> Shard | None:
    """Return the shard of a variable that holds one rank's part of a tensor.

    Args:
        variable: A Keras variable.

    Returns:
        The shard given to `set_shard`; None for a variable that holds a whole tensor.
    """
    mark = getattr(variable, _MARK, None)
    return mark if isinstance(mark, Shard) else None


def flat_shard_of(variable: keras.Variable) -> FlatShard | None:
    """Return the shard of a variable of which ranks with whole models hold a part each."""
    mark = getattr(variable, _MARK, None)
    return mark if isinstance(mark, FlatShard) else None


def whole_shape(variable: keras.Variable) -> tuple[int, ...]:
    """Return the shape of a variable; of the whole where each rank holds a part."""
    shard = shard_of(variable)
    return tuple(variable.shape if shard is None else shard.whole_shape(variable.shape))


def set_owner(variable: keras.Variable, owner: OneRanks) -> None:
    """Mark a variable that only this rank of a group holds."""
    setattr(variable, _MARK, owner)


def is_of_all(variable: keras.Variable) -> bool:
    """Return whether all ranks hold the same variable with equal values."""
    return getattr(variable, _MARK, None) is None


def group_of(variable: keras.Variable) -> Communicator | None:
    """Return the communicator of the ranks that hold the parts of a variable's tensor."""
    mark = getattr(variable, _MARK, None)
    return mark.communicator if isinstance(mark, Shard | OneRanks) else None


def copy_mark(variable: keras.Variable, slot: keras.Variable) -> None:
    """Mark a slot variable like the variable it belongs to."""
    setattr(slot, _MARK, getattr(variable, _MARK, None))


_SLOT = "_dtk_slot"


def set_slot_of_part(slot: keras.Variable, part: VariablePart, kind: str) -> None:
    """Mark a slot variable of a part with the slot of the whole variable that it is part of."""
    setattr(slot, _SLOT, (id(part.whole), kind))


def in_wholes(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """Put the parts of each slot together; every other variable is alone.

    They are in the order that an optimizer has them in for whole variables.
    """
    by_slot: dict[object, list[keras.Variable]] = {}
    for variable in variables:
        by_slot.setdefault(getattr(variable, _SLOT, id(variable)), []).append(variable)
    return list(by_slot.values())


# TensorFlow variables of several replicas or servers.


def local_value(variable: tf.Variable | tf.Tensor) -> tf.Variable | tf.Tensor:
    """Return this replica's copy of a variable, without communication."""
    if is_distributed(variable):
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.strategy is variable.distribute_strategy:
            return variable._get_on_device_or_primary()
        return variable.values[0]
    return variable


@contextlib.contextmanager
def created_at_once(seen: Callable[[tf.Variable], None]) -> Iterator[None]:
    """Return a context in which a new variable has its first value at once.

    TensorFlow initializes the variables of a trace when the trace ends, and it cannot initialize
    variables of several replicas that way.
    """

    def create(next_creator: Function[tf.Variable], **kwargs: object) -> tf.Variable:
        if not (callable(kwargs["initial_value"]) or tf.executing_eagerly()):
            return next_creator(**kwargs)  # the trace computes its first value
        with tf.init_scope():
            variable = next_creator(**kwargs)
            seen(variable)
        return variable

    with tf.variable_creator_scope(create):
        yield


class _Number:
    """Conversion of a distributed variable to a number, as for a plain variable.

    TensorFlow's distributed variables have no `int()` or `float()`, and NumPy cannot convert a
    scalar one. Callbacks may use `int(optimizer.iterations)` or `float(optimizer.learning_rate)`.
    """

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]

    def __array__(self, dtype: tf.DType = None, copy: bool | None = None) -> Array:
        # Reading has made a copy already.
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]


class MirroredVariable(_Number, values.MirroredVariable):
    """A variable with an equal copy on every replica, which may reduce what replicas assign."""

    def _update_replica(
        self, update_fn: Function[Tree], value: tf.Tensor, **kwargs: object
    ) -> Tree:
        return update_fn(self._get_on_device_or_primary(), self._reduced(value), **kwargs)

    def _update_cross_replica(
        self, update_fn: Function[Tree], value: tf.Tensor, **kwargs: object
    ) -> Tree:
        if len(self.values) == 1:  # of a strategy with one replica in this process
            return update_fn(self.values[0], value, **kwargs)
        return super()._update_cross_replica(update_fn, value, **kwargs)

    def _reduced(self, value: tf.Tensor) -> tf.Tensor:
        kind, replica = self.aggregation, tf.distribute.get_replica_context()
        if kind == tf.VariableAggregation.NONE:
            return value
        value = tf.convert_to_tensor(value, self.dtype)
        if kind == tf.VariableAggregation.MEAN:
            return replica.all_reduce("MEAN", value)
        if kind == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            is_first = replica.replica_id_in_sync_group == 0
            value = tf.where(is_first, value, tf.zeros_like(value))
        return replica.all_reduce("SUM", value)


class SyncOnReadVariable(_Number, values.SyncOnReadVariable):
    """A variable with a part on every replica; reading it sums the parts."""


VARIABLE_CLASSES = distribute_utils.VARIABLE_CLASS_MAPPING | {
    tf.VariableSynchronization.ON_WRITE: MirroredVariable,
    tf.VariableSynchronization.ON_READ: SyncOnReadVariable,
}


def is_on_server(variable: tf.Variable) -> bool:
    """Return whether a variable is placed as a parameter-server strategy places its own."""
    if isinstance(variable, sharded_variable.ShardedVariable):
        return True
    return "/job:" in variable.device and "/job:localhost" not in variable.device


def shards_of(variable: tf.Variable) -> tuple[tf.Variable, ...] | None:
    """Return the parts of a partitioned variable, in row order."""
    if isinstance(variable, sharded_variable.ShardedVariable):
        return tuple(variable.variables)
    return None


def components(value: tf.Tensor | tf.Variable) -> tuple[tf.Tensor | tf.Variable, ...]:
    """Return the plain variables or values behind a distributed one, in replica order."""
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


def is_distributed(variable: tf.Variable | tf.Tensor) -> bool:
    """Return whether a TensorFlow variable has one component per replica."""
    return isinstance(variable, tf.Variable) and isinstance(
        variable, tf.distribute.DistributedValues
    )
