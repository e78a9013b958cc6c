"""Checkpoints on disk: complete or not there, wherever the process is killed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import dtk
from dtk.callbacks.checkpointing.files import CheckpointFiles, CorruptCheckpointError
from dtk.files import DRAFT

ROOT = pathlib.Path(__file__).resolve().parents[2]

KILLED_WHILE = {
    "writing weights": "save = half_then_die",
    "writing arrays": "np.savez = die",
    "writing state": "json.dumps = die",
    "flushing": "os.fsync = die",
    "renaming": "os.rename = die",
}


def save(text):
    return lambda path: pathlib.Path(path).write_text(text)


@pytest.mark.parametrize("moment", KILLED_WHILE)
def test_a_process_killed_while_it_writes_harms_nothing(tmp_path, moment):
    files = CheckpointFiles(tmp_path)
    files.write(save("one"), {"epoch": 1}, {"a": np.arange(3)})
    program = f"""
        import json, os, pathlib, signal
        import numpy as np
        from dtk.callbacks.checkpointing.files import CheckpointFiles

        def die(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGKILL)

        def half_then_die(path):
            pathlib.Path(path).write_text("tw")
            die()

        save = lambda path: pathlib.Path(path).write_text("two")
        {KILLED_WHILE[moment]}
        CheckpointFiles({str(tmp_path)!r}).write(save, {{"epoch": 2}}, {{}})
    """
    died = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True
    )
    assert died.returncode == -9, died.stderr
    assert files.names() == ["checkpoint-00000001"]
    state, arrays = files.read("checkpoint-00000001")
    assert state == {"epoch": 1}
    np.testing.assert_array_equal(arrays["a"], [0, 1, 2])
    files.clear_unfinished()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-00000001"]
    assert files.write(save("two"), {"epoch": 2}, {}) == "checkpoint-00000002"


@pytest.mark.parametrize("file", ["weights.weights.h5", "arrays.npz", "state.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_harm_is_noticed(tmp_path, file, harm):
    files = CheckpointFiles(tmp_path)
    name = files.write(save("weights"), {"epoch": 1}, {"a": np.arange(3)})
    path = tmp_path / name / file
    content = path.read_bytes()
    if harm == "remove":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif file == "state.json":
        path.write_bytes(b"[" + content[1:])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CorruptCheckpointError, match=file.split(".")[0]):
        files.read(name)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_text(path.read_text().replace('"epoch": 1', '"epoch": 9')),
        lambda path: path.write_text(path.read_text().replace('"epoch": 1, ', "")),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("null"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('{"digests": []}'),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["digit", "no key", "list", "null", "nested", "no digests", "folder"],
)
def test_a_state_that_is_not_what_was_written_is_noticed(tmp_path, harm):
    files = CheckpointFiles(tmp_path)
    name = files.write(save("weights"), {"epoch": 1, "step": 2}, {})
    harm(tmp_path / name / "state.json")
    with pytest.raises(CorruptCheckpointError, match="state"):
        files.read(name)


def test_a_folder_in_the_place_of_weights_is_noticed(tmp_path):
    files = CheckpointFiles(tmp_path)
    weights = files.weights(files.write(save("weights"), {"epoch": 1}, {}))
    weights.unlink()
    weights.mkdir()
    with pytest.raises(CorruptCheckpointError, match="weights"):
        files.read(weights.parent.name)


@pytest.mark.parametrize(
    "given",
    [
        {"max_to_keep": 2.5},
        {"max_to_keep": True},
        {"max_to_keep": 0},
        {"save_freq": True},
        {"save_freq": 1.5},
        {"save_freq": "batch"},
    ],
    ids=str,
)
def test_arguments_that_are_no_counts(tmp_path, given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        dtk.callbacks.Checkpoint(tmp_path, **given)


def test_prune_keeps_the_newest_and_numbers_go_on(tmp_path):
    files = CheckpointFiles(tmp_path)
    for _ in range(4):
        files.write(save("x"), {}, {})
    files.prune(2)
    assert files.names() == ["checkpoint-00000004", "checkpoint-00000003"]
    files.prune(None)
    assert len(files.names()) == 2
    assert files.write(save("x"), {}, {}) == "checkpoint-00000005"


def test_an_absent_directory_is_empty(tmp_path):
    files = CheckpointFiles(tmp_path / "none")
    assert files.names() == []
    files.clear_unfinished()
    files.prune(1)


ENDS = ("weights.h5", "json")


def test_best_is_replaced_whole(tmp_path):
    files = CheckpointFiles(tmp_path)
    for text in ("one", "two"):
        files.keep_best(files.write(save(text), {}, {}), {"value": text})
    assert (tmp_path / "best.weights.h5").read_text() == "two"
    assert (tmp_path / "best.json").read_text() == '{"value": "two"}'


def test_links_where_drafts_go_are_not_followed(tmp_path):
    victim, directory = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    files = CheckpointFiles(directory)
    directory.mkdir()
    drafts = ("checkpoint-00000001", "best", *(f"{os.getpid()}-best.{end}" for end in ENDS))
    for name in drafts:
        (directory / f"{DRAFT}{name}").symlink_to(victim)
    files.keep_best(files.write(save("one"), {}, {}), {"value": 1})
    assert victim.read_text() == "mine"
    assert (directory / "best.weights.h5").read_text() == "one"
    assert not (directory / "best.weights.h5").is_symlink()
