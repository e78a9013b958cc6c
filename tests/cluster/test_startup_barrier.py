"""A start that waits says once for whom; ranks of one host wait for each other before MPI."""

import os
import subprocess
import sys

from dtk.cluster import startup_barrier
from dtk.cluster.startup_barrier import Wait

JOB = {"PMIX_NAMESPACE": f"tests-{os.getpid()}"}
WAITS = """
from dtk.cluster import Place, startup_barrier
startup_barrier.AFTER = 0.5
startup_barrier.await_neighbours(Place("mpi", 0, 2, local_size=2), 1.5)
"""


def test_a_rank_says_for_whom_it_waits_before_that_one_is_said_to_be_stuck():
    """With a long stall timeout, nothing was said for as long."""
    env = {**os.environ, **JOB}
    with subprocess.Popen(["sleep", "60"], env={**env, "OMPI_COMM_WORLD_RANK": "1"}) as missing:
        try:
            done = subprocess.run(
                [sys.executable, "-c", WAITS], env=env, capture_output=True, text=True, timeout=50
            )
        finally:
            missing.kill()
    assert done.returncode == 124, done.stderr
    said, _, stuck = done.stderr.partition("\n")
    assert said == (
        f"dtk: rank 0: waiting for rank 1 (process {missing.pid}) to make a strategy; the job is "
        "ended once one of them has done nothing for 1.5 s"
    )
    assert "did nothing for 1.5 s" in stuck


def test_it_says_once_and_late_for_whom_and_how_long(monkeypatch, capsys):
    wait = Wait("rank 1", 100.0)
    wait.say("rank 0 (node1:2222)")
    assert 9.0 < wait.quiet <= 10.0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(startup_barrier, "AFTER", 0.0)
    assert wait.quiet == 0.0
    wait.say("rank 0 (node1:2222)")
    wait.say("rank 0 (node1:2222)")
    assert capsys.readouterr().err == (
        "dtk: rank 1: waiting for rank 0 (node1:2222), for 100 s more "
        "(DTK_START_TIMEOUT sets the limit)\n"
    )
    assert 90.0 < wait.quiet <= 100.0
    assert Wait("rank 1", 0.0).left == 0.0
