"""What tests compare with, computed once for all of them."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import world


@functools.cache
def once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, computed once for all workers of pytest.

    With two workers of pytest-xdist the tests of one world run on one of them, and those of
    another, which compare with the same numbers, on the other.

    Args:
        function: At the top level of a module; returns the same for the same arguments.
        args: Whose `repr` tells them apart.
        kwargs: The same.
    """
    call = f"{function.__module__}.{function.__qualname__}{args!r}{kwargs!r}"
    folder = Path(os.environ["DTK_TEST_RESULTS"])
    file = folder / hashlib.blake2b(call.encode(), digest_size=16).hexdigest()
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        world.choose_rewriting(f"{function.__module__}:{function.__qualname__}")
        part.write_bytes(pickle.dumps(function(*args, **kwargs)))
        part.replace(file)
    return pickle.loads(file.read_bytes())
