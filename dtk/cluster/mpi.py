"""Started by `mpirun`, `mpiexec` or `horovodrun`.

| launcher | rank, size | on the same host |
|---|---|---|
| Horovod (Gloo) | HOROVOD_RANK, HOROVOD_SIZE | HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE |
| Open MPI | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| MPICH, Intel MPI (Hydra) | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS |
| PALS | PMI_RANK, PMI_SIZE | PMI_LOCAL_RANK, PMI_LOCAL_SIZE |
| PMIx alone | PMIX_RANK, PMIX_SIZE | PMIX_LOCAL_RANK, PMIX_LOCAL_SIZE |

Open MPI documents its four: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
The PMIx standard fixes only PMIX_RANK as a variable; a server is asked for the size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from dtk.cluster.environment import Environment
from dtk.cluster.variables import place
from dtk.errors import ClusterError


class Launcher(NamedTuple):
    """The variables by which a launcher tells a process its place."""

    name: str  # as in sentences
    kind: str  # of the `Environment`
    rank: str  # variable with the rank
    size: str  # variable with the number of ranks
    # pairs of variables with the same on one host; the first that is set counts
    local: tuple[tuple[str, str], ...]


_HOROVOD = Launcher(
    "Horovod's launcher",
    "horovod",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    (("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),),
)
OPEN_MPI = Launcher(
    "Open MPI",
    "mpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),),
)
PMI = Launcher(
    "MPICH (PMI)",
    "mpi",
    "PMI_RANK",
    "PMI_SIZE",
    (("MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
)
_PMIX = Launcher("PMIx", "mpi", "PMIX_RANK", "PMIX_SIZE", (("PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),))


def read(launcher: Launcher, environ: Mapping[str, str]) -> Environment | None:
    """Read what a launcher sets.

    >>> read(OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank
    1
    """
    if launcher.rank not in environ and launcher.size not in environ:
        return None
    rank, size = place(environ, launcher.rank, launcher.size)
    local_rank, local_size, told = 0, 1, size == 1
    for rank_name, size_name in launcher.local:
        if rank_name in environ or size_name in environ:
            local_rank, local_size = place(environ, rank_name, size_name)
            told = True
            break
    return Environment(
        kind=launcher.kind,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        reason=f"{launcher.rank}={rank} and {launcher.size}={size} were set by {launcher.name}",
        tells_local_rank=told,
    )


def read_horovod(environ: Mapping[str, str]) -> Environment | None:
    """Read what Horovod's own launcher (Gloo) sets.

    >>> read_horovod({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}).kind
    'horovod'
    """
    found = read(_HOROVOD, environ)
    if found is None:
        return None
    host = environ.get("HOROVOD_HOSTNAME")
    if host and found.local_size == found.size:
        return dataclasses.replace(found, hosts=(host,) * found.size)
    return found


def read_pmix(environ: Mapping[str, str]) -> Environment | None:
    """Read what a PMIx launcher sets, where it tells the size as well.

    >>> read_pmix({"PMIX_RANK": "0", "PMIX_SIZE": "2"}).size
    2
    """
    if "PMIX_RANK" in environ and "PMIX_SIZE" not in environ:
        if "SLURM_JOB_ID" in environ:
            return None
        raise ClusterError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set but nothing tells how many ranks there are; "
            "start with `mpirun -np N python train.py`, or unset PMIX_RANK to run alone"
        )
    return read(_PMIX, environ)
