"""Launchers that tell each process its rank, the size and rank 0's address, where all meet.

| launcher | rank | size | on the same host | rank 0 |
|---|---|---|---|---|
| torchrun, a PyTorchJob, Azure ML, most clouds, dtk's engines | RANK | WORLD_SIZE | LOCAL_RANK, \
LOCAL_WORLD_SIZE | MASTER_ADDR, MASTER_PORT |
| Kubernetes' Indexed Job or JobSet | JOB_COMPLETION_INDEX | WORLD_SIZE | one | the same |
| Kubeflow Trainer's torch runtime | PET_NODE_RANK | PET_NNODES | one | PET_MASTER_ADDR, \
PET_MASTER_PORT |
| SkyPilot | SKYPILOT_NODE_RANK | SKYPILOT_NUM_NODES | one | first of SKYPILOT_NODE_IPS |
| Flux | FLUX_TASK_RANK | FLUX_JOB_SIZE | not told | the same |
| LSF's jsrun | JSM_NAMESPACE_RANK | JSM_NAMESPACE_SIZE | JSM_NAMESPACE_LOCAL_RANK, \
JSM_NAMESPACE_LOCAL_SIZE | the same |

The first row of which all is set decides. Where a row is there in part and names several
processes, it is refused: the others may wait. The variables of torchrun are those of
https://docs.pytorch.org/docs/stable/elastic/run.html, those of Kubeflow's runtime are its options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

from dtk.cluster.alone import ALONE, is_on_purpose
from dtk.cluster.place import Place
from dtk.cluster.variables import is_number, place_by
from dtk.errors import ClusterError

# Where rank 0 is met if no port is set: torchrun's own default.
PORT = 29500
# Set in what torchrun starts; and whether it listens at MASTER_PORT itself.
_ELASTIC, _STORE = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"


class _Row(NamedTuple):
    launcher: str
    rank: str
    size: str
    address: str = "MASTER_ADDR"
    port: str = "MASTER_PORT"
    local: tuple[tuple[str, str], ...] = ()  # rank and size on a host, where several may be there
    is_alone: bool = False  # whether a host has one


_TORCH = _Row(
    "torchrun, or a launcher with its variables",
    *("RANK", "WORLD_SIZE"),
    local=(("LOCAL_RANK", "LOCAL_WORLD_SIZE"),),
)
_PET = _Row(
    "Kubeflow Trainer's torch runtime",
    *("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    is_alone=True,
)
_JSRUN = _Row(
    "LSF's jsrun",
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    local=(("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),),
)
_SKY = ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS")
_ROWS = (
    _TORCH,
    _Row("a Kubernetes Indexed Job", "JOB_COMPLETION_INDEX", "WORLD_SIZE", is_alone=True),
    _PET,
    _Row("SkyPilot", *_SKY, is_alone=True),
    _Row("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    _JSRUN,
)


def is_of_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process, itself perhaps by another launcher."""
    return _ELASTIC in environ


def read(environ: Mapping[str, str]) -> Place | None:
    """Read a rank, a size and rank 0's address; None where no row names several processes.

    Raises:
        ClusterError: A row names several processes, and a part of it is missing or wrong.

    >>> found = read({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node1"})
    >>> found.rank, found.meeting
    (1, 'node1:29500')
    >>> read({"RANK": "0"}) is None
    True
    >>> read({"WORLD_SIZE": "4"})
    Traceback (most recent call last):
    dtk.errors.ClusterError: WORLD_SIZE=4 is set, ... but RANK and MASTER_ADDR are not: ...
    """
    if is_on_purpose(environ):
        return None
    half = next((row for row in _ROWS if _count(row, environ) > 1), None)
    row = _whole(environ) or half
    return None if row is None else _place(row, environ)


def add_to(here: Place, environ: Mapping[str, str]) -> Place:
    """Add rank 0's address to what another launcher has told.

    Raises:
        ClusterError: RANK and WORLD_SIZE tell another place.
    """
    if here.kind == "slurm" and here.size == 1 and _whole(environ):
        return read(environ) or here  # srun is also how one process is started
    told = [environ.get(name, "").strip() for name in (_TORCH.rank, _TORCH.size)]
    is_told = all(map(is_number, told)) and int(told[1]) > 1
    if is_told and (int(told[0]), int(told[1])) != (here.rank, here.size):
        raise ClusterError(
            f"{here.reason}, but RANK={told[0]} and WORLD_SIZE={told[1]}, as torchrun sets "
            "them; unset RANK and WORLD_SIZE, or give each rank its own"
        )
    if here.size == 1 or here.addresses or here.meeting:
        return here
    with contextlib.suppress(ClusterError):  # it may do without
        return dataclasses.replace(here, meeting=meeting(environ))
    return here


def meeting(environ: Mapping[str, str], row: _Row = _TORCH) -> str:
    """Return where rank 0 is met; "" where no variable says so.

    >>> meeting({"MASTER_ADDR": "::1", "MASTER_PORT": "4000"})
    '[::1]:4000'
    """
    host = (environ.get(row.address, "").split() or [""])[0]
    port = environ.get(row.port) or str(PORT)
    if not host:
        return ""
    if not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65535:
        raise ClusterError(f"{row.port}={port!r}, expected a port of 1 to 65534; set one")
    number = int(port) + (row is _TORCH and environ.get(_STORE) == "True")
    return f"[{host}]:{number}" if ":" in host.strip("[]") else f"{host}:{number}"


def _place(row: _Row, environ: Mapping[str, str]) -> Place:
    told = {name: environ[name].strip() for name in (row.rank, row.size) if environ.get(name)}
    seen = " and ".join(f"{name}={value}" for name, value in told.items())
    by = f"{seen} {'are' if len(told) > 1 else 'is'} set, as by {row.launcher}"
    at = meeting(environ, row)
    missing = [name for name in (row.rank, row.size) if name not in told]
    missing += [] if at else [row.address]
    if missing:
        raise ClusterError(
            f"{by}, but {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not: ranks "
            f"meet at rank 0, for which each needs {row.rank}, {row.size} and {row.address}. Set "
            f"them, unset {' and '.join(told)}, or set {ALONE}=1 to train alone on purpose"
        )
    each = environ.get("PET_NPROC_PER_NODE", "1")
    by_python = row is _PET or (row is _TORCH and not is_of_torchrun(environ))
    if by_python and each.isdigit() and int(each) > 1:
        raise ClusterError(
            f"PET_NPROC_PER_NODE={each}, but python starts one process on each node: start the "
            "script with torchrun there, or set numProcPerNode: 1"
        )
    local = [pair for pair in row.local if set(pair) <= environ.keys()]  # else it does without
    here = place_by(environ, "address", (row.rank, row.size), *local)
    where = row.address if row.port not in environ else f"{row.address} and {row.port}"
    reason = f"{by}; ranks meet at {at}, by {where}"
    if row is _TORCH and environ.get(_STORE) == "True":
        reason += ", one port further, where torchrun does not listen"
    is_told = here.tells_local_rank or row.is_alone
    return dataclasses.replace(here, reason=reason, tells_local_rank=is_told, meeting=at)


def _whole(environ: Mapping[str, str]) -> _Row | None:
    """Return the first row of which rank and size are there, and that names several processes."""
    whole = (row for row in _ROWS if {row.rank, row.size} <= environ.keys())
    return next((row for row in whole if _count(row, environ) > 1), None)


def _count(row: _Row, environ: Mapping[str, str]) -> int:
    """Return how many processes a row names at least."""
    if is_of_torchrun(environ) and row is not _TORCH:
        return 0  # by these torchrun itself was started
    rank, size = (environ.get(name, "") for name in (row.rank, row.size))
    # A TF_CONFIG has the addresses of all, and their number.
    meets_others = environ.get(row.address) and not environ.get("TF_CONFIG")
    if not is_number(size) and (size or (rank and meets_others)):
        return 2  # or more: who reads the size says what is wrong with it
    # Pods have no other way to have several processes than to be told so.
    if row.rank == "JOB_COMPLETION_INDEX" and row.size not in environ:
        return 0
    known = [int(text) + more for text, more in ((rank, 1), (size, 0)) if is_number(text)]
    return max(known, default=0)
