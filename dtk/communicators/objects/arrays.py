"""Kinds of NumPy's values: a dtype of a short list, a shape, and bytes.

An array of objects holds its items in place of the bytes. Structured dtypes and subclasses of
`np.ndarray` are no plain data, but for memory maps, which arrive as arrays.
"""

from __future__ import annotations

import math
import re

import numpy as np
import tensorflow as tf

from dtk.communicators.objects.kinds import Kind, NotPlain
from dtk.nests import Array

_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][1-9][0-9]{0,9}"
    r"|[mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
# Those of ml_dtypes, which NumPy has no text for.
_NAMED = (
    *("bfloat16", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "int2", "int4", "uint2", "uint4"),
)
_OBJECTS = "objects"
_LAST_CODE_POINT = 0x10FFFF
_MOST_AXES = 64  # NumPy's own limit; beyond it, multiplying sizes may take for ever


def _text(dtype: tf.DType) -> str:
    """Return the name of a NumPy dtype."""
    if _DTYPE.fullmatch(dtype.str):
        return str(dtype.str)
    if dtype.name in _NAMED:
        return str(dtype.name)
    raise NotPlain(f"an array of dtype {dtype}")


def _dtype(text: str) -> tf.DType:
    """Return the dtype of a name."""
    if _DTYPE.fullmatch(text):
        return np.dtype(text)
    if text in _NAMED:
        return np.dtype(tf.as_dtype(text).as_numpy_dtype)
    raise ValueError(f"dtype {text!r}")


def _take_apart(array: Array) -> list[object]:
    if array.dtype == object:
        return [_OBJECTS, list(array.shape), list(array.flat)]
    return [_text(array.dtype), list(array.shape), array.tobytes()]


def _put_together(text: str, shape: list[object], data: object) -> Array:
    sizes = [size for size in shape if isinstance(size, int) and size >= 0]
    if len(sizes) != len(shape) or len(shape) > _MOST_AXES:
        raise ValueError(f"shape {shape}")
    made = _of_objects if text == _OBJECTS else _of_bytes
    return made(text, sizes, data)


def _of_objects(text: str, shape: list[int], items: object) -> Array:
    del text
    if not isinstance(items, list) or math.prod(shape) != len(items):
        raise ValueError(f"shape {shape} of other objects")
    made = np.empty(len(items), object)
    for index, item in enumerate(items):
        made[index] = item
    return made.reshape(shape)


def _of_bytes(text: str, shape: list[int], data: object) -> Array:
    dtype = _dtype(text)
    # NumPy makes a small array of a large buffer, too.
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"shape {shape} of {dtype} of other bytes")
    buffer = bytearray(data)  # which the array may write to
    _check(dtype, buffer)
    return np.ndarray(shape, dtype, buffer)


def _check(dtype: tf.DType, buffer: bytearray) -> None:
    """Refuse bytes that are no value of their dtype, at which NumPy does not look."""
    if dtype.kind == "b" and len(buffer.translate(None, b"\0\1")):
        raise ValueError("bools other than 0 and 1")
    if dtype.kind == "U":
        points = np.ndarray(len(buffer) // 4, np.dtype("u4").newbyteorder(dtype.byteorder), buffer)
        if points.max(initial=0) > _LAST_CODE_POINT:
            raise ValueError("characters beyond the last one")


_ARRAY = Kind("array", _take_apart, _put_together, (str, list, None))
_SCALAR = Kind(
    "scalar",
    lambda value: [_text(value.dtype), value.tobytes()],
    lambda text, data: _of_bytes(text, [], data)[()],
    (str, bytes),
)

KINDS: dict[type, Kind] = {
    np.ndarray: _ARRAY,
    np.memmap: _ARRAY,
    # As arrays they lose zeros at their end; str() of one, too.
    np.str_: Kind("np.str", lambda text: ["".join(text)], np.str_, (str,)),
    np.bytes_: Kind("np.bytes", lambda text: [bytes(text)], np.bytes_, (bytes,)),
}
BY_NAME = {kind.name: kind for kind in (*KINDS.values(), _SCALAR)}


def kind_of(value: object) -> Kind | None:
    """Return the kind of a NumPy array or number."""
    if isinstance(value, np.generic) and type(value) not in KINDS:
        return _SCALAR if value.dtype.type is type(value) else None
    return KINDS.get(type(value))
