"""Moving bytes between ranks: one contract, several transports.

>>> from dtk.communicators import create
>>> comm = create("local")
>>> comm.size
1
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

# Before TensorFlow is imported: hide its start-up notes, keep warnings of its own and errors.
# A user who set a level gets that level.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from dtk.cluster import progress, threads
from dtk.cluster.environment import Environment
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import CommunicatorError

if TYPE_CHECKING:
    from dtk.communicators.base import REDUCE_OPS, Communicator
    from dtk.communicators.local import LocalCommunicator

NAMES = ("auto", "collective", "horovod", "mpi", "local", "null")
INSTALL_MPI = "pip install 'dtk[mpi]'"
# Imported when asked for, since they need TensorFlow: `costs` is used without.
_LATER = {"Communicator": "base", "REDUCE_OPS": "base", "LocalCommunicator": "local"}

__all__ = ["NAMES", "REDUCE_OPS", "Communicator", "LocalCommunicator", "create"]


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(importlib.import_module(f"dtk.communicators.{_LATER[name]}"), name)
    raise AttributeError(f"module 'dtk.communicators' has no attribute {name!r}")


def create(name: str = "auto", environment: Environment | None = None) -> Communicator:
    """Return the world communicator of this process.

    Args:
        name: "auto", or one transport: "collective" (TensorFlow's), "horovod", "mpi" (mpi4py),
            "local" (a world of one), "null" (claims the environment's size and sends nothing, to
            measure overhead). "auto" takes local for one process, under mpirun Horovod where it is
            installed and mpi where it is not or where dtk[mpi] brought the mpirun, Horovod under
            its own launcher, TensorFlow's collectives under TF_CONFIG, and under Slurm Horovod
            where it is installed; the variable DTK_COMMUNICATOR overrules it.
        environment: Where this process stands; detected when None.

    Returns:
        A communicator over all training processes of the job.

    Raises:
        ValueError: For an unknown name, in DTK_COMMUNICATOR too.
        CommunicatorError: If the transport is missing or cannot start.
    """
    said = ""
    if name == "auto" and os.environ.get(COMMUNICATOR):
        name, said = os.environ[COMMUNICATOR], f" in {COMMUNICATOR}"
    if name not in NAMES:
        raise ValueError(f"unknown communicator {name!r}{said}; use one of {', '.join(NAMES)}")
    if name == "local":
        return _alone(None)
    if environment is None:
        from dtk.cluster import detect

        environment = detect()
    if environment.role not in ("chief", "worker"):
        raise CommunicatorError(
            f"this process is {environment.role} {environment.rank} ({environment.reason}), which "
            "takes no part in all-reduce training; start it with a script that makes a "
            "ParameterServerStrategy, or leave that role out of the job"
        )
    if name == "auto":
        name = _choose(environment)
    threads.divide(environment)
    with progress.joining(f"the start of {name}"):
        world = _world(name, environment)
    world.environment = environment
    return world


def _world(name: str, environment: Environment) -> Communicator:
    if name == "null":
        from dtk.communicators.null import NullCommunicator

        return NullCommunicator(environment.rank, environment.size)
    if name == "horovod":
        if not horovod_installed():
            raise CommunicatorError(
                f"this job was started as {environment.kind!r} and needs Horovod, which is not "
                f"installed: run `{_install(environment.kind)}`, or start with `dtk run` to use "
                "TensorFlow's collectives"
            )
        if mpirun_of_python_started(os.environ):
            raise CommunicatorError(
                f"Horovod cannot be loaded under the mpirun of {sys.prefix}, which shows it "
                "another MPI than it was built with: start with that one's mpirun, or use "
                "communicator='mpi'"
            )
        from dtk.communicators.horovod import start as start_horovod

        return start_horovod(environment)
    if name == "mpi":
        if not mpi_installed():
            raise CommunicatorError(f"mpi4py is not installed: run `{INSTALL_MPI}`")
        from dtk.communicators.mpi import start as start_mpi

        return start_mpi(environment)
    if name == "collective" and environment.size > 1:
        from dtk.communicators.collective import start as start_collective

        return start_collective(environment)
    # TensorFlow's collectives over one process need no cluster and change nothing.
    return _alone(environment.hosts[0] if environment.hosts else None)


def _alone(host: str | None) -> Communicator:
    from dtk.communicators.local import LocalCommunicator

    return LocalCommunicator(host)


def horovod_installed() -> bool:
    """Return whether Horovod can be imported, found without importing it."""
    return importlib.util.find_spec("horovod") is not None


def mpi_installed() -> bool:
    """Return whether mpi4py can be imported, found without importing it, which starts MPI."""
    return importlib.util.find_spec("mpi4py") is not None


def mpirun_of_python_started(environ: Mapping[str, str]) -> bool:
    """Return whether the mpirun that `pip install 'dtk[mpi]'` brings started this process.

    Args:
        environ: Variables of the process.
    """
    return os.path.realpath(environ.get("OPAL_PREFIX", "/")) == os.path.realpath(sys.prefix)


def _install(kind: str) -> str:
    """Return what installs that which joins the ranks of a launcher."""
    return f"{INSTALL_MPI}` or `dtk install-horovod" if kind == "mpi" else "dtk install-horovod"


def _choose(environment: Environment) -> str:
    if environment.size == 1:
        return "local"
    without_horovod = not horovod_installed() or mpirun_of_python_started(os.environ)
    if environment.kind == "mpi" and mpi_installed() and without_horovod:
        return "mpi"
    if environment.kind in ("mpi", "horovod"):
        return "horovod"
    if environment.kind == "slurm":
        return "horovod" if horovod_installed() else "collective"
    return "collective"
