"""The examples in the docstrings of dtk.data and dtk.inference run."""

from __future__ import annotations

import pathlib

import pytest

import dtk.data
import dtk.inference

from callbacks import bodies

NAMES = sorted(
    f"{part.__name__}.{file.stem}"
    for part in (dtk.data, dtk.inference)
    for file in pathlib.Path(part.__file__).parent.glob("[!_]*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_the_examples_run(world, backend, size):
    assert NAMES
    for name in [*NAMES, "dtk.communicators.root", "dtk.even_division", "dtk.files"]:
        [(failed, attempted)] = world(backend, size).run(bodies.examples, name)
        assert attempted and not failed, name
