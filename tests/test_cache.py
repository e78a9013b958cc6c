"""Where dtk keeps what is dear to make again."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtk import cache


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, Path.home() / ".cache" / "dtk"),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "dtk"),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/dtk")),
    ],
)
def test_folder(environ, folder):
    assert cache.folder(environ) == folder
