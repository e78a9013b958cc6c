"""A world's `Costs`, measured once and kept for later jobs.

Rank 0 looks them up in its user's cache and tells the others. An entry belongs to the hosts,
processors, communicator, versions and settings: if one of them changes, dtk measures again. dtk
cannot see that a link has become faster: set DTK_CALIBRATE=again then. Until then the same world
makes the same choices, on which a sum's last bit may depend.

    DTK_CALIBRATE=again     measure, and keep that
    DTK_CALIBRATE=0         neither look up nor measure; use dtk's own constants
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
from pathlib import Path

import tensorflow as tf

from dtk import cache
from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs
from dtk.communicators.measuring import measure
from dtk.communicators.root import on_root
from dtk.errors import CommunicatorError
from dtk.version import __version__

VARIABLE = "DTK_CALIBRATE"
_WAYS = ("", "1", "0", "again")
# Settings of transports; Open MPI's other variables name ranks and places, and differ by job.
_SETTINGS = ("HOROVOD_", "NCCL_", "GRPC_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mpi_")
_PLACES = ("RANK", "SIZE", "ADDR", "PORT", "HOSTNAME", "SECRET_KEY")


def calibrate(communicator: Communicator, device: str, processors: list[str]) -> Costs | None:
    """Return the costs of a world; all ranks call it together."""
    way = communicator.broadcast_object(os.environ.get(VARIABLE, ""))
    if way not in _WAYS:
        raise CommunicatorError(
            f"{VARIABLE}={way!r} on rank 0: expected again (measure anew), 0 (do not measure), or "
            "nothing (measure once)"
        )
    if way == "0":
        return None
    if way != "again":
        known = on_root(communicator, lambda: _read(_file(communicator, processors)))
        if known is not None:
            return known
    costs = measure(communicator, device)
    if communicator.rank == 0:
        _keep(costs, _file(communicator, processors))
    return costs


def _file(communicator: Communicator, processors: list[str]) -> Path | None:
    """Return the file for the costs of this world; None for a user without a home."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and not name.endswith(_PLACES)
    }
    where = (socket.gethostname(), communicator.hosts, processors)
    facts = [communicator.name, where, __version__, tf.__version__, sorted(settings.items())]
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    with contextlib.suppress(RuntimeError):
        return cache.folder() / "costs" / f"{name}.json"
    return None


def _read(file: Path | None) -> Costs | None:
    """Return the costs in the file; None if there is no file, or one of another format."""
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Costs(**json.loads(file.read_text()))
    return None


def _keep(costs: Costs, file: Path | None) -> None:
    """Write the file, whole or not at all; if that fails, every job measures."""
    if file is not None:
        with contextlib.suppress(OSError), cache.replacing(file) as draft:
            draft.write_text(json.dumps(dataclasses.asdict(costs)))
