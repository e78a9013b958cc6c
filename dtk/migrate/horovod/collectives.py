"""Horovod's collectives over the strategy's communicator, in graphs and outside of them.

Every rank calls the same ones in the same order.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

import keras
import tensorflow as tf

from dtk.communicators.base import unconverted
from dtk.errors import ReplacedError
from dtk.layers import collectives
from dtk.layers.collectives import watched, with_gradient
from dtk.migrate.horovod import job
from dtk.migrate.horovod.replaced import replaced
from dtk.nests import Array, Function

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


class Compression:
    """What gradients and tensors are sent as.

    Attributes:
        none: As they are.
        fp16: As 16-bit floating-point numbers.
    """

    none = ""
    fp16 = "fp16"


def check_compression(compression: object) -> str:
    """Refuse a compressor that is not one of `Compression`."""
    if compression not in (Compression.none, Compression.fp16):
        raise ReplacedError(
            f"compression={compression!r}: expected hvd.Compression.none or hvd.Compression.fp16 "
            "of dtk.migrate.horovod; an exchange of dtk.exchange compresses in other ways"
        )
    return str(compression)


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
    """Convert to a tensor; integers that are averaged become float64: Horovod cuts their mean."""
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, tf.float64) if op is Average and tensor.dtype.is_integer else tensor


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """Multiply, as Horovod does: integers in float64, cut again, and half floats in float32."""
    if factor == 1.0:
        return tensor
    narrow = tensor.dtype in (tf.float16, tf.bfloat16)
    wide = tf.float64 if tensor.dtype.is_integer else tf.float32 if narrow else tensor.dtype
    return tf.cast(tf.cast(tensor, wide) * tf.cast(factor, wide), tensor.dtype)


def check_placing(placing: Mapping[str, object]) -> None:
    """Take the arguments of `horovod.tensorflow` that change no result; refuse all others."""
    unknown = placing.keys() - {"device_dense", "device_sparse", "ignore_name_scope", "process_set"}
    if unknown:
        raise TypeError(f"unexpected arguments {', '.join(sorted(unknown))}")
    if placing.get("process_set", global_process_set) is not global_process_set:
        raise ReplacedError(f"process_set={placing['process_set']!r}: {_GROUPS}")


# Gradients are Horovod's. The backward pass of each collective is a collective, which all ranks
# must reach, see `dtk.layers.collectives`; theirs are of the sum of all ranks' losses, Horovod's of
# the mean for `allgather` and `broadcast`, and as many times that for `reducescatter`.


def _with_gradient_times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return with_gradient(tensor, tf.identity, lambda dy: _scaled(dy, factor))


@unconverted
def _reduced(tensors: Sequence[tf.Tensor], op: ReduceOp) -> list[tf.Tensor]:
    """Combine tensors in few messages; Horovod combines their gradients by the same op."""
    world = job.strategy().world

    @tf.custom_gradient
    def combined(*values: tf.Tensor) -> tuple[list[tf.Tensor], Function[list[tf.Tensor]]]:
        def backward(*gradients: tf.Tensor | None) -> list[tf.Tensor]:
            filled = [
                tf.zeros_like(value) if gradient is None else tf.cast(gradient, value.dtype)
                for gradient, value in zip(gradients, values, strict=True)
            ]
            return _reduced(filled, op)

        return world.allreduce(list(values), op.value), unconverted(backward)

    reduced: list[tf.Tensor] = combined(*tensors)
    return reduced


def allreduce(
    value: _Given | tf.IndexedSlices,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: str = Compression.none,
    **placing: object,
) -> tf.Tensor | tf.IndexedSlices:
    """Combine a value over all ranks.

    Args:
        value: A tensor, array or number, of one shape on all ranks; or a `tf.IndexedSlices`.
        name: Not needed: messages have names of their own.
        average: Deprecated in Horovod: True for `op=Average`, False for `op=Sum`.
        prescale_factor: Multiplies the value before.
        postscale_factor: Multiplies the result.
        op: One of Average, Sum, Min, Max, Product; None: Average.
        compression: What floating-point values are sent as.
        placing: Where Horovod computes (`device_dense` and the like): not needed.

    Returns:
        A tensor, equal on all ranks; of `tf.IndexedSlices`, the slices of all ranks.

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
    check_placing(placing)
    return grouped_allreduce(
        [value],
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )[0]


def grouped_allreduce(
    tensors: Sequence[_Given | tf.IndexedSlices],
    average: bool | None = None,
    compression: str = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    **placing: object,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Combine values over all ranks, see `allreduce`.

    Args:
        tensors: The values.
        average: As in `allreduce`.
        compression: As in `allreduce`.
        op: As in `allreduce`.
        prescale_factor: As in `allreduce`.
        postscale_factor: As in `allreduce`.
        name: Not needed.
        placing: Not needed.

    Returns:
        The results.
    """
    check_placing(placing)
    if op is not None and average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    chosen = check_op(op or (Sum if average is False else Average))
    halves = check_compression(compression) == Compression.fp16
    results = list(tensors)
    for i, value in enumerate(results):
        if isinstance(value, tf.IndexedSlices):
            if chosen not in (Sum, Average) or (prescale_factor, postscale_factor) != (1.0, 1.0):
                raise ReplacedError(
                    "allreduce of tf.IndexedSlices takes hvd.Sum or hvd.Average, and no factors; "
                    "give it tf.convert_to_tensor(slices)"
                )
            rows = allgather(value.values)
            rows = rows / tf.cast(job.size(), rows.dtype) if chosen is Average else rows
            results[i] = tf.IndexedSlices(rows, allgather(value.indices), value.dense_shape)
    places = [i for i, one in enumerate(tensors) if not isinstance(one, tf.IndexedSlices)]
    if not places:
        return results
    dense = [_scaled(_tensor(tensors[i], chosen), prescale_factor) for i in places]
    sent = [tf.cast(t, tf.float16) if halves and t.dtype.is_floating else t for t in dense]
    sent[0] = watched(sent[0], job.strategy().world)
    for i, tensor, reduced in zip(places, dense, _reduced(sent, chosen), strict=True):
        results[i] = _scaled(tf.cast(reduced, tensor.dtype), postscale_factor)
    return results


def allgather(value: _Given, name: str | None = None, **placing: object) -> tf.Tensor:
    """Concatenate the rows of all ranks, in rank order.

    Args:
        value: Shape `[rows, ...]`; the number of rows may differ by rank.
        name: Not needed.
        placing: Not needed.

    Returns:
        The rows of all ranks, on every rank.
    """
    check_placing(placing)
    world = job.strategy().world
    return collectives.allgather(_with_gradient_times(_tensor(value), 1 / world.size), world)


def grouped_allgather(
    tensors: Sequence[_Given], name: str | None = None, **placing: object
) -> list[tf.Tensor]:
    """Concatenate the rows of all ranks, for each tensor, see `allgather`.

    Args:
        tensors: The tensors.
        name: Not needed.
        placing: Not needed.

    Returns:
        The rows of all ranks, of each.
    """
    check_placing(placing)
    return [allgather(tensor) for tensor in tensors]


def broadcast(
    value: _Given, root_rank: int, name: str | None = None, **placing: object
) -> tf.Tensor:
    """Return one rank's value on every rank.

    Args:
        value: A value of one shape on all ranks.
        root_rank: The rank whose value counts.
        name: Not needed.
        placing: Not needed.

    Returns:
        The root's value.
    """
    check_placing(placing)
    world = job.strategy().world
    own = _with_gradient_times(_tensor(value), 1 / world.size)
    return collectives.broadcast(own, world, root_rank)


def alltoall(
    tensor: _Given,
    splits: Sequence[int] | tf.Tensor | None = None,
    name: str | None = None,
    **placing: object,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send block j of the rows to rank j.

    Args:
        tensor: Shape `[rows, ...]`.
        splits: Rows for each rank; equal blocks when None.
        name: Not needed.
        placing: Not needed.

    Returns:
        The received rows in rank order; if `splits` are given, also how many came from each rank.
    """
    check_placing(placing)
    received = collectives.alltoall(_tensor(tensor), job.strategy().world, splits)
    return received[0] if splits is None else received


@unconverted
def reducescatter(
    value: _Given,
    name: str | None = None,
    op: ReduceOp = Average,
    compression: str = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **placing: object,
) -> tf.Tensor:
    """Combine a value over all ranks, then keep this rank's block of rows.

    Args:
        value: Shape `[rows, ...]`, the same on all ranks.
        name: Not needed.
        op: Average or Sum.
        compression: As in `allreduce`.
        prescale_factor: Multiplies the value before.
        postscale_factor: Multiplies the result.
        placing: Not needed.

    Returns:
        This rank's rows; the first ranks get one more where rows do not divide evenly.
    """
    check_placing(placing)
    chosen, world = check_op(op), job.strategy().world
    tensor = _scaled(_tensor(value, chosen), prescale_factor)
    halves = check_compression(compression) == Compression.fp16 and tensor.dtype.is_floating
    reduced = with_gradient(
        watched(tf.cast(tensor, tf.float16) if halves else tensor, world),
        lambda x: world.reduce_scatter(x, chosen.value),
        lambda dy: allgather(_scaled(dy, world.size if chosen is Sum else 1)),
    )
    return _scaled(tf.cast(reduced, tensor.dtype), postscale_factor)


def grouped_reducescatter(
    tensors: Sequence[_Given],
    compression: str = Compression.none,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **placing: object,
) -> list[tf.Tensor]:
    """Combine values over all ranks, and keep this rank's block of each, see `reducescatter`.

    Args:
        tensors: The values.
        compression: As in `reducescatter`.
        op: As in `reducescatter`.
        prescale_factor: As in `reducescatter`.
        postscale_factor: As in `reducescatter`.
        placing: Not needed.

    Returns:
        This rank's rows of each.
    """
    check_placing(placing)
    factors = prescale_factor, postscale_factor
    return [reducescatter(tensor, None, op, compression, *factors) for tensor in tensors]


def barrier() -> None:
    """Return only after every rank has called it."""
    job.strategy().world.barrier()


join = replaced(
    "join",
    "no rank can stop before the others; let all take as many steps, by steps_per_epoch= or "
    "dataset.take(n), or write `strategy = dtk.auto_strategy()`, which divides one dataset evenly",
)


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


def broadcast_variables(
    variables: Sequence[keras.Variable | tf.Variable],
    root_rank: int,
    inplace: bool = False,
    **placing: object,
) -> None:
    """Give variables the values that they have on one rank.

    Args:
        variables: Variables of TensorFlow or Keras, the same ones on all ranks.
        root_rank: The rank whose values count.
        inplace: Not needed.
        placing: Not needed.
    """
    check_placing(placing)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if values:
        received = job.strategy().world.broadcast(values, root_rank)
        for variable, value in zip(variables, received, strict=True):
            variable.assign(value)


def broadcast_(
    variables: Sequence[keras.Variable | tf.Variable],
    root_rank: int,
    name: str | None = None,
    **placing: object,
) -> list[tf.Tensor]:
    """Give variables the values that they have on one rank, see `broadcast_variables`.

    Args:
        variables: As in `broadcast_variables`.
        root_rank: The rank whose values count.
        name: Not needed.
        placing: Not needed.

    Returns:
        The values.
    """
    check_placing(placing)
    broadcast_variables(variables, root_rank)
    return [tf.convert_to_tensor(variable) for variable in variables]


broadcast_object_fn = replaced(
    "broadcast_object_fn",
    "TensorFlow 2 has no placeholders; write hvd.broadcast_object(obj, root_rank=0)",
)
broadcast_global_variables = replaced(
    "broadcast_global_variables",
    "TensorFlow 2 has no global variables. fit starts all ranks from rank 0's weights; for others "
    "write hvd.broadcast_variables(variables, root_rank=0)",
)

# Process sets.

_GROUPS = "communicator = strategy.communicator.split(color) joins some of a dtk strategy's ranks"
add_process_set = replaced("add_process_set", _GROUPS)
remove_process_set = replaced("remove_process_set", _GROUPS)


ProcessSet = replaced("ProcessSet", _GROUPS)


class _AllRanks:
    """The only process set, as Horovod's classes have them."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(job.size()))

    def rank(self) -> int:
        """Return the rank of this process."""
        return job.rank()

    def size(self) -> int:
        """Return the number of ranks."""
        return job.size()

    def included(self) -> bool:
        """Return whether this process is one of them: it is."""
        return True


global_process_set = _AllRanks()
