"""Importing TensorFlow and Keras without looking for garbage, of which that leaves next to none.

They make half a million objects that live as long as the process. Python's collector goes through
them again and again: while they are made, whenever it looks at everything later, and at exit. Kept
away from them, it saves a quarter of the import and most of a second at exit
(`benchmarks/startup.py`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Keep the collector out of the block, and for good from what exists when it is over.

    Objects are freed as ever when their last reference goes; only circles of them that exist by
    then are not looked for any more (`gc.unfreeze()` takes that back). A script that has switched
    the collector off has decided for itself, and an import that fails leaves everything as it was.

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
