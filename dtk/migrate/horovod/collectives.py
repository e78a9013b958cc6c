"""Horovod's collectives over the strategy's communicator, in graphs and outside of them.

Every rank calls the same ones in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.errors import ReplacedError
from dtk.migrate.horovod import job
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Array

_Value = TypeVar("_Value")
# What a collective takes for a tensor.
_Given: TypeAlias = "tf.Tensor | Array | float | Sequence[float]"


class ReduceOp(enum.Enum):
    """How ranks' values are combined; the values are `Communicator.allreduce`'s names."""

    Average = "mean"
    Sum = "sum"
    Adasum = "adasum"
    Min = "min"
    Max = "max"
    Product = "prod"


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product


class Compression(enum.Enum):
    """What gradients and tensors are sent as.

    Attributes:
        none: As they are.
        fp16: As 16-bit floating-point numbers.
    """

    none = ""
    fp16 = "fp16"


def check_compression(compression: object) -> Compression:
    """Refuse a compressor that is not one of `Compression`."""
    if not isinstance(compression, Compression):
        raise ReplacedError(
            f"compression={compression!r}: expected hvd.Compression.none or hvd.Compression.fp16 "
            "of dtk.migrate.horovod; an exchange of dtk.exchange compresses in other ways"
        )
    return compression


def check_op(op: object) -> ReduceOp:
    """Refuse what is no reduction, and Adasum."""
    if op is Adasum:
        raise ReplacedError(
            "op=hvd.Adasum: dtk sums gradients; write op=hvd.Average, and for large batches "
            "dtk.optimizers.LARS or keras.optimizers.Lamb"
        )
    if not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r}: expected hvd.Average, Sum, Min, Max or Product")
    return op


def _tensor(value: _Given, op: ReduceOp = Sum) -> tf.Tensor:
    """Convert to a tensor; integers that are averaged become float64, as in Horovod."""
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float64) if op is Average and tensor.dtype.is_integer else tensor


def allreduce(
    value: _Given,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Compression = Compression.none,
) -> tf.Tensor:
    """Combine a value over all ranks.

    Args:
        value: A tensor, array or number, of one shape on all ranks.
        name: Not needed: messages have names of their own.
        average: Deprecated in Horovod: True for `op=Average`, False for `op=Sum`.
        prescale_factor: Multiplies the value before.
        postscale_factor: Multiplies the result.
        op: One of Average, Sum, Min, Max, Product; None: Average.
        compression: What floating-point values are sent as.

    Returns:
        A tensor, equal on all ranks.

    Raises:
        ValueError: Both `average` and `op` are given, or the op is unknown.
        ReplacedError: The op is Adasum, or the compression not one of `Compression`.

    Example:
        >>> import dtk.migrate.horovod as hvd
        >>> hvd.init()
        >>> float(hvd.allreduce(2.5, op=hvd.Sum))
        2.5
        >>> hvd.shutdown()
    """
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = check_op(op or (Sum if average is False else Average))
    tensor = _tensor(value, chosen)
    tensor = tensor * tf.cast(prescale_factor, tensor.dtype) if prescale_factor != 1.0 else tensor
    halved = check_compression(compression) is Compression.fp16 and tensor.dtype.is_floating
    sent = tf.cast(tensor, tf.float16) if halved else tensor
    reduced = tf.cast(job.strategy().world.allreduce(sent, chosen.value), tensor.dtype)
    return reduced * tf.cast(postscale_factor, tensor.dtype) if postscale_factor != 1.0 else reduced


def allgather(value: _Given, name: str | None = None) -> tf.Tensor:
    """Concatenate the rows of all ranks, in rank order.

    Args:
        value: Shape `[rows, ...]`; the number of rows may differ by rank.
        name: Not needed.

    Returns:
        The rows of all ranks, on every rank.
    """
    return job.strategy().world.allgather(_tensor(value))


def broadcast(value: _Given, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return one rank's value on every rank.

    Args:
        value: A value of one shape on all ranks.
        root_rank: The rank whose value counts.
        name: Not needed.

    Returns:
        The root's value.
    """
    return job.strategy().world.broadcast(_tensor(value), root_rank)


def reducescatter(value: _Given, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """Combine a value over all ranks, then keep this rank's block of rows.

    Args:
        value: Shape `[rows, ...]`, the same on all ranks.
        name: Not needed.
        op: Average or Sum.

    Returns:
        This rank's rows; the first ranks get one more where rows do not divide evenly.
    """
    chosen = check_op(op)
    return job.strategy().world.reduce_scatter(_tensor(value, chosen), chosen.value)


def broadcast_object(
    obj: _Value | None,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
) -> _Value:
    """Return one rank's Python value on every rank.

    Args:
        obj: Plain data: numbers, text, lists, dictionaries, arrays.
        root_rank: The rank whose value counts.
        session: Must be None.
        name: Not needed.

    Returns:
        The root's value.
    """
    return job.strategy().world.broadcast_object(obj, root_rank)


def allgather_object(obj: _Value, session: None = None, name: str | None = None) -> list[_Value]:
    """Return the Python values of all ranks.

    Args:
        obj: Plain data: numbers, text, lists, dictionaries, arrays.
        session: Must be None.
        name: Not needed.

    Returns:
        One value for each rank, in rank order.
    """
    return job.strategy().world.allgather_object(obj)


def broadcast_variables(variables: Sequence[keras.Variable | tf.Variable], root_rank: int) -> None:
    """Give variables the values that they have on one rank.

    Args:
        variables: Variables of TensorFlow or Keras, the same ones on all ranks.
        root_rank: The rank whose values count.
    """
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if values:
        received = job.strategy().world.broadcast(values, root_rank)
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)


broadcast_global_variables = replaced(
    "broadcast_global_variables",
    "TensorFlow 2 has no global variables. fit starts all ranks from rank 0's weights; for others "
    "write hvd.broadcast_variables(variables, root_rank=0)",
)

# Process sets.

_GROUPS = "communicator = strategy.communicator.split(color) joins some of a dtk strategy's ranks"
add_process_set = replaced("add_process_set", _GROUPS)
remove_process_set = replaced("remove_process_set", _GROUPS)


class ProcessSet:
    """The ranks that do something together; only `global_process_set`, of all, can be used.

    Args:
        ranks_or_comm: Ranks of a smaller set.

    Raises:
        ReplacedError: Always.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: object) -> None:
        del ranks_or_comm
        replaced("ProcessSet", _GROUPS)()

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return np.arange(job.size()).tolist()

    def rank(self) -> int:
        """Return the rank of this process."""
        return job.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return job.size()

    def included(self) -> bool:
        """Return whether this process is one of them: it is."""
        return True


class _AllRanks(ProcessSet):
    process_set_id = 0

    def __init__(self) -> None:
        pass


global_process_set = _AllRanks()
