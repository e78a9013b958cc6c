"""Kinds of what dtk itself defines, and of exceptions: looked up by name, in short lists.

A record is an instance of a dataclass or a `NamedTuple` of dtk's, written as the names and values
of its fields. Exceptions are those of Python, of dtk and of TensorFlow. Nothing is imported to read
one, and no class is called but these: their constructors keep what they are given, or refuse it.
"""

from __future__ import annotations

import builtins
import dataclasses
import sys
from typing import cast

import tensorflow as tf

from dtk.communicators.objects.kinds import Kind, NotPlain, name_of
from dtk.nests import Args, Kwargs

_PYTHON, _TENSORFLOW = "builtins", "tf.errors"
_NOTES = "__notes__"


def _of_dtk(module: str, name: str) -> type | None:
    """Return a class that a module of dtk's defines, and that was imported already."""
    if module.partition(".")[0] != "dtk":
        return None
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        return None
    return found if (found.__module__, found.__qualname__) == (module, name) else None


# Records.


def _fields(kind: type | None) -> tuple[str, ...] | None:
    """Return the fields of a record's class, in which it is a record itself; None of others."""
    if kind is not None and "__dataclass_fields__" in vars(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if kind is not None and issubclass(kind, tuple):
        return cast("tuple[str, ...] | None", vars(kind).get("_fields"))
    return None


def _of_record(value: object) -> list[object]:
    kind = type(value)
    names = _fields(kind) or ()
    return [kind.__module__, kind.__qualname__, {name: getattr(value, name) for name in names}]


def _record(module: str, name: str, values: Kwargs) -> object:
    kind = _of_dtk(module, name)
    names = _fields(kind)
    if kind is None or names is None:
        raise ValueError(f"{module}.{name} is no record of dtk")
    if values.keys() != {*names}:
        raise ValueError(f"{module}.{name} with other fields")
    return kind(**values)


# Exceptions.


def _error_class(module: str, name: str) -> type[Exception] | None:
    """Return a class of exceptions; None for one that is looked up nowhere."""
    lists = {_PYTHON: builtins, _TENSORFLOW: tf.errors}
    found = vars(lists[module]).get(name) if module in lists else _of_dtk(module, name)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _place_of(error: Exception) -> tuple[str, str]:
    """Return module and name of an exception's class, as `_error_class` knows it."""
    kind = type(error)
    of_tensorflow = isinstance(error, tf.errors.OpError)
    return _TENSORFLOW if of_tensorflow else kind.__module__, kind.__qualname__


def _made(kind: type[Exception], args: Args) -> Exception:
    # TensorFlow's hold the operation, which belongs to its process.
    return kind(None, None, *args) if issubclass(kind, tf.errors.OpError) else kind(*args)


def _contents(error: Exception) -> tuple[Args, Kwargs]:
    """Return the arguments and the attributes of an exception."""
    if isinstance(error, tf.errors.OpError):
        return (error.message,), {k: v for k, v in vars(error).items() if k == _NOTES}
    # Of an OSError with the names of files, which its `args` leave out.
    _, args, *state = cast(Args, error.__reduce__())
    return cast(Args, args), cast(Kwargs, state[0] if state else {})


def _of_error(error: Exception) -> list[object]:
    args, state = _contents(error)
    try:
        made = _made(type(error), args)
        same = type(made) is type(error) and _contents(made)[0] == args
    except Exception:  # its constructor takes others
        same = False
    if not same:
        raise NotPlain(name_of(type(error)))
    return [*_place_of(error), args, state]


def _error(module: str, name: str, args: Args, state: Kwargs) -> Exception:
    kind = _error_class(module, name)
    if kind is None:
        raise ValueError(f"{module}.{name} is no exception of Python, dtk or TensorFlow")
    made = _made(kind, args)
    for key, value in state.items():
        _check_attribute(kind, key, value)
        setattr(made, key, value)
    return made


def _check_attribute(kind: type[Exception], name: str, value: object) -> None:
    """Refuse what is no attribute of an exception's own, and notes that nothing can be added to."""
    if name == _NOTES:
        fits = type(value) is list and all(type(note) is str for note in value)
    else:
        fits = not name.startswith("__") and not callable(getattr(kind, name, None))
    if not fits:
        raise ValueError(f"attribute {name}")


_RECORD = Kind("record", _of_record, _record, (str, str, dict))
_ERROR = Kind("error", _of_error, _error, (str, str, tuple, dict))
BY_NAME = {kind.name: kind for kind in (_RECORD, _ERROR)}


def kind_of(value: object) -> Kind | None:
    """Return the kind of a record or an exception."""
    kind = type(value)
    if isinstance(value, Exception):
        return _ERROR if _error_class(*_place_of(value)) is kind else None
    known = _of_dtk(kind.__module__, kind.__qualname__) is kind and _fields(kind) is not None
    return _RECORD if known else None
