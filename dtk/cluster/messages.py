"""Reading a message of another process as a record, of the types that it must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")

# By way of text: so numbers without bound are refused as what is no number is.
_READ: dict[str, Callable[[object], object]] = {
    "bool": bool,
    "int": lambda value: int(str(value)),
    "float": lambda value: float(str(value)),
    "str": str,
    "Mapping[str, float]": lambda pairs: {
        str(int(key)): float(str(value))
        for key, value in pairs.items()  # type: ignore[attr-defined]
    },
}


def record_of(kind: type[T], message: Mapping[str, object]) -> T:
    """Return a message as a record of a kind; fails of a message that is none."""
    types = kind.__annotations__.items()
    return kind(**{name: _READ[type_name](message[name]) for name, type_name in types})
