"""What to do about files that every rank makes, or one makes and another looks for."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MADE = re.compile(r"FileExistsError\b|.*errors_impl\.AlreadyExistsError\b")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
_MISSING = re.compile(r"FileNotFoundError\b|ValueError: File not found: filepath=")
_SAYS_ITSELF = "no checkpoint can be written"  # rank 0 alone has tried, and all raise it

_MAKE = (
    "dtk: every rank runs the whole script, and another may have made that file first. Let rank 0 "
    "make it or unpack it, `if strategy.is_chief: os.mkdir(path)`, and the others wait, "
    "`strategy.communicator.barrier()`; os.makedirs(path, exist_ok=True) may be called by all."
)
_READ = (
    "dtk: every rank runs the whole script, but rank 0 alone writes the files of callbacks and "
    "model.save, and tempfile.mkdtemp() makes another directory on each. Read the file "
    "`if strategy.is_chief:`, or give all ranks one path that they share: "
    "path = strategy.communicator.broadcast_object(path)."
)


def advice(words: Sequence[str], rank: int) -> str | None:
    """Return what to do about the exception that ended a rank, if it may come of that."""
    last = next((line for line in reversed(words) if _EXCEPTION.match(line)), "")
    if _SAYS_ITSELF in last:
        return None
    if _MADE.match(last):
        return _MAKE
    return _READ if _MISSING.match(last) and rank else None
