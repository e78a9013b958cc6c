"""Whatever happens to a directory of checkpoints: the newest that is whole is loaded, or none."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtk
from dtk.callbacks.checkpointing import contents
from dtk.callbacks.checkpointing.checkpoint_files import (
    ARRAYS,
    STATE,
    WEIGHTS,
    CheckpointFiles,
    CorruptCheckpointError,
    _digest_of,
)
from dtk.callbacks.strategy_callback import StrategyCallback
from dtk.files import DRAFT
from dtk.trainer.distributed_model import trainer_of

from callbacks.bodies import compiled, everything, fails, fitted, strategy

pytestmark = pytest.mark.command

FILES = (WEIGHTS, ARRAYS, STATE)

NAMES = tuple(f"checkpoint-{number:08d}" for number in (1, 2, 3))

TEXTS = (b"", b"[]", b"null", b'{"digests": {}}', b"[" * 5000, b"\xff\x00" * 99)


def flipped(content, at):
    place, bit = int(at * len(content)), 1 << int(at * 997) % 8
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def swap(one, other):
    if one.is_file() and other.is_file():
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)


# What is in the place of a file, by its path, its content and a number from 0 to 1; of a folder of
# a checkpoint; and of a name that nobody had.
TO_FILES = {
    "cut": lambda path, content, at: path.write_bytes(content[: int(at * len(content))]),
    "flip": lambda path, content, at: path.write_bytes(flipped(content or b"x", at)),
    "replace": lambda path, _, at: path.write_bytes(TEXTS[int(at * len(TEXTS))]),
    "append": lambda path, content, at: path.write_bytes(content + TEXTS[int(at * len(TEXTS))]),
    "remove": lambda *_: None,
    "folder": lambda path, *_: path.mkdir(),
    "pipe": lambda path, *_: os.mkfifo(path),
    "loop": lambda path, *_: path.symlink_to(path),
}
TO_FOLDERS = {
    "swap": lambda folder, file, at: swap(folder / file, folder.parent / NAMES[int(3 * at)] / file),
    "swap files": lambda folder, file, at: swap(folder / file, folder / FILES[int(3 * at)]),
    "remove all": lambda folder, *_: shutil.rmtree(folder),
    "file for folder": lambda folder, *_: (shutil.rmtree(folder), folder.write_bytes(b"something")),
    "extra": lambda folder, *_: (folder / "notes.txt").write_text("mine"),
}
STRANGERS = {
    "stranger": lambda path: path.write_bytes(b"something"),
    "strange folder": lambda path: path.mkdir(),
    "strange link": lambda path: path.symlink_to("nowhere"),
}
damages = st.tuples(
    st.sampled_from([*TO_FILES, *TO_FOLDERS, *STRANGERS]),
    st.sampled_from(NAMES),
    st.sampled_from(FILES),
    st.floats(0.0, 0.999),
)


def harm(directory, damage):
    """Do one damage; what is not there any more cannot be damaged again."""
    kind, name, file, at = damage
    folder, path = directory / name, directory / name / file
    stranger = directory / ("checkpoint-00000009" if at < 0.5 else ".writing-x")
    if kind in STRANGERS and not os.path.lexists(stranger):
        STRANGERS[kind](stranger)
    elif kind in TO_FOLDERS and folder.is_dir():
        TO_FOLDERS[kind](folder, file, at)
    elif kind in TO_FILES and path.is_file():
        content = path.read_bytes()
        path.unlink()
        TO_FILES[kind](path, content, at)


def damaged(directory, examples):
    """Damage copies of a directory with three checkpoints, and load of each what can be loaded."""
    strategy()
    pristine, copy = pathlib.Path(directory, "pristine"), pathlib.Path(directory, "copy")
    model = compiled("sgd")
    trained = {}

    class Keep(StrategyCallback):
        def on_epoch_agreed(self, epoch, logs=None):
            trained[NAMES[epoch]] = everything(model)

    fitted(model, Keep(), dtk.callbacks.Checkpoint(pristine), epochs=3)
    trainer = trainer_of(model)
    states = {name: CheckpointFiles(pristine).read(name)[0] for name in NAMES}
    fallen = []

    def same(name):
        return all(
            (copy / name / file).is_file()
            and (copy / name / file).read_bytes() == (pristine / name / file).read_bytes()
            for file in FILES
        )

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(damages, min_size=1, max_size=5))
    def check(several):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(pristine, copy)
        for damage in several:
            harm(copy, damage)
        untouched = [name for name in reversed(NAMES) if same(name)]
        found = CheckpointFiles(copy)
        listed = found.names()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                loaded = contents.load_newest(found, trainer)
            except ValueError as error:
                assert str(error).startswith("no checkpoint can be read ("), error
                assert not untouched and listed
                loaded = None
        if loaded is None:
            assert not untouched
        else:
            name, state = loaded
            # A damage that JSON does not see, such as of a space, is none.
            assert not untouched or name >= untouched[0]
            assert state["epoch"] == states[name]["epoch"]
            np.testing.assert_array_equal(everything(model), trained[name])
            told = [str(one.message) for one in caught if "going back to" in str(one.message)]
            assert bool(told) == (name != listed[0])
            fallen.append(name)
        # And it can be saved to.
        after = found.write(lambda path: pathlib.Path(path).write_text("next"), {"epoch": 9}, {})
        assert found.names()[0] == after
        found.prune(1)
        assert found.names() == [after]

    check()
    return {name: fallen.count(name) for name in NAMES}


@pytest.mark.worlds(("local", 1))
def test_the_newest_that_is_whole_is_loaded_or_none(pool, tmp_path):
    (fallen,) = pool.run(damaged, str(tmp_path), 60, timeout=200)
    assert all(fallen.values()), "every one of the three must have been the newest"


def with_digest(path, **changes):
    """Change a state, and its digest with it."""
    state = json.loads(path.read_text()) | changes
    digests = state.pop("digests")
    digests[STATE] = _digest_of(state)
    path.write_text(json.dumps({**state, "digests": digests}))


def newer(directory):
    """The newest of two checkpoints is from a dtk to come."""

    def fit(epochs):
        fitted(compiled("sgd"), dtk.callbacks.Checkpoint(directory), epochs=epochs)

    fit(2)
    strategy().communicator.barrier()
    path = pathlib.Path(directory, NAMES[1], STATE)
    if strategy().is_chief:
        with_digest(path, format=77)
    strategy().communicator.barrier()
    return fails(fit, 3)


@pytest.mark.worlds(("local", 1), pytest.param(("collective", 2), marks=pytest.mark.full))
def test_a_format_to_come_is_refused_on_every_rank(pool, tmp_path):
    for kind, text in pool.run(newer, str(tmp_path)):
        assert kind == "CheckpointFormatError"
        assert "checkpoint-00000002 has format 77, and this dtk reads 1 at most" in text


def test_every_file_is_in_the_digests_and_nothing_else(tmp_path):
    written = CheckpointFiles(tmp_path)
    name = written.write(lambda path: pathlib.Path(path).write_text("x"), {"epoch": 1}, {})
    found = json.loads((tmp_path / name / STATE).read_text())["digests"]
    assert sorted(found) == sorted(path.name for path in (tmp_path / name).iterdir())
    state = json.loads((tmp_path / name / STATE).read_text())
    state["digests"]["notes.txt"] = state["digests"][WEIGHTS]
    (tmp_path / name / "notes.txt").write_text("x")
    (tmp_path / name / STATE).write_text(json.dumps(state))
    with pytest.raises(CorruptCheckpointError, match="state.json is not what was written"):
        written.read(name)


IMPOSSIBLE = {
    "epoch": -3,
    "step": True,
    "workers": 0,
    "data": {"iterators": 1, "seen": -2, "open": False, "batch_size": 8, "batches": 4},
    "format": "one",
}


def impossible(directory):
    """The newest of two checkpoints holds one value that no dtk has written, with its digest."""
    told = {}

    def fit(epochs, place):
        return fitted(compiled("sgd"), dtk.callbacks.Checkpoint(place), epochs=epochs)

    fit(2, pathlib.Path(directory, "whole"))
    for key, value in IMPOSSIBLE.items():
        place = pathlib.Path(directory, key)
        shutil.copytree(pathlib.Path(directory, "whole"), place)
        path = place / NAMES[1] / STATE
        with_digest(path, **{key: value})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            epochs = fit(3, place).epoch
        told[key] = epochs, [str(one.message) for one in caught]
    return told


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_a_value_that_cannot_be_is_named_and_the_one_before_is_loaded(pool, tmp_path):
    (told,) = pool.run(impossible, str(tmp_path), timeout=180)
    for key, value in IMPOSSIBLE.items():
        epochs, warned = told[key]
        assert epochs == [0, 1, 2], key
        shown = "data.seen is -2" if key == "data" else f"{key} is {value!r}"
        (text,) = [text for text in warned if "corrupt checkpoint" in text]
        assert f"{NAMES[1]}: state.json: {shown}, expected" in text
        assert f"going back to {tmp_path}/{key}/{NAMES[0]}" in text


# Written whole or not at all.

ROOT = pathlib.Path(__file__).resolve().parents[2]

KILLED_WHILE = """
import json, os, pathlib, signal, sys, warnings
import numpy as np
from dtk.callbacks.checkpointing.checkpoint_files import CheckpointFiles

warnings.simplefilter("ignore")  # of forks
files = CheckpointFiles(sys.argv[1])
save = lambda path: pathlib.Path(path).write_text("two")

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def half_then_die(path):
    pathlib.Path(path).write_text("tw")
    die()

for patch in (
    "save = half_then_die", "np.savez = die", "json.dumps = die", "os.fsync = die",
    "os.rename = die",
):
    child = os.fork()
    if not child:
        exec(patch)
        files.write(save, {"epoch": 2}, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, patch
    assert files.names() == ["checkpoint-00000001"], patch
    state, arrays = files.read("checkpoint-00000001")
    assert state == {"epoch": 1} and arrays["a"].tolist() == [0, 1, 2]
    assert len(os.listdir(sys.argv[1])) == 2, "half a checkpoint"
    files.clear_unfinished()
    assert os.listdir(sys.argv[1]) == ["checkpoint-00000001"]
"""


def save(text):
    return lambda path: pathlib.Path(path).write_text(text)


@pytest.mark.full("a cheaper test holds its rule")
def test_a_process_killed_while_it_writes_harms_nothing(tmp_path):
    files = CheckpointFiles(tmp_path)
    files.write(save("one"), {"epoch": 1}, {"a": np.arange(3)})
    command = [sys.executable, "-c", KILLED_WHILE, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files.write(save("two"), {"epoch": 2}, {}) == "checkpoint-00000002"


def test_prune_keeps_the_newest_and_numbers_go_on(tmp_path):
    files = CheckpointFiles(tmp_path)
    for _ in range(4):
        files.write(save("x"), {}, {})
    files.prune(2)
    assert files.names() == ["checkpoint-00000004", "checkpoint-00000003"]
    files.prune(None)
    assert len(files.names()) == 2
    absent = CheckpointFiles(tmp_path / "none")
    assert absent.names() == []
    absent.clear_unfinished()
    absent.prune(1)
    assert files.write(save("x"), {}, {}) == "checkpoint-00000005"


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
