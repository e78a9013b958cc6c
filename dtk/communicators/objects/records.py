"""dtk's records, and exceptions: their classes are looked up by name, among what is imported.

A record is an instance of a dataclass or a `NamedTuple` of dtk's. Exceptions are those of Python,
dtk and TensorFlow. No class is called but these: they keep what they are given, or refuse it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import cast

import tensorflow as tf

from dtk.nests import Args, Kwargs

_TENSORFLOW, _NOTES = "tf.errors", "__notes__"


def _class(module: str, name: str) -> type | None:
    """Return a class of dtk, Python or TensorFlow's errors that was imported already."""
    if module == _TENSORFLOW:
        error = vars(tf.errors).get(name)
        return error if isinstance(error, type) else None
    known = module.partition(".")[0] in ("builtins", "dtk")
    found: object = sys.modules.get(module) if known else None
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        return None
    return found if (found.__module__, found.__qualname__) == (module, name) else None


def _fields(kind: type | None) -> tuple[str, ...] | None:
    """Return the fields of a record's class, in which it is a record itself; None of others."""
    if kind is not None and "__dataclass_fields__" in vars(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if kind is not None and issubclass(kind, tuple):
        return cast("tuple[str, ...] | None", vars(kind).get("_fields"))
    return None


def is_record(value: object) -> bool:
    kind = type(value)
    return _class(kind.__module__, kind.__qualname__) is kind and _fields(kind) is not None


def of_record(value: object) -> list[object]:
    kind = type(value)
    names = _fields(kind) or ()
    return [kind.__module__, kind.__qualname__, {name: getattr(value, name) for name in names}]


def record(module: str, name: str, values: Kwargs) -> object:
    kind = _class(module, name)
    names = _fields(kind)
    if kind is None or names is None:
        raise ValueError(f"{module}.{name} is no record of dtk")
    if values.keys() != {*names}:
        raise ValueError(f"{module}.{name} with other fields")
    return kind(**values)


def _made(kind: type[Exception], args: Args) -> Exception:
    # TensorFlow's hold the operation, which belongs to its process.
    return kind(None, None, *args) if issubclass(kind, tf.errors.OpError) else kind(*args)


def is_error(value: object) -> bool:
    """Return whether a value is an exception that its class makes again of its arguments."""
    if not isinstance(value, Exception):
        return False
    module, name, args, _ = of_error(value)
    kind = _class(cast(str, module), cast(str, name))
    try:
        made = _made(type(value), cast(Args, args))
        return kind is type(value) is type(made) and of_error(made)[2] == args
    except Exception:  # its constructor takes others
        return False


def of_error(error: Exception) -> list[object]:
    kind = type(error)
    if isinstance(error, tf.errors.OpError):
        notes = {key: value for key, value in vars(error).items() if key == _NOTES}
        return [_TENSORFLOW, kind.__qualname__, (error.message,), notes]
    # Of an OSError with the names of files, which its `args` leave out.
    _, args, *state = cast(Args, error.__reduce__())
    return [kind.__module__, kind.__qualname__, args, state[0] if state else {}]


def error(module: str, name: str, args: Args, state: Kwargs) -> Exception:
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
