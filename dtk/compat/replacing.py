"""Replace attributes of a module or class for as long as a context lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType


@contextlib.contextmanager
def replaced(owner: ModuleType | type, **replacements: object) -> Iterator[None]:
    """Return a context in which attributes of a module or class are replaced.

    Args:
        owner: The module or class.
        replacements: Values of the attributes, by name.
    """
    before = {name: getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)
