"""The examples in the docstrings of the rooms that scripts import run."""

from __future__ import annotations

import pathlib

import pytest

import dtk

from callbacks import bodies

ROOMS = ("callbacks", "data", "inference", "layers", "optimizers", "schedules", "search")
FILES = ("dtk.communicators.root", "dtk.communicators.shard", "dtk.even_division", "dtk.files")
HOME = pathlib.Path(dtk.__file__).parent
NAMES = sorted(
    ".".join(("dtk", *file.relative_to(HOME).with_suffix("").parts))
    for room in ROOMS
    for file in HOME.joinpath(room).rglob("[!_]*.py")
    if ">>>" in file.read_text()
)


@pytest.mark.full_for(
    *("*.batch_size", "*.callbacks.checkpoint", "*.evaluation", "*.reports", "*.sample_rate"),
    why="examples that train most: tests/callbacks has a test of each thing that they show",
)
@pytest.mark.parametrize("name", [*NAMES, *FILES])
@pytest.mark.worlds(("local", 1))
def test_the_examples_run(pool, name):
    [(failed, attempted)] = pool.run(bodies.examples, name)
    assert attempted and not failed
