"""Replace attributes of other packages: every patch of dtk goes through these functions.

For attributes of dtk's own objects there is `temporarily`, which is simpler.

Contexts of several threads may overlap and end in any order, so each attribute has a stack:

    A in    original, A        A acts
    B in    original, A, B     B acts
    A out   original, B        B acts
    B out   original           nothing is left behind
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator

from dtk.nests import Function

_ABSENT = object()
_lock = threading.Lock()
# {(owner's id, name): {None: original, context: its replacement ...}}; open contexts keep the owner
# alive.
_stacks: dict[tuple[int, str], dict[object, object]] = {}


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Lock the stacks, without the collector: it may end a context in this thread, which locks."""
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@contextlib.contextmanager
def temporarily(owner: object, **values: object) -> Iterator[None]:
    """Return a context in which attributes of one thread's object, or thread-local, have values.

    Such contexts end in the opposite order in which they have begun.

    Example:
        >>> thread = threading.local()
        >>> thread.alone = False
        >>> with temporarily(thread, alone=True):
        ...     thread.alone
        True
        >>> thread.alone
        False
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextlib.contextmanager
def patch(owner: object, **replacements: object) -> Iterator[None]:
    """Return a context in which attributes of a module, class or object are replaced."""
    context = object()
    with _locked():
        for name, value in replacements.items():
            own: dict[object, object] = {None: vars(owner).get(name, _ABSENT)}
            _stacks.setdefault((id(owner), name), own)[context] = value
            setattr(owner, name, value)
    try:
        yield
    finally:
        with _locked():
            for name in replacements:
                stack = _stacks[id(owner), name]
                del stack[context]
                last = next(reversed(stack.values()))
                if last is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, last)
                if len(stack) == 1:
                    del _stacks[id(owner), name]


def patch_around(
    owner: object, **functions: Function[object]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which functions of an owner are called through others.

    Each gets the arguments of the call, and the function that was there as the keyword `original`.
    """
    return patch(owner, **{name: _around(getattr(owner, name), f) for name, f in functions.items()})


def _around(original: Function[object], function: Function[object]) -> Function[object]:
    @functools.wraps(original)
    def around(*args: object, **kwargs: object) -> object:
        return function(*args, original=original, **kwargs)

    return around


def patch_for_good(owner: object, name: str, function: Function[object]) -> None:
    """Call a function through another from now on; a later call replaces the other.

    It gets the arguments of the call, and the function that was there as the keyword `original`.
    """
    with _locked():
        current = getattr(owner, name)
        original = getattr(current, "_dtk_original", current)
        replacement = _around(original, function)
        vars(replacement)["_dtk_original"] = original
        setattr(owner, name, replacement)


def definer(cls: type, name: str) -> type:
    """Return the class that defines an attribute: `cls` or one of its bases."""
    return next(base for base in cls.__mro__ if name in vars(base))
