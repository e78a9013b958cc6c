"""Moving bytes between ranks: one contract, several backends.

>>> from dtk.communicators import create
>>> comm = create("local")
>>> comm.size
1
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

# Before TensorFlow is imported: hide its start-up notes, keep its warnings and errors. A level
# that the user has set stays.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from dtk.cluster import progress, slurm
from dtk.cluster.detect import check_not_taken, detect, is_child_of_rank, note_taken
from dtk.cluster.mpi_installs import horovod_refused, mpirun_of_python_started
from dtk.cluster.mpi_join import is_joined, offer
from dtk.cluster.place import Place, divide_cores
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import CommunicatorError, at_rank
from dtk.version import pip_install

if TYPE_CHECKING:
    from dtk.communicators.base import REDUCE_OPS, Communicator
    from dtk.communicators.local import LocalCommunicator

NAMES = ("auto", "collective", "horovod", "mpi", "local", "null")
SRUN = "`srun --mpi=pmix`"
# Imported when asked for, since they need TensorFlow, and `costs` must load without it.
_LATER = {"Communicator": "base", "REDUCE_OPS": "base", "LocalCommunicator": "local"}

__all__ = ["NAMES", "REDUCE_OPS", "Choice", "Communicator", "LocalCommunicator", "choose", "create"]


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(f"dtk.communicators.{_LATER[name]}"), name)
    raise AttributeError(f"module 'dtk.communicators' has no attribute {name!r}")


def create(
    name: str = "auto",
    place: Place | None = None,
    before_collectives: Callable[[int], None] | None = None,
) -> Communicator:
    """Return the world communicator of this process.

    Args:
        name: "auto", or one backend: "collective" (TensorFlow's), "horovod", "mpi" (mpi4py),
            "local" (a world of one), "null" (claims the environment's size and sends nothing, to
            measure overhead). "auto" takes local for one process; Horovod under its own launcher;
            under mpirun Horovod, or mpi if Horovod is not installed or the mpirun came with
            keras-dtk[mpi]; under `srun --mpi=pmix` Horovod or mpi, if installed; where rank 0's
            address or all are told (TF_CONFIG, torchrun, engines, plain `srun`) mpi, if all ranks
            have keras-dtk[mpi] and no GPUs; otherwise TensorFlow's collectives. The
            variable DTK_COMMUNICATOR overrules "auto"; `choose` gives the reason.
        place: This process's rank, role and hosts; detected when None.
        before_collectives: Called with the number of ranks before TensorFlow's collectives start.

    Returns:
        A communicator over all training processes of the job.

    Raises:
        ValueError: For an unknown name, in DTK_COMMUNICATOR too.
        CommunicatorError: If the backend is missing or cannot start.
    """
    said = ""
    if name != "null" and is_child_of_rank(os.environ):
        name = "local"
    if name == "auto" and os.environ.get(COMMUNICATOR):
        name, said = os.environ[COMMUNICATOR], f" in {COMMUNICATOR}"
    if name not in NAMES:
        raise ValueError(f"unknown communicator {name!r}{said}; use one of {', '.join(NAMES)}")
    if name == "local":
        from dtk.communicators.local import LocalCommunicator

        return LocalCommunicator()
    if place is None:
        place = detect()
    if place.role not in ("chief", "worker"):
        raise CommunicatorError(
            f"this process is {place.role} {place.rank} ({place.reason}), which "
            "takes no part in all-reduce training; start it with a script that makes a "
            "ParameterServerStrategy, or leave that role out of the job"
        )
    is_chosen = name == "auto"
    if is_chosen:
        name = choose(place).name
    if name != "null":
        check_not_taken(place)
    divide_cores(place)
    with progress.joining(f"the start of {name}"):
        world = _world(name, place, before_collectives, is_chosen)
    world.place = world.place or place
    world.keep_to_thread()
    if name != "null" and world.size > 1:
        note_taken(place)
    return world


def _world(
    name: str,
    place: Place,
    before_collectives: Callable[[int], None] | None,
    is_chosen: bool = False,
) -> Communicator:
    if name == "null":
        from dtk.communicators.local import NullCommunicator

        return NullCommunicator(place.rank, place.size)
    if name == "horovod":
        if not horovod_installed():
            instead = f"`{pip_install('mpi')}` or " if place.kind == "mpi" else ""
            raise CommunicatorError(
                f"this job was started as {place.kind!r} and needs Horovod, which is not "
                f"installed: run {instead}`dtk install-horovod`, or start with `dtk run` to use "
                "TensorFlow's collectives"
            )
        if mpirun_of_python_started(os.environ):
            raise horovod_refused()
        if place.size > 1 and place.kind == "slurm" and not has_mpi_launcher(place):
            kind = os.environ.get("SLURM_MPI_TYPE", "none")
            message = (
                "Horovod cannot find the other ranks, since srun offers MPI nothing to find "
                f"them by (--mpi={kind}): start with {SRUN} (`srun --mpi=list` says what it has), "
                "or use communicator='mpi' or 'collective'"
            )
            raise CommunicatorError(at_rank(place.rank, message))
        from dtk.communicators import horovod

        return horovod.start(place)
    if name == "mpi":
        if not mpi_installed():
            raise CommunicatorError(f"mpi4py is not installed: run `{pip_install('mpi')}`")
        from dtk.communicators import mpi

        if place.size == 1 or has_mpi_launcher(place) or progress.is_launched():
            return mpi.start(place)
        from dtk.communicators import collective

        if is_chosen and (started := collective.started(place)) is not None:
            return started
        joined = mpi.join(place)
        if not isinstance(joined, tuple):
            return joined
        if not is_chosen:
            message = (
                "communicator mpi: no launcher of MPI's has started this rank, and dtk joins ranks "
                "by MPI itself only where each has room in /dev/shm, no GPU and the same Open MPI "
                f"by `{pip_install('mpi')}`, and has not imported mpi4py.MPI before; machines need "
                f"IPv4 addresses of their own: start with `dtk run`, or on Slurm with {SRUN}, or "
                "use communicator='collective'"
            )
            raise CommunicatorError(at_rank(place.rank, message))
        return collective.start(place, before_collectives, joined)
    if name == "collective" and place.size > 1:
        from dtk.communicators import collective

        return collective.start(place, prepare=before_collectives)
    from dtk.communicators.local import LocalCommunicator

    # TensorFlow's collectives over one process need no cluster and change nothing.
    return LocalCommunicator(place.hosts[0] if place.hosts else None)


def horovod_installed() -> bool:
    """Return whether Horovod can be imported, without importing it."""
    return importlib.util.find_spec("horovod") is not None


def mpi_installed() -> bool:
    """Return whether mpi4py can be imported, without importing it: the import starts MPI."""
    return importlib.util.find_spec("mpi4py") is not None


class Choice(NamedTuple):
    """The communicator that "auto" takes in a job.

    Attributes:
        name: Name of the communicator, such as "mpi".
        why: The reason, in a few words.
    """

    name: str
    why: str


def choose(place: Place) -> Choice:
    """Return the communicator that "auto" takes when DTK_COMMUNICATOR is not set.

    Args:
        place: This process's rank, role and hosts.
    """
    kind, horovod = place.kind, horovod_installed()
    if place.size == 1:
        return Choice("local", "one process")
    if kind == "horovod":
        return Choice("horovod", "its launcher started this job")
    if kind == "mpi":
        if horovod and not mpirun_of_python_started(os.environ):
            return Choice("horovod", "mpirun started this job, and Horovod is installed")
        if mpi_installed():
            return Choice("mpi", "mpirun started this job, and mpi4py is installed")
        return Choice("horovod", f"mpirun started this job; without Horovod: {pip_install('mpi')}")
    if kind == "slurm":
        offered = slurm.process_manager(os.environ)
        if offered == "pmix" and horovod:
            return Choice("horovod", "srun offers PMIx, and Horovod is installed")
        if offered == "pmix" and mpi_installed():
            return Choice("mpi", "srun offers PMIx, and mpi4py is installed")
        if offered == "pmix":
            why = f"neither Horovod nor mpi4py is here. Next: {pip_install('mpi')}"
            return Choice("collective", why)
        interfaces = "PMI2 only, which not every MPI knows" if offered else "no PMIx to an MPI"
        if slurm.offers_mpi(os.environ) or not (offer() or is_joined()):
            return Choice("collective", f"srun offers {interfaces}. Faster: {SRUN}")
    why = f"{kind} gives every rank an address"
    if kind == "slurm":
        why = "srun offers MPI nothing"
    if kind == "address":
        why = "rank 0's address is given"
    if offer() or is_joined():
        return Choice("mpi", f"{why}, and MPI is beside Python; collective, if not for all ranks")
    return Choice("collective", why)


def has_mpi_launcher(place: Place) -> bool:
    """Return whether a launcher has started this rank by which some MPI finds the others."""
    if place.kind == "slurm":
        return slurm.offers_mpi(os.environ)
    return place.kind not in ("address", "tf_config")
