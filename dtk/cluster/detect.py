"""Detecting the place of this process in a job: one answer, in a stated order, with its reason.

1. `dtk run` (DTK_RUN=1): the variables it set itself, HOROVOD_RANK or TF_CONFIG; anything else is
   inherited noise.
2. Horovod's own launcher: HOROVOD_RANK, HOROVOD_SIZE.
3. Open MPI: OMPI_COMM_WORLD_RANK, _SIZE. Before Slurm, because `mpirun` inside a Slurm job starts
   its daemons with `srun`, so that every rank also sees the daemon's SLURM_PROCID.
4. MPICH, Intel MPI: PMI_RANK, PMI_SIZE, unless they repeat Slurm's numbers: then `srun --mpi=pmi2`
   set them (5).
5. A Slurm step: SLURM_STEP_ID, SLURM_PROCID.
6. PMIx: PMIX_RANK, PMIX_SIZE.
7. TF_CONFIG.
8. One process on its own.

TF_CONFIG beside 2 to 6 is not ignored: it must describe the same world, and then adds its
addresses.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from dtk.cluster import mpi, slurm, tf_config
from dtk.cluster.environment import Environment
from dtk.errors import ClusterError

_ALONE = Environment(
    kind="single",
    rank=0,
    size=1,
    hosts=("localhost",),
    reason="no variable of a launcher is set (HOROVOD_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, "
    "PMIX_RANK, SLURM_STEP_ID, TF_CONFIG): one process on its own",
)


def detect(environ: Mapping[str, str] | None = None) -> Environment:
    """Find this process's place in the job from environment variables.

    Args:
        environ: Variables to read; `os.environ` when None.

    Returns:
        The place in the job; `reason` says which variables decided.

    Raises:
        ClusterError: Variables are malformed or contradict each other.

    >>> detect({}).kind
    'single'
    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}).rank
    1
    """
    environ = os.environ if environ is None else environ
    if environ.get("DTK_RUN") == "1":
        return _started_by_dtk(environ)
    config = tf_config.parse(environ.get("TF_CONFIG", ""))
    launched = _launched(environ)
    if launched is None:
        return _ALONE if config is None else tf_config.to_environment(config)
    return launched if config is None else _agree(launched, config)


def _started_by_dtk(environ: Mapping[str, str]) -> Environment:
    found = mpi.read_horovod(environ) or tf_config.read(environ)
    if found is None:
        raise ClusterError(
            "DTK_RUN=1 is set, but neither HOROVOD_RANK nor TF_CONFIG; unset DTK_RUN, or start "
            "again with `dtk run`"
        )
    hosts = tuple(filter(None, environ.get("DTK_HOSTS", "").split(","))) or found.hosts
    return dataclasses.replace(found, hosts=hosts, reason=f"started by dtk run: {found.reason}")


def _launched(environ: Mapping[str, str]) -> Environment | None:
    found = mpi.read_horovod(environ) or mpi.read(mpi.OPEN_MPI, environ)
    if found is not None:
        return found
    by_pmi, by_slurm = mpi.read(mpi.PMI, environ), slurm.read(environ)
    if by_pmi and by_slurm:
        same = (by_pmi.rank, by_pmi.size) == (by_slurm.rank, by_slurm.size)
        return by_slurm if same else by_pmi
    return by_pmi or by_slurm or mpi.read_pmix(environ)


def _agree(launched: Environment, config: tf_config.TFConfig) -> Environment:
    """Combine a launcher's world with TF_CONFIG, or say why they cannot both be right."""
    by_config = tf_config.to_environment(config)
    starter = {"mpi": "mpirun", "horovod": "horovodrun", "slurm": "srun"}[launched.kind]
    if launched.kind == "slurm" and launched.size == 1:
        return by_config  # srun is also how one process is started
    if config.tasks > by_config.size or config.role not in tf_config.TRAINING:
        if config.tasks in (launched.size, launched.size + (config.role == "evaluator")):
            return by_config
    elif launched.size == by_config.size:
        if launched.rank != by_config.rank:
            raise ClusterError(
                f"{launched.reason}, but {by_config.reason}, which is rank {by_config.rank}; "
                f"unset TF_CONFIG, or give every rank of {starter} its own"
            )
        return dataclasses.replace(
            launched,
            hosts=by_config.hosts,
            addresses=by_config.addresses,
            role=by_config.role,
            roles=by_config.roles,
            reason=f"{launched.reason}; TF_CONFIG agrees and adds the addresses",
        )
    raise ClusterError(
        f"{launched.reason}: a world of {launched.size}; but TF_CONFIG describes {config.tasks} "
        "tasks, "
        f"{by_config.size} of them training; unset TF_CONFIG, or start with `{starter} -n "
        f"{config.tasks}`"
    )
