"""The folder for results that are expensive to compute again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from dtk.files import written


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME/dtk`, or `~/.cache/dtk` if the variable is unset or relative.

    Example:
        >>> folder({"XDG_CACHE_HOME": "/tmp/cache"})
        PosixPath('/tmp/cache/dtk')
    """
    given = environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "dtk"


def replacing(file: Path) -> AbstractContextManager[Path]:
    """Give the block a draft to write; it replaces the file if the block does not fail.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with replacing(Path(place, "new", "file")) as draft:
        ...         _ = draft.write_text("whole")
        ...     Path(place, "new", "file").read_text()
        'whole'
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    return written(file)
