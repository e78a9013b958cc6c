"""The examples in the docstrings of dtk.layers run."""

from __future__ import annotations

import pathlib

import pytest

import dtk.layers

from callbacks import bodies

NAMES = sorted(
    file.stem
    for file in pathlib.Path(dtk.layers.__file__).parent.glob("[!_]*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_the_examples_run(world, backend, size):
    assert NAMES
    modules = [f"dtk.layers.{name}" for name in NAMES]
    for name in (*modules, "dtk.communicators.shard"):
        [(failed, attempted)] = world(backend, size).run(bodies.examples, name)
        assert attempted and not failed, name
