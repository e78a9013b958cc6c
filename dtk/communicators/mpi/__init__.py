"""MPI by mpi4py: `keras-dtk[mpi]` brings MPI itself, `mpirun` included.

It needs no compiler and no root. Ranks of `dtk run`, torchrun, engines and plain `srun` join by
dtk's own server of MPI (`dtk.cluster.pmix`), those of `mpirun` and of Slurm with PMIx by theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import socket
import sys
from typing import TYPE_CHECKING

from dtk.cluster.mpi_installs import mpirun_of_python_started, shared_memory_missing
from dtk.cluster.mpi_join import offer
from dtk.cluster.place import Place
from dtk.cluster.variables import MPI_SERVER, is_foreign
from dtk.communicators import startup
from dtk.communicators.base import Communicator
from dtk.errors import CommunicatorError, at_rank
from dtk.version import pip_install

if TYPE_CHECKING:
    from dtk.communicators.mpi.requests import RequestProgress


@functools.cache  # a process has one runtime: a second strategy shares it
def start(place: Place) -> Communicator:
    """Initialise MPI and check that it sees the world the launcher described."""
    # Open MPI's waiting thread must not keep others from computing.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    is_open_mpi_5 = MPI_SERVER in os.environ or mpirun_of_python_started(os.environ)
    if is_open_mpi_5 and (missing := shared_memory_missing(1)):
        raise CommunicatorError(at_rank(place.rank, missing))
    is_ended_here = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        # Its exit function, which Python cannot keep from running in a child by `os.fork`, would
        # wait there for ever. Of no effect once MPI has begun.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicatorError(
            at_rank(place.rank, f"cannot load MPI ({error}): run `{pip_install('mpi')}`")
        ) from error
    library = MPI.Get_library_version().split(",")[0]
    world = MPI.COMM_WORLD
    advice = (
        "start with the mpirun of that library (the one beside `python`), or with `dtk run` and "
        "another communicator"
    )
    if place.kind == "slurm":
        advice = "start with `srun --mpi=pmix` (MPICH: `--mpi=pmi2`), or use another communicator"
    startup.check_world(place, world.rank, world.size, library, advice)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        message = (
            f"{library} takes calls from one thread only; use a library built for several threads "
            "(MPI_THREAD_MULTIPLE), such as the ones of PyPI and Debian"
        )
        raise CommunicatorError(at_rank(place.rank, message))
    from dtk.communicators.mpi.requests import RequestProgress
    from dtk.communicators.mpi.transport import MPITransport

    progress = RequestProgress(world.Dup())
    atexit.register(_leave, progress, os.getpid(), is_ended_here)
    transport = MPITransport(world.Dup(), range(world.size), progress)
    made = Communicator(transport, ("",) * world.size)
    made.set_hosts(made.allgather_object(socket.gethostname()))
    return made


def _leave(progress: RequestProgress, process: int, is_ended_here: bool) -> None:
    """Tell the other ranks that this one leaves, and end MPI, which waits until all ranks do."""
    if os.getpid() != process:  # a child by `os.fork` has its parent's connections
        return
    progress.leave()
    if is_ended_here:
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):  # a rank is gone
            MPI.Finalize()


def join(place: Place) -> Communicator | tuple[str, ...]:
    """Join ranks that no launcher of MPI's has started.

    Returns the addresses of all ranks where they cannot be, see `mpi_join`.
    """
    if place in _JOINED:
        return _JOINED[place]
    met = startup.gather(place, offer())
    if not met.mpi:
        _JOINED[place] = met.addresses
        return met.addresses
    outer = {name for name in os.environ if is_foreign(name) and name != "TF_CONFIG"}
    before = {name: os.environ.get(name) for name in (met.mpi.keys() | outer) - {MPI_SERVER}}
    for name in outer:  # of another server
        del os.environ[name]
    os.environ.update(met.mpi)
    try:
        with startup.at_most(startup.limit()):
            world = start(place)
    finally:  # others would take an mpirun for the launcher
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    _JOINED[place] = world
    world.place = dataclasses.replace(place, addresses=met.addresses)
    return world


_JOINED: dict[Place, Communicator | tuple[str, ...]] = {}
