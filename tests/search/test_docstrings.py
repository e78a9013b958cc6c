"""The examples in the docstrings of dtk.search run."""

from __future__ import annotations

import pathlib

import pytest

import dtk.search

from callbacks import bodies

NAMES = sorted(
    file.stem
    for file in pathlib.Path(dtk.search.__file__).parent.glob("[!_]*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_the_examples_run(world, backend, size):
    assert NAMES == ["grouping", "study", "trial"]
    for name in NAMES:
        [(failed, attempted)] = world(backend, size).run(bodies.examples, f"dtk.search.{name}")
        assert attempted and not failed, name
