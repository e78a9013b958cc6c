"""Facts that one process knows about the job it belongs to, and its part of the host's cores.

`dtk run` gives every rank its share of the cores. Under an `mpirun` or `srun` that binds nothing
each rank would start as many threads as the host has cores, and they would take them from each
other.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

from dtk.cluster import usage

THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in the job.

    Attributes:
        kind: "single", "mpi", "horovod", "slurm", "tf_config" or "address" (rank 0's is given).
        rank: Index of this process among the training processes (chief first), `0 <= rank < size`.
        size: Number of training processes.
        local_rank: Index among those on the same host.
        local_size: How many are on the same host.
        hosts: Host name (no port) of every rank in rank order; empty when the launcher does not
            tell.
        addresses: "host:port" of every rank in rank order; empty when the launcher does not tell.
        role: "worker", "chief", "ps" or "evaluator".
        reason: One sentence saying which variables were read and why this kind won.
        roles: Role of every rank in rank order, where TF_CONFIG gives them; else empty, and all are
            workers.
        tells_local_rank: False where the launcher does not say which ranks share a host, so that
            `local_rank` and `local_size` are those of a host with one rank.
        meeting: "host:port" at which rank 0 is met, to exchange `addresses`; empty when the
            launcher does not tell.
    """

    kind: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    role: str = "worker"
    reason: str = ""
    roles: tuple[str, ...] = ()
    tells_local_rank: bool = True
    meeting: str = ""


# Here NVIDIA's driver tells its version, once it is loaded.
DRIVER = Path("/proc/driver/nvidia/version")


def has_gpu() -> bool:
    """Return whether NVIDIA's driver is loaded, and the variables do not hide all GPUs."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and DRIVER.exists()


def instructions() -> str:
    """Return the instruction sets of the first core, and its maker's name for it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return str([line for line in lines if line.startswith(("model name", "flags", "Features"))])


def divide_cores(place: Place, environ: MutableMapping[str, str] = os.environ) -> None:
    """Give this process its part of the host's cores, before TensorFlow starts its threads.

    What is set already stays, and so does TensorFlow's own setting (`tf.config.threading`). A
    process that is bound to some of the cores keeps these.

    >>> given = {"OMP_NUM_THREADS": "3"}
    >>> divide_cores(Place("mpi", rank=0, size=2, local_size=2), given)
    >>> given
    {'OMP_NUM_THREADS': '3'}
    """
    cores = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) < cores
    if place.local_size == 1 or bound or any(name in environ for name in THREADS):
        return
    share = min(cores, usage.cores_allowed() or cores) // place.local_size
    environ.update(dict.fromkeys(THREADS, str(max(1, share))))
