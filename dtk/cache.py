"""The folder for results that are expensive to compute again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME/dtk`, or `~/.cache/dtk` if the variable is unset or relative.

    Example:
        >>> folder({"XDG_CACHE_HOME": "/tmp/cache"})
        PosixPath('/tmp/cache/dtk')
    """
    given = environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "dtk"


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give the block a draft to write; it replaces the file if the block does not fail.

    A reader never sees half a file, and a block that fails leaves no draft behind.

    Example:
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with replacing(Path(place, "new", "file")) as draft:
        ...         _ = draft.write_text("whole")
        ...     Path(place, "new", "file").read_text()
        'whole'
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    os.close(descriptor)
    draft = Path(name)
    try:
        yield draft
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
