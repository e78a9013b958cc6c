"""One job at a time in a directory of checkpoints, and a killed one in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest

import dtk
from dtk.callbacks.checkpointing import directory_lock
from dtk.callbacks.checkpointing.directory_lock import NAME, DirectoryLock
from dtk.cluster import process_owner
from dtk.errors import CheckpointInUseError

from callbacks.bodies import compiled, fails, fitted

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def first(tmp_path):
    """Another process that holds the directory."""
    program = (
        "import pathlib, sys, time\n"
        "from dtk.callbacks.checkpointing.directory_lock import DirectoryLock\n"
        "held = DirectoryLock(pathlib.Path(sys.argv[1]))\nheld.take()\nprint('held', flush=True)\n"
        "sys.stdin.read()\nheld.release()\nprint('released', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def no_flock(monkeypatch):
    def refuse(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def refused(directory):
    with pytest.raises(CheckpointInUseError) as error:
        DirectoryLock(directory, patience=0.0).take()
    return str(error.value)


def test_a_second_job_is_refused_and_told_of_the_first(tmp_path, first):
    told = refused(tmp_path)
    assert f"{tmp_path}: process {first.pid} on {socket.gethostname()}" in told


def test_a_killed_job_blocks_nobody(tmp_path, first):
    first.kill()
    first.wait()
    assert (tmp_path / NAME).exists()
    held = DirectoryLock(tmp_path, patience=0.0)
    held.take()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    held.release()
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_just_ending_is_waited_for(tmp_path, first):
    first.stdin.close()
    held = DirectoryLock(tmp_path, patience=20.0)
    held.take()
    held.release()


def test_without_flock_the_named_process_decides(tmp_path, first, no_flock):
    assert str(first.pid) in refused(tmp_path)
    first.kill()
    first.wait()
    DirectoryLock(tmp_path, patience=0.0).take()


def test_without_flock_an_id_that_is_used_again_holds_nothing(tmp_path, no_flock):
    other = {**process_owner.this_process(), "since": 1.0}
    (tmp_path / NAME).write_text(json.dumps(other))
    DirectoryLock(tmp_path, patience=0.0).take()


def test_without_flock_another_host_is_believed_until_the_job_was_started_again(
    tmp_path, no_flock, monkeypatch
):
    (tmp_path / NAME).write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": 1.0}))
    assert "process 7 on elsewhere" in refused(tmp_path)
    monkeypatch.setenv("DTK_RESTARTS", "1")
    DirectoryLock(tmp_path, patience=0.0).take()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"host": "x"}', '{"pid": []}'])
def test_a_file_that_nobody_holds_says_what_it_likes(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    DirectoryLock(tmp_path, patience=0.0).take()


def test_a_lock_whose_file_was_removed_keeps_nobody_out(tmp_path, monkeypatch):
    """Opened, then released by the first: the second must not hold a file without a name."""
    real = directory_lock._flock

    def late(descriptor):
        monkeypatch.setattr(directory_lock, "_flock", real)
        (tmp_path / NAME).unlink()
        return real(descriptor)

    monkeypatch.setattr(directory_lock, "_flock", late)
    held = DirectoryLock(tmp_path, patience=5.0)
    held.take()
    assert str(os.getpid()) in refused(tmp_path)
    held.release()


def test_a_forked_child_does_not_hold_it_longer_than_its_parent(tmp_path):
    held = DirectoryLock(tmp_path, patience=0.0)
    held.take()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        # The parent's end is what closes its last descriptor.
        held.forget()
        DirectoryLock(tmp_path, patience=5.0).take()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def second_job(directory):
    """A fit in a directory that another process holds: refused, and nothing of it is touched."""
    draft = pathlib.Path(directory, ".writing-checkpoint-00000001")
    told = fails(fitted, compiled("sgd"), dtk.callbacks.Checkpoint(directory))
    return told, draft.is_dir()


@pytest.mark.worlds(("collective", 2))
def test_a_second_fit_is_refused_on_every_rank(pool, tmp_path, first):
    draft = tmp_path / ".writing-checkpoint-00000001"
    draft.mkdir()
    for told, untouched in pool.run(second_job, str(tmp_path)):
        assert told[0] == "CheckpointInUseError" and untouched
        assert re.search(rf"process {first.pid} on \S+ saves its checkpoints there", told[1])
    first.kill()
    first.wait()
    for told, untouched in pool.run(second_job, str(tmp_path)):
        assert told is None and not untouched
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


@pytest.mark.parametrize("kind", ["link", "hard link", "link to nothing", "pipe", "folder"])
def test_a_lock_that_another_user_has_put_there_is_refused(tmp_path, kind):
    """A link would have had its target emptied, and a pipe waited for its reader."""
    victim, directory = tmp_path / "victim", tmp_path / "shared"
    victim.write_text("mine")
    directory.mkdir()
    trap = directory / NAME
    if kind == "pipe":
        os.mkfifo(trap)
    elif kind == "folder":
        trap.mkdir()
    elif kind == "hard link":
        trap.hardlink_to(victim)
    else:
        trap.symlink_to(victim if kind == "link" else tmp_path / "nothing")
    with pytest.raises(OSError, match="taken by a link, or by .* then remove it, or give another"):
        DirectoryLock(directory, patience=0.0).take()
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nothing").exists()
