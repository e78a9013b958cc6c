"""Replace attributes while a context lasts; every temporary patch of dtk goes through here.

Contexts of several threads may overlap and end in any order, so each attribute has a stack:

    A in    original, A        A acts
    B in    original, A, B     B acts
    A out   original, B        B acts
    B out   original           nothing is left behind
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

_ABSENT = object()
_lock = threading.Lock()


class _Replacement:
    """One context's replacement of one attribute."""

    def __init__(self, value: object):
        self.value = value


# {(owner's id, name): [original, replacements ...]}; open contexts keep the owner alive.
_stacks: dict[tuple[int, str], list[_Replacement]] = {}


def definer(cls: type, name: str) -> type:
    """Return the class that defines an attribute: `cls` or one of its bases."""
    return next(base for base in cls.__mro__ if name in vars(base))


@contextlib.contextmanager
def replaced(owner: object, **replacements: object) -> Iterator[None]:
    """Return a context in which attributes of a module, class or object are replaced."""
    entered = {name: _Replacement(value) for name, value in replacements.items()}
    with _lock:
        for name, replacement in entered.items():
            held = _Replacement(vars(owner).get(name, _ABSENT))
            _stacks.setdefault((id(owner), name), [held]).append(replacement)
            setattr(owner, name, replacement.value)
    try:
        yield
    finally:
        with _lock:
            for name, replacement in entered.items():
                stack = _stacks[id(owner), name]
                stack.remove(replacement)
                if stack[-1].value is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, stack[-1].value)
                if len(stack) == 1:
                    del _stacks[id(owner), name]
