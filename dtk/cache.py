"""The folder that keeps what is expensive to make again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder: `$XDG_CACHE_HOME/dtk`, or `~/.cache/dtk`.

    The second where that variable is unset or relative.

    Args:
        environ: Variables to read.

    Example:
        >>> folder({"XDG_CACHE_HOME": "/tmp/cache"})
        PosixPath('/tmp/cache/dtk')
    """
    given = environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    return base / "dtk"
