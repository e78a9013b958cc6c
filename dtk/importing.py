"""Import modules such as TensorFlow and Keras within dtk's contexts, wherever they are imported."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType


def inside(name: str, *contexts: Callable[[], AbstractContextManager[object]]) -> None:
    """Make a module's import run within contexts, the first one outermost.

    A module that is already imported is left alone.

    >>> inside("this_module_is_not_there", contextlib.nullcontext)
    >>> import this_module_is_not_there
    Traceback (most recent call last):
    ModuleNotFoundError: No module named 'this_module_is_not_there'
    """
    armed = any(isinstance(finder, _Hook) and finder.name == name for finder in sys.meta_path)
    if name not in sys.modules and not armed:
        sys.meta_path.insert(0, _Hook(name, contexts))


class _Hook:
    """Import hook that runs one module within contexts, and removes itself when it finds it."""

    def __init__(
        self, name: str, contexts: Sequence[Callable[[], AbstractContextManager[object]]]
    ) -> None:
        self.name = name
        self._contexts = contexts

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the hook's module; return None for any other."""
        if name != self.name:
            return None
        import importlib.util

        with contextlib.suppress(ValueError):  # another thread may have removed the hook
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[union-attr]  # uncovers the class's method
            with contextlib.ExitStack() as stack:
                for context in self._contexts:
                    stack.enter_context(context())
                execute(module)

        with contextlib.suppress(AttributeError):  # a loader with slots runs without the contexts
            loader.exec_module = exec_module  # type: ignore[union-attr]
        return spec


# TensorFlow's and Keras's imports make half a million objects that live as long as the process.
# Python's collector visits them again and again: during the import, at each full collection, and at
# exit. Without these visits the import takes a quarter less, and the exit most of a second
# (benchmarks/startup.py).
@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Switch the collector off in the block, and make it ignore all objects that exist after it.

    Objects are still freed when their last reference goes; only reference cycles that exist by then
    are no longer collected (`gc.unfreeze()` undoes this). Nothing changes if the script has
    switched the collector off itself; if the import fails, the collector is as before.

    >>> import gc
    >>> with without_collector():
    ...     gc.isenabled()
    False
    >>> gc.isenabled(), gc.get_freeze_count() > 0
    (True, True)
    >>> gc.unfreeze()
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
