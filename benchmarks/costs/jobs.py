"""Starting what is measured: one process by itself, or workers over a communicator.

No TensorFlow here: while others measure, this process has nothing to do.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
from dtk.bench import bench_jobs
from dtk.launch import assign

OWN, MPI = "collective", "horovod-mpi"
COMMUNICATORS = (OWN, "mpi", "horovod", MPI)
RANK = Path(__file__).with_name("rank.py")
THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


class Setting(NamedTuple):
    """What to measure: a model's name, rows of a step per worker, steps of a turn, and turns."""

    model: str
    batch_size: int
    steps: int
    rounds: int
    workers: int
    shard_optimizer: bool = False  # `dtk.bench` asks for it


def run(rows, setting, communicator=None):
    """What rank 0 found for each of these rows, by name.

    Args:
        rows: Names of modules beside this one.
        setting: The setting.
        communicator: What joins its workers, of COMMUNICATORS; None starts one process by itself.
    """
    given = json.dumps({"rows": rows, "setting": setting, "distributed": communicator is not None})
    command = [*_launcher(communicator, setting.workers), str(RANK), given]
    # What `dtk run` gives its ranks, for those of mpirun and one process, too.
    (given_by_dtk,) = assign([sys.executable], 1)
    env = {**os.environ, **dict.fromkeys(THREADS, "1")}
    env["GLIBC_TUNABLES"] = given_by_dtk.env["GLIBC_TUNABLES"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=3600)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return json.loads(done.stdout.partition("RESULT ")[2].splitlines()[0])


def _launcher(communicator, workers):
    if communicator is None:
        return [sys.executable]
    if communicator != MPI:
        where = ["-n", str(workers), "--communicator", communicator]
        return [sys.executable, "-m", "dtk.cli.main", "run", *where]
    # As `dtk run` does; one thread each needs one core each.
    enough = workers <= (psutil.cpu_count(logical=False) or 1)
    binding = ["--map-by", "core", "--bind-to", "core"] if enough else ["--bind-to", "none"]
    return bench_jobs.mpirun([sys.executable], workers, {}, binding).argv
