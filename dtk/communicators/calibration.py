"""Measured once, kept for the next job: what a world's `Costs` are.

Rank 0 looks them up in its user's cache and tells the others. What is kept belongs to hosts,
processors, communicator, versions and settings; another of any is another world. The same world
decides alike every time, which a sum's last bit may depend on.

    DTK_CALIBRATE=again     measure, and keep that
    DTK_CALIBRATE=0         neither look up nor measure; dtk's own constants hold
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import tensorflow as tf

from dtk import cache
from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs
from dtk.communicators.measuring import measure
from dtk.errors import CommunicatorError
from dtk.version import __version__

VARIABLE = "DTK_CALIBRATE"
_WAYS = ("", "1", "0", "again")
_KEPT = 100  # worlds
# What of Horovod's settings has no say in how fast it is: who and where.
_PLACES = ("RANK", "SIZE", "ADDR", "PORT", "HOSTNAME", "IFACE", "SECRET")


def calibrate(communicator: Communicator, device: str, processors: list[str]) -> Costs | None:
    """The costs of a world; all ranks call it together.

    Args:
        communicator: Of the world.
        device: Where this rank computes.
        processors: What every rank computes with, in rank order.

    Returns:
        The same on all ranks; None where rank 0's user wants none.

    Raises:
        CommunicatorError: DTK_CALIBRATE is none of the above.
    """
    way, found = communicator.broadcast_object(
        _look_up(communicator, processors) if communicator.rank == 0 else None
    )
    if way not in _WAYS:
        raise CommunicatorError(
            f"{VARIABLE}={way!r} on rank 0: expected again (measure anew), 0 (do not measure), or "
            "nothing (measure once)"
        )
    if way == "0" or found is not None:
        return found
    costs = measure(communicator, device)
    if communicator.rank == 0:
        _keep(_key(communicator, processors), costs)
    return costs


def _look_up(communicator: Communicator, processors: list[str]) -> tuple[str, Costs | None]:
    way = os.environ.get(VARIABLE, "")
    known = _read().get(_key(communicator, processors)) if way in ("", "1") else None
    return way, None if known is None else Costs(**known)


def path() -> Path:
    """The file they are kept in."""
    return cache.folder() / "costs.json"


def _key(communicator: Communicator, processors: list[str]) -> str:
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("HOROVOD_", "OMPI_MCA_")) and not name.endswith(_PLACES)
    }
    versions = (__version__, tf.__version__)
    facts = [communicator.name, communicator.hosts, processors, versions, sorted(settings.items())]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _read() -> dict[str, dict[str, Any]]:
    """What is kept; nothing where there is no file, or one that is none of ours."""
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(path().read_text())
        names = {field.name for field in dataclasses.fields(Costs)}
        if isinstance(known, dict):
            return {key: costs for key, costs in known.items() if set(costs) == names}
    return {}


def _keep(key: str, costs: Costs) -> None:
    """Put it into the file, whole or not at all; a cache that cannot be written is none."""
    known = {k: v for k, v in _read().items() if k != key} | {key: dataclasses.asdict(costs)}
    newest = dict(list(known.items())[-_KEPT:])
    with contextlib.suppress(OSError):
        path().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path().parent, delete=False) as file:
            json.dump(newest, file, indent=1)
        os.replace(file.name, path())
