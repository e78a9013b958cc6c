"""Variables of several replicas or servers, and the plain variables behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_utils,
    sharded_variable,
    values,
)

from dtk.nests import Array, Function


def local_value(variable: tf.Variable | tf.Tensor) -> tf.Variable | tf.Tensor:
    """Return this replica's copy of a variable, without communication."""
    if isinstance(variable, values.DistributedVariable):
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
    """A variable with an equal copy on every replica."""


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
    return value.values if isinstance(value, values.DistributedValues) else (value,)


def is_distributed(variable: tf.Variable) -> bool:
    """Return whether a TensorFlow variable has one component per replica."""
    return isinstance(variable, values.DistributedVariable)
