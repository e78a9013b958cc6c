"""Casts before and after a collective: values travel in a dtype that the backend can move or add.

Moving needs only the bits, so a value is *reinterpreted* as a dtype of the same width, or four
bytes as one word: compressed uint8 gradients stay as small as they are. Reducing needs arithmetic,
so a value is *converted* to a wider dtype of its own kind, never from integer to floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import tensorflow as tf

REDUCE_OPS = ("sum", "mean", "min", "max", "prod")
Decode = Callable[[tf.Tensor], tf.Tensor]

# For a dtype that the backend cannot reduce: the wider dtypes to try, best first.
_WIDER = {
    tf.bool: (tf.uint8, tf.int32),
    tf.int8: (tf.int32,),
    tf.uint8: (tf.int32,),
    tf.int16: (tf.int32,),
    tf.uint16: (tf.int32,),
    tf.uint32: (tf.int64,),
    tf.float16: (tf.float32,),
    tf.bfloat16: (tf.float32,),
}


def check(dtypes: Iterable[tf.DType], op: str = "sum") -> None:
    """Raise for a dtype and op that no backend can do, so that all backends refuse the same."""
    if op not in REDUCE_OPS:
        raise ValueError(f"unknown reduction {op!r}; use one of {', '.join(REDUCE_OPS)}")
    for dtype in dict.fromkeys(dtypes):
        if not (dtype.is_floating or dtype.is_integer or dtype.is_bool) or dtype.is_quantized:
            raise ValueError(
                f"cannot send a tensor of {dtype.name}: communicators carry float, int and bool; "
                "use broadcast_object or allgather_object for other values"
            )
        if op == "mean" and not dtype.is_floating:
            raise ValueError(
                f"the mean of {dtype.name} is not of that dtype; reduce with 'sum' and divide, "
                "or cast to a float first"
            )


def for_reducing(
    flat: tf.Tensor, op: str, size: int, native: frozenset[tf.DType]
) -> tuple[tf.Tensor, str, Decode]:
    """Turn a tensor into one the backend can reduce, by an op that is not "mean"."""
    dtype = flat.dtype
    if op == "mean":
        encoded, op, decode = for_reducing(flat, "sum", size, native)
        return encoded, op, lambda total: decode(total / tf.cast(size, total.dtype))
    if dtype == tf.bool:
        op = {"sum": "max", "prod": "min"}.get(op, op)  # numpy: sum is "or", prod is "and"
    if dtype in native:
        return flat, op, lambda reduced: reduced
    if dtype == tf.uint64 and op in ("sum", "prod"):
        # Two's complement: signed and unsigned arithmetic agree modulo 2^64.
        return tf.bitcast(flat, tf.int64), op, lambda reduced: tf.bitcast(reduced, dtype)
    for wider in _WIDER.get(dtype, ()):
        if wider in native:
            return tf.cast(flat, wider), op, lambda reduced: tf.cast(reduced, dtype)
    raise ValueError(f"cannot reduce {dtype.name} with {op!r} here; cast it first")


def for_moving(flat: tf.Tensor, native: frozenset[tf.DType]) -> tuple[tf.Tensor, Decode]:
    """Turn a one-dimensional tensor into one the backend can move."""
    dtype = flat.dtype
    if dtype in native:
        return flat, lambda moved: moved
    if dtype == tf.bool:
        wire, back = for_moving(tf.cast(flat, tf.uint8), native)
        return wire, lambda moved: tf.cast(back(moved), tf.bool)
    if dtype.size == 1:
        padded = tf.pad(flat, [[0, -tf.size(flat) % 4]])
        wire = tf.bitcast(tf.reshape(padded, [-1, 4]), tf.int32)
        return wire, lambda moved: tf.reshape(tf.bitcast(moved, dtype), [-1])
    carrier = {2: tf.float16, 4: tf.int32, 8: tf.int64}[dtype.size]
    return tf.bitcast(flat, carrier), lambda moved: tf.bitcast(moved, dtype)
