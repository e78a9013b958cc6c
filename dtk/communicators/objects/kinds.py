"""What a kind of value is taken apart into, and put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dtk.nests import Args, Function


class NotPlain(TypeError):
    """A value that is no plain data; the message names it."""


class Kind(NamedTuple):
    """A kind of value.

    Attributes:
        name: As it is written.
        take_apart: Makes simpler values of a value.
        put_together: Makes the value again. What it is given may come from anybody: it does no
            harm with it, and raises an exception if it does not fit.
        types: The classes of the simpler values, which are its arguments, None for any; or None for
            values of any number, of which it is given the list.
    """

    name: str
    take_apart: Function[Iterable[object]]
    put_together: Function[object]
    types: tuple[type | None, ...] | None = None

    def made_of(self, parts: Sequence[object]) -> object:
        """Make a value of its parts.

        Args:
            parts: Simpler values.

        Returns:
            The value.

        Raises:
            ValueError: They are of other classes.
            Exception: They do not fit; what the constructor raises.
        """
        if self.types is None:
            return self.put_together(parts)
        return self.put_together(*exactly(parts, self.types))


def exactly(parts: Sequence[object], types: Sequence[type | None]) -> Args:
    """Return parts that are of the types expected.

    Args:
        parts: Of a value.
        types: The class of each; None for any.

    Returns:
        The parts.

    Raises:
        ValueError: They are others, or another number.
    """
    fits = len(parts) == len(types) and all(
        wanted is None or type(part) is wanted for part, wanted in zip(parts, types, strict=True)
    )
    if not fits:
        raise ValueError(f"parts of other types: {[type(part).__name__ for part in parts[:9]]}")
    return tuple(parts)


def name_of(kind: type) -> str:
    """Return how messages name a class.

    Args:
        kind: The class.
    """
    return f"{kind.__module__}.{kind.__qualname__}"
