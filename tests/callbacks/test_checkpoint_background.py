"""Checkpoints written while training goes on hold what those hold that training waits for."""

from __future__ import annotations

import contextlib
import io
import pathlib
import threading
import time

import h5py
import keras
import numpy as np
import pytest

import dtk
from dtk.callbacks.checkpointing.checkpoint_files import CheckpointFiles
from dtk.callbacks.checkpointing.contents import Background

from callbacks.bodies import (
    Crash,
    Preempted,
    compiled,
    crash_at,
    exit_code,
    fails,
    fitted,
    strategy,
)


def test_the_next_work_waits_and_says_so_where_it_waits_long():
    said, go_on = [], threading.Event()
    background = Background(said.append, long=0.05)
    background.start("checkpoint-1", lambda: go_on.wait(60))
    background.finish(wait=False)
    threading.Timer(0.3, go_on.set).start()
    background.finish()
    assert go_on.is_set() and said == ["waiting for checkpoint-1, which takes more than 0.05 s"]
    background.start("checkpoint-2", lambda: None)
    background.finish()
    background.finish()
    assert len(said) == 1


def test_what_the_work_raises_is_told_once():
    background = Background(print)
    background.start("checkpoint-1", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        background.finish()
    background.finish()
    assert background.left() is None


def content_of(folder):
    """What a checkpoint holds, as bytes by name."""
    found = {}
    with h5py.File(folder / "weights.weights.h5") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()].tobytes()}) if isinstance(item, h5py.Dataset) else None
            )
        )
    with np.load(folder / "arrays.npz") as arrays:
        found.update({name: arrays[name].tobytes() for name in arrays})
    state, _ = CheckpointFiles(folder.parent).read(folder.name)
    del state["variables"]  # a second model's layers have other names
    return found, state


def slow_disk(seconds):
    """Make every checkpoint take so long to write."""
    write = CheckpointFiles.write

    def late(self, *args):
        time.sleep(seconds)
        return write(self, *args)

    CheckpointFiles.write = late
    return lambda: setattr(CheckpointFiles, "write", write)


def is_writing():
    return "dtk-checkpoint" in [one.name for one in threading.enumerate()]


class During(keras.callbacks.Callback):
    """Notes after each step whether a checkpoint is being written."""

    def __init__(self, into):
        super().__init__()
        self.into = into

    def on_train_batch_end(self, batch, logs=None):
        self.into.append(is_writing())


def both_ways(directory):
    """Twice the same training: its checkpoints one by one; steps while one was written."""
    strategy()
    contents, during = {}, []
    for background in (False, True):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.Adam(0.05), dropout=0.3)
        place = pathlib.Path(directory, str(background))
        saved = dtk.callbacks.Checkpoint(
            place, save_freq=3, max_to_keep=None, monitor="loss", background=background
        )
        undo = slow_disk(0.3 if background else 0.0)
        try:
            fitted(model, saved, During(during), epochs=3)
        finally:
            undo()
        strategy().communicator.barrier()
        contents[background] = {
            name: content_of(place / name) for name in reversed(saved.files.names())
        }
        best = (place / "best.weights.h5").is_file()
        hidden = [path.name for path in place.iterdir() if path.name.startswith(".")]
    same = contents[False].keys() == contents[True].keys() and all(
        contents[False][name] == contents[True][name] for name in contents[False]
    )
    return same, len(contents[True]), any(during), best, hidden


@pytest.mark.worlds(("local", 1), pytest.param(("collective", 2), marks=pytest.mark.full))
def test_the_same_bits_as_without(pool, tmp_path):
    results = pool.run(both_ways, str(tmp_path), timeout=120)
    for same, count, _, best, hidden in results:
        assert same and count == 6 and best and not hidden
    assert results[0][2], "training goes on while rank 0 writes"
    assert not any(result[2] for result in results[1:])


def left_early(directory, how):
    """A fit that ends while a checkpoint is being written; what is there right after."""
    strategy()
    place = dtk.callbacks.Checkpoint(directory, save_freq=2, background=True)
    undo, said = slow_disk(1.0), io.StringIO()
    ending = crash_at(0, 3) if how == "crash" else Preempted(0, 2)
    try:
        with contextlib.redirect_stdout(said):
            code = exit_code(fitted, compiled("sgd"), place, ending, rows=400)
    except Crash:
        code = "crash"
    finally:
        undo()
    steps = [place.files.read(name)[0]["step"] for name in place.files.names()]
    return code, steps, is_writing(), said.getvalue()


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_an_exception_and_sigterm_wait_for_what_is_being_written(pool, tmp_path):
    ((*found, _),) = pool.run(left_early, str(tmp_path / "one"), "crash")
    assert found == ["crash", [2], False]
    ((*found, said),) = pool.run(left_early, str(tmp_path / "two"), "sigterm")
    assert found == [143, [3, 2], False]
    assert "SIGTERM: saved " in said and "checkpoint-00000002" in said


def failing(directory, options):
    """A disk on which the first checkpoint cannot be written; steps that were taken after."""
    strategy()
    place = dtk.callbacks.Checkpoint(
        directory, save_freq=2, background=True, monitor="loss", **options
    )
    steps, write, calls = [], CheckpointFiles.write, []

    def once(self, *args):
        calls.append(None)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(self, *args)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            # Long enough for a thread to fail.
            time.sleep(0.2)
            steps.append(batch)

    said = io.StringIO()
    CheckpointFiles.write = once
    try:
        with contextlib.redirect_stdout(said):
            failure = fails(fitted, compiled("sgd"), place, Steps(), rows=64)
    finally:
        CheckpointFiles.write = write
    return failure, steps, said.getvalue(), place.files.names()


@pytest.mark.full_but("local-1")
@pytest.mark.worlds(("local", 1), ("collective", 2))
def test_a_failure_is_told_and_the_next_save_tries_anew_or_training_ends(pool, tmp_path):
    results = pool.run(failing, str(tmp_path / "one"), {})
    for failure, steps, _, names in results:
        assert failure is None and steps == list(range(8)) and len(names) == 3
    assert results[0][2].count("No space left on device; training goes on") == 1
    results = pool.run(failing, str(tmp_path / "two"), {"on_save_error": "raise"})
    for (kind, text), steps, _, names in results:
        assert kind == "CheckpointSaveError" and "No space left" in text and not names
        # Alone at the next step, which is the third; with others where the next save is.
        assert steps == ([0, 1, 2] if len(results) == 1 else [0, 1, 2, 3])
