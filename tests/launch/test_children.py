"""Ranks whose script does not train in the one thread of the one process that was started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from dtk.errors import TRY_AGAIN

from support.launched import dtk_run

STRATEGY = """
import os, signal, sys, threading, time
import dtk
strategy = dtk.auto_strategy()
rank = strategy.rank
"""
# A child by `os.fork` has its parent's connections, and Python runs its exit functions in it.
FORKS = """
for ends in (lambda: sys.exit(3), lambda: 1 / 0):
    if not (child := os.fork()):
        ends()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
strategy.communicator.barrier()
print("goes on")
"""


def run(script, tmp_path, *arguments, **settings):
    (tmp_path / "train.py").write_text(script)
    return dtk_run("-n", 2, *arguments, "train.py", cwd=tmp_path, timeout=90, **settings)


def test_a_forked_child_that_ends_leaves_the_job_alone(tmp_path):
    done = run(STRATEGY + FORKS, tmp_path, "--communicator", "mpi")
    assert done.returncode == 0, done.stderr
    expected = ["3", "1", "goes on"]
    for rank in "01":
        told = [line[4:] for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert told == expected
    assert "ending the job" not in done.stderr


def test_tensorflow_takes_no_sigterm(tmp_path):
    kills = "if rank: os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)"
    done = run(STRATEGY + kills, tmp_path, "--communicator", "collective")
    assert done.returncode == 143 and "rank 1, host localhost, failed first" in done.stderr


THREAD = """
def train():
    strategy.world.keep_to_thread()
    if rank == 0:
        raise ValueError("boom")
    strategy.communicator.barrier()
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def test_an_exception_in_the_thread_that_trains_ends_the_rank(tmp_path):
    done = run(STRATEGY + THREAD, tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: boom"), done.stderr


def test_a_rank_that_lost_another_s_thread_ends_and_says_who_failed(tmp_path):
    """Where no launcher of dtk's is: what the thread that calls fit waits for is seen."""
    (tmp_path / "train.py").write_text(STRATEGY + THREAD)
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
        )
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=90)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, TRY_AGAIN], said
    assert "failed first at train.py:" in said[1] and said[1].endswith("ValueError: boom\n"), said


CHILD = """
import multiprocessing, sys, time
def train():
    import dtk
    strategy = dtk.auto_strategy()
    while strategy.rank:
        time.sleep(60)
    strategy.communicator.barrier()
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.full("its rule is that of ranks without a launcher, which other tests hold")
def test_ranks_that_train_in_children_watch_each_other(tmp_path):
    done = run(CHILD, tmp_path, "--stall-timeout", 3)
    assert done.returncode == 124
    assert "did nothing for 3 s after" in done.stderr and "rank 0 waits in" in done.stderr
