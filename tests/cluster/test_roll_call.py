"""Ranks of one host that wait for each other before MPI starts."""

import os
import subprocess
import sys

JOB = {"PMIX_NAMESPACE": f"tests-{os.getpid()}"}
WAITS = """
from dtk.cluster import Environment, roll_call, waiting
waiting.AFTER = 0.5
roll_call.await_neighbours(Environment("mpi", 0, 2, local_size=2), 1.5)
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
