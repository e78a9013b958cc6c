"""Detecting the place of this process in a job: one answer, in a stated order, with its reason.

0. A process that a rank has started with its variables, by multiprocessing or with DTK_ALONE=1, is
   no rank: MPI would take it for its parent.
1. `dtk run` (DTK_RUN=1): the variables it set itself, HOROVOD_RANK or TF_CONFIG; anything else is
   inherited noise.
2. torchrun, which other launchers may have started.
3. Horovod's own launcher.
4. Open MPI, MVAPICH2. Before Slurm, because `mpirun` inside a Slurm job starts its daemons with
   `srun`, so that every rank also sees the daemon's SLURM_PROCID.
5. MPICH, Intel MPI: unless they repeat Slurm's numbers: then `srun --mpi=pmi2` set them (6).
6. A Slurm step: SLURM_STEP_ID, SLURM_PROCID.
7. PMIx.
8. TF_CONFIG.
9. A rank, a size and rank 0's address, by the variables of `addressed`.
10. One process on its own, unless something says that there are others (`alone`).

TF_CONFIG beside 2 to 7 and 9 is not ignored: it must describe the same world, and then adds its
addresses. Of 9 beside 3 to 7, rank and size must be the same, and rank 0's address is taken,
unless the launcher tells it.

| launcher | rank, size | on the same host |
|---|---|---|
| Horovod (Gloo) | HOROVOD_RANK, HOROVOD_SIZE | HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE |
| Open MPI | OMPI_COMM_WORLD_RANK, _SIZE | OMPI_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |
| MPICH, Intel MPI (Hydra) | PMI_RANK, PMI_SIZE | MPI_LOCALRANKID, MPI_LOCALNRANKS |
| PALS | PMI_RANK, PMI_SIZE | PMI_LOCAL_RANK, PMI_LOCAL_SIZE |
| PMIx alone | PMIX_RANK, PMIX_SIZE | PMIX_LOCAL_RANK, PMIX_LOCAL_SIZE |
| MVAPICH2 | MV2_COMM_WORLD_RANK, _SIZE | MV2_COMM_WORLD_LOCAL_RANK, _LOCAL_SIZE |

Open MPI documents its four: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
The PMIx standard fixes only PMIX_RANK as a variable; a server is asked for the size.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping

from dtk.cluster import addressed, alone, slurm, tf_config
from dtk.cluster.place import Place
from dtk.cluster.tf_config import TFConfig
from dtk.cluster.variables import JOINED, MPI_SERVER, joined, place_by
from dtk.errors import ClusterError, CommunicatorError, at_rank

_ALONE = Place(
    kind="single",
    rank=0,
    size=1,
    hosts=("localhost",),
    reason="no variable of a launcher is set (HOROVOD_RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, "
    "PMIX_RANK, SLURM_STEP_ID, TF_CONFIG, RANK): one process on its own",
)

_HOROVOD = ("Horovod's launcher", "horovod", "HOROVOD_")
_LAUNCHERS = (
    _HOROVOD,
    ("Open MPI", "mpi", "OMPI_COMM_WORLD_"),
    ("MVAPICH2", "mpi", "MV2_COMM_WORLD_"),
)
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # by which it tells the place on a host


def detect(environ: Mapping[str, str] | None = None) -> Place:
    """Find this process's place in the job from environment variables.

    Args:
        environ: Variables to read; `os.environ` when None.

    Returns:
        The place in the job; `reason` says which variables decided.

    Raises:
        ClusterError: Variables are malformed, contradict each other, or name several processes and
            not where they meet.

    >>> detect({}).kind
    'single'
    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}).rank
    1
    """
    environ = os.environ if environ is None else environ
    if is_child_of_rank(environ):
        by = "multiprocessing has started it"
        if alone.is_on_purpose(environ):
            by = f"{alone.ALONE}=1 is set"
        reason = f"{by}, and process {joined(environ)[0]} is the rank"
        return dataclasses.replace(_ALONE, reason=reason)
    if environ.get("DTK_RUN") == "1":
        return _started_by_dtk(environ)
    config = tf_config.parse(environ.get("TF_CONFIG", ""))
    launched = _launched(environ)
    if config is None:
        if launched is None:
            alone.check(environ)
        return launched or _ALONE
    return tf_config.to_environment(config) if launched is None else _agree(launched, config)


def check_not_launched(environ: Mapping[str, str]) -> None:
    """Raise where another launcher has started several of this process, which is to start a job.

    A rank starts one on purpose: its place is the rank's, and not that of the command.
    """
    if environ.get("DTK_RUN") == "1" or joined(environ)[0]:
        return
    # Of rank 0's address alone, `dtk run` on one of the hosts may make use.
    here = addressed.read(environ) if addressed.is_of_torchrun(environ) else _numbers(environ)
    if here is not None and here.size > 1:
        raise ClusterError(
            f"{here.reason}: each of {here.size} processes would start a job of its own. Start "
            "`dtk run` once, or the script itself by that launcher, as in `mpirun -n "
            f"{here.size} python train.py`"
        )


def is_child_of_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank has started this process with its variables, and not to be a rank."""
    process = sys.modules.get("multiprocessing.process")  # which it has imported
    is_child = process is not None and process.current_process().name != "MainProcess"
    is_child = is_child or alone.is_on_purpose(environ)
    return is_child and joined(environ)[0] not in ("", str(os.getpid()))


def note_taken(place: Place) -> None:
    """Note that this process is that rank, for programs that it starts with its variables."""
    os.environ[JOINED] = f"{os.getpid()} {_name(place)}"


def check_not_taken(place: Place) -> None:
    """Refuse a program that a rank has started with its variables.

    It would wait for that rank's place until the start's limit, and MPI would write into the rank's
    memory.
    """
    process, taken = joined(os.environ)
    is_other = process != str(os.getpid()) and os.path.exists(f"/proc/{process}")
    if is_other and taken == _name(place) != "":
        message = (
            f"process {process} is this rank already, and has started this program, {sys.argv[0]}, "
            f"with its variables: start it with {alone.ALONE}=1 in its environment to let it train "
            "alone, or by `dtk run` to let it be a job of its own"
        )
        raise CommunicatorError(at_rank(place.rank, message))


def _name(place: Place) -> str:
    """Return by what a rank differs from those of all other jobs; "" where nothing tells."""
    by_launcher = os.environ.get("PMIX_NAMESPACE") or slurm.step_name(os.environ)
    by_launcher = by_launcher or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    is_met = place.kind in ("address", "tf_config")
    job = place.meeting or "".join(place.addresses[:1]) if is_met else by_launcher
    return f"rank {place.rank} of {job}" if job else ""


def _started_by_dtk(environ: Mapping[str, str]) -> Place:
    here = _numbered(*_HOROVOD, environ) or tf_config.read(environ)
    if here is None:
        raise ClusterError(
            "DTK_RUN=1 is set, but neither HOROVOD_RANK nor TF_CONFIG; unset DTK_RUN, or start "
            "again with `dtk run`"
        )
    if "PMI_RANK" in environ or environ.get("PMIX_NAMESPACE") != environ.get(MPI_SERVER):
        message = (
            "a rank of `dtk run` has started this program by mpirun or another launcher of MPI, "
            "whose processes all have the rank's variables, and take themselves for that rank: "
            "start the program by `dtk run`, too, or the script itself by mpirun"
        )
        raise ClusterError(at_rank(here.rank, message))
    hosts = tuple(filter(None, environ.get("DTK_HOSTS", "").split(","))) or here.hosts
    return dataclasses.replace(here, hosts=hosts, reason=f"started by dtk run: {here.reason}")


def _launched(environ: Mapping[str, str]) -> Place | None:
    here = None if addressed.is_of_torchrun(environ) else _numbers(environ)
    return addressed.read(environ) if here is None else addressed.add_to(here, environ)


def _numbers(environ: Mapping[str, str]) -> Place | None:
    """Read what launchers set that start MPI, or their own library."""
    for launcher in _LAUNCHERS:
        if (here := _numbered(*launcher, environ)) is not None:
            return here
    by_pmi = _numbered("MPICH (PMI)", "mpi", "PMI_", environ, _HYDRA)
    by_slurm = slurm.read(environ)
    if by_pmi and by_slurm:
        same = (by_pmi.rank, by_pmi.size) == (by_slurm.rank, by_slurm.size)
        return by_slurm if same else by_pmi
    return by_pmi or by_slurm or _pmix(environ)


def _numbered(
    name: str, kind: str, prefix: str, environ: Mapping[str, str], *local: tuple[str, str]
) -> Place | None:
    """Read a rank and a size, and those on one host, which may have `local` names instead."""
    rank_name, size_name = f"{prefix}RANK", f"{prefix}SIZE"
    if rank_name not in environ and size_name not in environ:
        return None
    pairs = (*local, (f"{prefix}LOCAL_RANK", f"{prefix}LOCAL_SIZE"))
    here = place_by(environ, kind, (rank_name, size_name), *pairs)
    reason = f"{rank_name}={here.rank} and {size_name}={here.size} were set by {name}"
    return dataclasses.replace(here, reason=reason)


def _pmix(environ: Mapping[str, str]) -> Place | None:
    if "PMIX_RANK" in environ and "PMIX_SIZE" not in environ:
        if "SLURM_JOB_ID" in environ:
            return None
        raise ClusterError(
            f"PMIX_RANK={environ['PMIX_RANK']} is set but nothing tells how many ranks there are; "
            "start with `mpirun -np N python train.py`, or unset PMIX_RANK to run alone"
        )
    return _numbered("PMIx", "mpi", "PMIX_", environ)


def _agree(launched: Place, config: TFConfig) -> Place:
    """Combine a launcher's world with TF_CONFIG, or say why they cannot both be right."""
    by_config = tf_config.to_environment(config)
    starters = {"mpi": "mpirun", "horovod": "horovodrun", "slurm": "srun", "address": "torchrun"}
    starter = starters[launched.kind]
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
        f"tasks, {by_config.size} of them training; unset TF_CONFIG, or start with `{starter} -n "
        f"{config.tasks}`"
    )
