"""Where dtk keeps what is dear to make again."""

from __future__ import annotations

import doctest
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


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "new" / "file"
    with cache.replacing(file) as draft:
        draft.write_text("first")
        assert not file.exists()
    with pytest.raises(ValueError, match="half way"), cache.replacing(file) as draft:
        draft.write_text("sec")
        raise ValueError("half way")
    assert [(one.name, one.read_text()) for one in file.parent.iterdir()] == [("file", "first")]


def test_examples():
    assert doctest.testmod(cache).failed == 0
