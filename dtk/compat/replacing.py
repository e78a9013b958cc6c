"""Replace attributes for as long as a context lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def definer(cls: type, name: str) -> type:
    """Return the class among a class and its bases in which an attribute of it is defined."""
    return next(base for base in cls.__mro__ if name in vars(base))


@contextlib.contextmanager
def replaced(owner: object, **replacements: object) -> Iterator[None]:
    """Return a context in which attributes of a module, class or object are replaced."""
    before = {name: getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)
