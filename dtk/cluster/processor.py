"""What a machine computes with, and cores for each rank of a host whose launcher divides none.

`dtk run` gives every rank its share. Under an `mpirun` or `srun` that binds nothing each rank would
start as many threads as the host has cores, and they would take them from each other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping

from dtk.cluster.environment import Environment

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def instructions() -> str:
    """Return the instruction sets of the first core, and its maker's name for it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return str([line for line in lines if line.startswith(("model name", "flags", "Features"))])


def divide_cores(environment: Environment, environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this process its part of the host's cores, before TensorFlow starts its threads.

    What is set already stays, and so does TensorFlow's own setting (`tf.config.threading`). A
    process that is bound to some of the cores keeps these.

    Example:
        >>> given = {"OMP_NUM_THREADS": "3"}
        >>> divide_cores(Environment("mpi", rank=0, size=2, local_size=2), given)
        >>> given
        {'OMP_NUM_THREADS': '3'}
    """
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) < cores
    if environment.local_size == 1 or bound or any(name in environ for name in THREADS):
        return
    environ.update(dict.fromkeys(THREADS, str(max(1, cores // environment.local_size))))
