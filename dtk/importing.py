"""Importing TensorFlow and Keras in contexts of dtk's, whoever imports them, and when."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType


def inside(name: str, *contexts: Callable[[], AbstractContextManager[object]]) -> None:
    """Import a module within contexts, the first one outermost, if that is still to come.

    >>> inside("this_module_is_not_there", contextlib.nullcontext)
    >>> import this_module_is_not_there
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'this_module_is_not_there'
    """
    armed = any(isinstance(finder, _Hook) and finder.name == name for finder in sys.meta_path)
    if name not in sys.modules and not armed:
        sys.meta_path.insert(0, _Hook(name, contexts))


class _Hook:
    """Finds one module as Python would, and has it executed in the contexts. Then it is gone."""

    def __init__(
        self, name: str, contexts: Sequence[Callable[[], AbstractContextManager[object]]]
    ) -> None:
        self.name = name
        self._contexts = contexts

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by Python for every import; only one is of interest."""
        if name != self.name:
            return None
        import importlib.util

        with contextlib.suppress(ValueError):  # another thread may have taken it out
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[union-attr]  # the class's own is back
            with contextlib.ExitStack() as stack:
                for context in self._contexts:
                    stack.enter_context(context())
                execute(module)

        with contextlib.suppress(AttributeError):  # a loader with slots: then without the contexts
            loader.exec_module = exec_module  # type: ignore[union-attr]
        return spec
