"""What a kind of value is taken apart into, and put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtk.nests import Args, Function


class NotPlain(TypeError):
    """A value that is no plain data; the message names it."""


class Kind(NamedTuple):
    """A kind of value."""

    name: str  # as it is written
    take_apart: Function[Iterable[object]]  # makes simpler values of a value
    # makes the value again. What it is given may come from anybody: it does no harm with it, and
    # raises an exception if it does not fit
    put_together: Function[object]
    # the classes of the simpler values, which are its arguments, None for any; or None for values
    # of any number, of which it is given the list
    types: tuple[type | None, ...] | None = None

    def made_of(self, parts: Sequence[object]) -> object:
        """Make a value of its parts."""
        if self.types is None:
            return self.put_together(parts)
        return self.put_together(*exactly(parts, self.types))


def exactly(parts: Sequence[object], types: Sequence[type | None]) -> Args:
    """Return parts that are of the types expected."""
    fits = len(parts) == len(types) and all(
        wanted is None or type(part) is wanted for part, wanted in zip(parts, types, strict=True)
    )
    if not fits:
        raise ValueError(f"parts of other types: {[type(part).__name__ for part in parts[:9]]}")
    return tuple(parts)


def name_of(kind: type) -> str:
    """Return how messages name a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
