"""Import TensorFlow and Keras without garbage collection: the import leaves almost no garbage.

The import makes half a million objects that live as long as the process. Python's collector visits
them again and again: during the import, at each full collection, and at exit. Without these visits
the import takes a quarter less, and the exit most of a second (`benchmarks/startup.py`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Switch the collector off in the block, and make it ignore all objects that exist after it.

    Objects are still freed when their last reference goes; only reference cycles that exist by then
    are no longer collected (`gc.unfreeze()` undoes this). Nothing changes if the script has
    switched the collector off itself; if the import fails, the collector is as before.

    >>> import gc
    >>> with left_alone():
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
