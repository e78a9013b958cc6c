"""Values written as data by MessagePack, which nothing is run to read.

None, bools, texts, floats, bytes, small ints and lists are MessagePack's own. Every other value is
a map of one entry: the name of its kind, and the simpler values that it is made of.

A kind is chosen by the class alone, never by a subclass's, so a value comes back as what it was or
is not written (`NotPlain`). What is read may have been written by anybody: a value takes memory in
proportion to what came, and no class is called but those of the tables: they keep what they are
given, or refuse it.

A record is an instance of a dataclass or a `NamedTuple` of dtk's. Exceptions are those of Python,
dtk and TensorFlow. Their classes are looked up by name, among what is imported.

>>> decode(encode(("rate", {3: 0.5})))
('rate', {3: 0.5})
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import operator
import pathlib
import re
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import msgpack
import numpy as np
import tensorflow as tf

from dtk.nests import Args, Array, Function, Kwargs

_ITSELF = (type(None), bool, str, float)
_SMALL = 1 << 63
_CHUNK = 1 << 31  # bytes: MessagePack holds less than 4 GiB in one piece
_DTYPE = re.compile(r"[<>|][biufcmMSU][1-9][0-9]*(\[[0-9]*[a-zA-Z]+\])?")
_ML_DTYPE = 2  # `isbuiltin` of the dtypes that ml_dtypes gives NumPy, which has no text for them
_OBJECTS = "objects"
_MOST_AXES = 64  # NumPy's own limit; beyond it, multiplying sizes may take for ever
_EAGER = tf.__internal__.EagerTensor  # tf.Tensor is what graphs are made of, too
_PATH = type(pathlib.Path())
_TENSORFLOW, _NOTES = "tf.errors", "__notes__"


class NotPlain(TypeError):
    """A value that is no plain data; the message names it."""


class Kind(NamedTuple):
    """How values of a class are taken apart, and put together of what anybody may have sent."""

    name: str
    take_apart: Function[Iterable[object]]
    put_together: Function[object]
    # the classes of the parts, None for any; or None for parts of any number, given as one list
    types: tuple[type | None, ...] | None = None


def encode(value: object) -> memoryview:
    """Write a value as data; raises `NotPlain`."""
    packer = msgpack.Packer(autoreset=False, unicode_errors="surrogatepass")
    try:
        packer.pack(_apart(value))
    except (RecursionError, ValueError):
        raise NotPlain(f"a {_name(value)} that is nested too deeply") from None
    return memoryview(packer.getbuffer())  # large values are copied once less than by `bytes()`


def decode(data: memoryview) -> object:
    """Read a value that anybody may have sent; raises what its constructors raise if not so."""
    # Read once without making anything: room for a list is taken when its length is read, and
    # lists that are not there could claim it within each other.
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(data)))
    unpacker.feed(data)
    unpacker.skip()
    # max_ext_len: MessagePack's own further types are not in the tables
    return msgpack.unpackb(
        data, object_hook=_together, unicode_errors="surrogatepass", max_ext_len=0
    )


def _apart(value: object) -> object:
    kind = type(value)
    if kind in _ITSELF:
        return value
    if kind is list:
        return [_apart(item) for item in cast("list[object]", value)]
    if (kind is int and -_SMALL <= cast(int, value) < _SMALL) or (
        kind is bytes and len(cast(bytes, value)) <= _CHUNK
    ):
        return value
    how = _kind_of(value)
    return {how.name: [_apart(part) for part in how.take_apart(value)]}


def _together(entry: Mapping[str, object]) -> object:
    ((name, parts),) = entry.items()
    kind = _BY_NAME[name]
    if not isinstance(parts, list):
        raise ValueError(f"{name} of {type(parts).__name__}")
    if kind.types is None:
        return kind.put_together(parts)
    pairs = zip(parts, kind.types, strict=True)
    if not all(wanted is None or type(part) is wanted for part, wanted in pairs):
        raise ValueError(f"{name} of {[type(part).__name__ for part in parts]}")
    return kind.put_together(*parts)


def _kind_of(value: object) -> Kind:
    class_kind = _BY_CLASS.get(type(value))
    if class_kind is not None:
        return class_kind
    if isinstance(value, np.generic) and value.dtype.type is type(value):
        return _SCALAR
    if _class(*_place(value)) is type(value) and _fields(type(value)) is not None:
        return _RECORD
    if isinstance(value, Exception) and _is_made_of_its_arguments(value):
        return _ERROR
    raise NotPlain(_name(value))


def _place(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def _name(value: object) -> str:
    return ".".join(_place(value))


def _chunks(data: bytes) -> list[bytes]:
    return [data[begin : begin + _CHUNK] for begin in range(0, len(data), _CHUNK)]


def _dtype(text: str) -> tf.DType:
    """Return the dtype of NumPy's text, or of TensorFlow's name for one of ml_dtypes."""
    dtype = np.dtype(text if _DTYPE.fullmatch(text) else tf.as_dtype(text).as_numpy_dtype)
    if text != (dtype.name if dtype.isbuiltin == _ML_DTYPE else dtype.str):
        raise ValueError(f"dtype {text!r}")
    return dtype


def _text(dtype: tf.DType) -> str:
    text: str = dtype.name if dtype.isbuiltin == _ML_DTYPE else dtype.str
    with contextlib.suppress(TypeError, ValueError):
        if _dtype(text) == dtype:
            return text
    raise NotPlain(f"an array of dtype {dtype}")


def _of_array(array: Array) -> list[object]:
    if array.dtype == object:
        return [_OBJECTS, list(array.shape), list(array.flat)]
    return [_text(array.dtype), list(array.shape), _chunks(array.tobytes())]


def _array(text: str, shape: list[int], parts: list[bytes]) -> Array:
    if len(shape) > _MOST_AXES or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if text == _OBJECTS:
        items = np.empty(len(parts), object)
        for index, item in enumerate(parts):
            items[index] = item
        return items.reshape(shape)
    dtype, buffer = _dtype(text), bytearray().join(parts)  # which the array may write to
    # NumPy makes a small array of a large buffer, too, and does not look at what is in it.
    if math.prod(shape) * dtype.itemsize != len(buffer):
        raise ValueError(f"shape {shape} of {dtype} of other bytes")
    if dtype.kind == "b" and len(buffer.translate(None, b"\0\1")):
        raise ValueError("bools other than 0 and 1")
    if dtype.kind == "U":
        points = np.ndarray(len(buffer) // 4, np.dtype("u4").newbyteorder(dtype.byteorder), buffer)
        if points.max(initial=0) > 0x10FFFF:
            raise ValueError("characters beyond the last one")
    return np.ndarray(shape, dtype, buffer)


def _of_tensor(tensor: tf.Tensor) -> list[object]:
    if tensor.dtype in (tf.resource, tf.variant):
        raise NotPlain(f"a tensor of dtype {tensor.dtype.name}")
    return [np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)]


def _of_ragged(ragged: tf.RaggedTensor) -> list[object]:
    length = ragged.uniform_row_length
    return [ragged.values, ragged.row_splits, None if length is None else int(length)]


def _ragged(values: tf.Tensor, splits: tf.Tensor, length: int | None) -> tf.RaggedTensor:
    if type(values) not in (_EAGER, tf.RaggedTensor):
        raise ValueError(f"rows of {type(values).__name__}")
    made = tf.RaggedTensor.from_row_splits(values, splits)  # which looks at them
    if length is None:
        return made
    uniform = tf.RaggedTensor.from_uniform_row_length(values, length, made.nrows(splits.dtype))
    if not np.array_equal(uniform.row_splits, splits):
        raise ValueError("rows of another length")
    return uniform


def _class(module: str, name: str) -> type | None:
    """Return a class of dtk, Python or TensorFlow's errors that was imported already."""
    if module == _TENSORFLOW:
        error = vars(tf.errors).get(name)
        return error if isinstance(error, type) else None
    known = module.partition(".")[0] in ("builtins", "dtk")
    member: object = sys.modules.get(module) if known else None
    for part in name.split("."):
        member = getattr(member, "__dict__", {}).get(part)
    if not isinstance(member, type):
        return None
    return member if (member.__module__, member.__qualname__) == (module, name) else None


def _fields(kind: type | None) -> tuple[str, ...] | None:
    """Return the fields of a record's class, in which it is a record itself; None of others."""
    if kind is not None and "__dataclass_fields__" in vars(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if kind is not None and issubclass(kind, tuple):
        return cast("tuple[str, ...] | None", vars(kind).get("_fields"))
    return None


def _of_record(value: object) -> list[object]:
    return [*_place(value), {name: getattr(value, name) for name in _fields(type(value)) or ()}]


def _record(module: str, name: str, values: Kwargs) -> object:
    kind = _class(module, name)
    names = _fields(kind)
    if kind is None or names is None or values.keys() != {*names}:
        raise ValueError(f"{module}.{name} is no record of dtk with the fields {list(values)}")
    return kind(**values)


def _made(kind: type[Exception], args: Args) -> Exception:
    # TensorFlow's hold the operation, which belongs to its process.
    return kind(None, None, *args) if issubclass(kind, tf.errors.OpError) else kind(*args)


def _is_made_of_its_arguments(error: Exception) -> bool:
    """Return whether a class that may be sent makes an exception again of its arguments."""
    module, name, args, _ = _of_error(error)
    try:
        made = _made(type(error), args)
        return _class(module, name) is type(error) is type(made) and _of_error(made)[2] == args
    except Exception:  # its constructor takes others
        return False


def _of_error(error: Exception) -> tuple[str, str, Args, Kwargs]:
    module, name = _place(error)
    if isinstance(error, tf.errors.OpError):
        notes = {key: value for key, value in vars(error).items() if key == _NOTES}
        return _TENSORFLOW, name, (error.message,), notes
    # Of an OSError with the names of files, which its `args` leave out.
    _, args, *state = cast(Args, error.__reduce__())
    return module, name, cast(Args, args), cast(Kwargs, state[0] if state else {})


def _error(module: str, name: str, args: Args, state: Kwargs) -> Exception:
    kind = _class(module, name)
    if kind is None or not issubclass(kind, Exception):
        raise ValueError(f"{module}.{name} is no exception of Python, dtk or TensorFlow")
    made = _made(kind, args)
    for key, value in state.items():
        if key == _NOTES:  # `add_note` appends to the list
            fits = type(value) is list and all(type(note) is str for note in value)
        else:
            fits = not key.startswith("__") and not callable(getattr(kind, key, None))
        if not fits:
            raise ValueError(f"attribute {key}")
        setattr(made, key, value)
    return made


_ARRAY = Kind("array", _of_array, _array, (str, list, list))
_SCALAR = Kind(
    "scalar",
    lambda number: [_text(number.dtype), number.tobytes()],
    lambda text, data: _array(text, [], [data])[()],
    (str, bytes),
)
_RECORD = Kind("record", _of_record, _record, (str, str, dict))
_ERROR = Kind("error", _of_error, _error, (str, str, tuple, dict))


def _by_attributes(name: str, make: Function[object], /, **types: type | None) -> Kind:
    """Return the kind of values that their attributes, of these types, make again."""
    return Kind(name, operator.attrgetter(*types), make, tuple(types.values()))


# By the class of a value, which must be this one and no subclass: a script's own may do anything.
_BY_CLASS: dict[type, Kind] = {
    int: Kind("int", lambda number: [hex(number)], lambda digits: int(digits, 16), (str,)),
    bytes: Kind("bytes", _chunks, b"".join),
    tuple: Kind("tuple", list, tuple),
    dict: Kind("dict", lambda entries: map(list, entries.items()), dict),
    OrderedDict: Kind("OrderedDict", lambda d: map(list, d.items()), OrderedDict),
    set: Kind("set", list, set),
    frozenset: Kind("frozenset", list, frozenset),
    complex: _by_attributes("complex", complex, real=float, imag=float),
    range: _by_attributes("range", range, start=int, stop=int, step=int),
    _PATH: Kind("path", lambda path: [str(path)], pathlib.Path, (str,)),
    pathlib.PurePosixPath: Kind("pure path", lambda p: [str(p)], pathlib.PurePosixPath, (str,)),
    datetime.date: Kind("date", lambda d: [d.isoformat()], datetime.date.fromisoformat, (str,)),
    datetime.datetime: Kind(
        "datetime",
        lambda moment: [moment.replace(tzinfo=None).isoformat(), moment.tzinfo, moment.fold],
        lambda text, zone, fold: datetime.datetime.fromisoformat(text).replace(
            tzinfo=zone, fold=fold
        ),
        (str, None, int),
    ),
    datetime.timedelta: _by_attributes(
        "timedelta", datetime.timedelta, days=int, seconds=int, microseconds=int
    ),
    datetime.timezone: Kind(
        "timezone", lambda zone: zone.__getinitargs__(), lambda parts: datetime.timezone(*parts)
    ),
    np.ndarray: _ARRAY,
    np.memmap: _ARRAY,
    # As arrays they lose zeros at their end; str() of one, too.
    np.str_: Kind("np.str", lambda text: ["".join(text)], np.str_, (str,)),
    np.bytes_: Kind("np.bytes", lambda text: [bytes(text)], np.bytes_, (bytes,)),
    _EAGER: Kind(
        "tf.Tensor",
        _of_tensor,
        lambda array: tf.constant(array, tf.string if array.dtype == object else None),
        (np.ndarray,),
    ),
    tf.RaggedTensor: Kind("tf.RaggedTensor", _of_ragged, _ragged, (None, _EAGER, None)),
    tf.SparseTensor: _by_attributes(
        "tf.SparseTensor", tf.SparseTensor, indices=_EAGER, values=_EAGER, dense_shape=_EAGER
    ),
    tf.TensorSpec: _by_attributes(
        "tf.TensorSpec", tf.TensorSpec, shape=tf.TensorShape, dtype=tf.DType, name=None
    ),
    tf.TensorShape: Kind(
        "tf.TensorShape",
        lambda s: [None if s.rank is None else s.as_list()],
        tf.TensorShape,
        (None,),
    ),
    tf.DType: Kind("tf.DType", lambda dtype: [dtype.name], tf.as_dtype, (str,)),
}
_BY_NAME = {kind.name: kind for kind in (*_BY_CLASS.values(), _SCALAR, _RECORD, _ERROR)}
