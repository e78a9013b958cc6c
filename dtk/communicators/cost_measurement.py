"""A world's `Costs`: measured once, and kept for later jobs.

    all-reduces of 128 kB, one after the other  ->  message   \\  Hockney's model, with the
    one of a few megabytes                      ->  byte      /   messages and bytes of a ring
    a product of two matrices                   ->  operation

The shortest of several turns counts: other work on a machine makes turns longer, never shorter.
Rank 0 looks for costs in its user's cache and tells the others. An entry belongs to the hosts,
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
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from dtk import cache
from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs, fit_allreduces
from dtk.communicators.root import on_root
from dtk.errors import CommunicatorError
from dtk.version import __version__

VARIABLE = "DTK_CALIBRATE"
# Settings of transports; Open MPI's other variables name ranks and places, and differ by job.
_SETTINGS = ("HOROVOD_", "NCCL_", "GRPC_", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_mpi_")
_PLACES = ("RANK", "SIZE", "ADDR", "PORT", "HOSTNAME", "SECRET_KEY", "_directory")

_FEW, _SOME, _MANY = 1 << 17, 1 << 20, 1 << 22  # bytes
# Least seconds of the messages of an all-reduce.
_LEAST = 1e-6
# All-reduces in a turn, so that the cost of calling it counts little for each.
_CHAIN = 4
_TURNS = 9
# If a short all-reduce takes longer, in seconds, the long one sends less, in fewer turns.
_SLOW = 5e-3
# A long all-reduce takes at least this times a short one: less could be chance.
_APART = 1.1
# A product like in `dtk.exchange.factors`: rows of a batch, and the side of a kernel.
_ROWS, _SIDE = 64, 1024


def calibrate(communicator: Communicator, device: str, processors: list[str]) -> Costs | None:
    """Return the costs of a world; all ranks call it together."""
    way = communicator.broadcast_object(os.environ.get(VARIABLE, ""))
    if way not in ("", "1", "0", "again"):
        raise CommunicatorError(
            f"{VARIABLE}={way!r} on rank 0: expected again (measure anew), 0 (do not measure), or "
            "nothing (measure once)"
        )
    if way == "0":
        return None
    file = _file(communicator, processors)
    known = None if way == "again" else on_root(communicator, lambda: _read(file))
    if known is not None:
        return known
    costs = measure(communicator, device)
    # If the file cannot be written, every job measures.
    if communicator.rank == 0 and file is not None:
        with contextlib.suppress(OSError), cache.replacing(file) as draft:
            draft.write_text(json.dumps(dataclasses.asdict(costs)))
    return costs


def _file(communicator: Communicator, processors: list[str]) -> Path | None:
    """Return the file for the costs of this world; None for a user without a home."""
    settings = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTINGS) and not name.endswith(_PLACES)
    }
    where = (socket.gethostname(), communicator.hosts, processors)
    way = [communicator.name, "gpu" if communicator.gpu_transport else "host"]
    facts = [*way, where, __version__, tf.__version__, sorted(settings.items())]
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    with contextlib.suppress(RuntimeError):
        return cache.folder() / "costs" / f"{name}.json"
    return None


def _read(file: Path | None) -> Costs | None:
    """Return the costs in the file; None if there is no file, or one of another format."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return None if file is None else Costs(**json.loads(file.read_text()))
    return None


def measure(communicator: Communicator, device: str) -> Costs:
    """Measure a world; all ranks call it together, and get the same numbers.

    Takes about half a second on a fast link, and 2 on one of 100 Mbit/s.
    """

    def slowest(work: Callable[[], object], turns: int = _TURNS) -> float:
        """Return the seconds of the slowest rank: all others wait for it."""
        seconds = tf.constant(_time(work, turns), tf.float64)
        return float(communicator.allreduce(seconds, "max"))

    operation = slowest(_product(device)) / (2 * _ROWS * _SIDE**2)
    short = _allreduces(communicator, _FEW)
    few = slowest(short) / _CHAIN
    many, turns = (_MANY, _TURNS) if few < _SLOW else (_SOME, 1)
    much = slowest(_allreduces(communicator, many), turns) / _CHAIN
    if few < _SLOW:
        few = min(few, slowest(short) / _CHAIN)
    seconds = {_FEW: few, many: max(much, _APART * few)}
    message, byte = fit_allreduces(communicator.size, seconds, _LEAST)
    return Costs(communicator.size, message, byte, operation)


def _allreduces(communicator: Communicator, size: int) -> Callable[[], object]:
    with tf.device((communicator.gpu_transport or communicator).device):
        values = tf.zeros(size // 4)

    @tf.function(autograph=False, jit_compile=False)
    def sums() -> tf.Tensor:
        with communicator.sequence(f"costs/{size}"):
            value = values
            for _ in range(_CHAIN):
                value = communicator.allreduce(value)
            return value[0]

    return lambda: sums().numpy()


def _product(device: str) -> Callable[[], object]:
    with tf.device(device):
        left, right = tf.ones([_ROWS, _SIDE]), tf.ones([_ROWS, _SIDE])

    def multiply() -> object:
        with tf.device(device):
            return tf.matmul(left, right, transpose_a=True)[0, 0].numpy()

    return multiply


def _time(work: Callable[[], object], turns: int) -> float:
    """Return the seconds of the shortest of a few calls, after a first one that traces."""
    work()
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)
