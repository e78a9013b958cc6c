"""Ranks of one host that wait for each other before MPI starts, where no launcher of dtk's watches.

MPI waits in its start for all ranks, holding Python's lock, and knows nothing of who is missing. So
the ranks of a host meet before that: each says that it is there by a name that only exists while
its process does, and looks at the processes of those that are not. One that neither computes nor
reads for the stall timeout is named, and the job ends with exit code 124. Ranks on other hosts do
the same there.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

from dtk.cluster import stall, usage
from dtk.cluster.environment import Environment
from dtk.cluster.mpi import OPEN_MPI
from dtk.cluster.stall import STUCK, Stall
from dtk.cluster.standing import Standing
from dtk.cluster.waiting import Wait

# The same in all processes of a job, and in no other: Open MPI's, from version 4 on.
_JOB = "PMIX_NAMESPACE"
_LOOK = 0.05  # seconds between two looks at who has come
_SCAN = 1.0  # and at the processes of those that have not
# Seconds in which all processes of this host are there, though they may compute still.
_STARTED = 2.0
# Each rank leaves the one before it this long to say who is missing.
_IN_TURN = 2.0


def await_neighbours(
    environment: Environment, timeout: float, environ: Mapping[str, str] = os.environ
) -> None:
    """Wait until the other ranks of this host are about to start MPI, too.

    Returns at once where that cannot be known: under other launchers, or where processes cannot see
    each other.
    """
    job = environ.get(_JOB, "")
    if not (job and timeout and environment.kind == "mpi" and environment.local_size > 1):
        return
    name = f"dtk.{job}."
    with contextlib.suppress(OSError):  # it has said so before, for another strategy
        here = socket.socket(socket.AF_UNIX)
        here.bind(f"\0{name}{environment.rank}")
        here.detach()  # it lasts as long as this process
    wait = Wait(f"rank {environment.rank}", math.inf)
    began = scanned = time.monotonic() - _SCAN
    standings: dict[int, Standing] = {}
    while True:
        now, come = time.monotonic(), _come(name)
        if len(come) >= environment.local_size:
            return
        if now - scanned >= _SCAN:
            scanned = now
            found = _neighbours(job)
            for rank, pid in found.items():
                known = standings.setdefault(rank, Standing(started=True, moved=now))
                known.observe(usage.of(pid), now)
            missing = sorted(set(found) - come)
            if not missing and now - began > _STARTED:
                return
            turn = sorted(come).index(environment.rank) if environment.rank in come else 0
            if missing and turn == 0:
                names = ", ".join(f"rank {rank} (process {found[rank]})" for rank in missing)
                wait.say(
                    f"{names} to make a strategy",
                    f"; the job is ended once one of them has done nothing for {timeout:g} s",
                )
            since = now - timeout - _IN_TURN * turn
            idle = tuple(rank for rank in missing if standings[rank].is_idle(since))
            if idle and began < since:
                _end(environment, idle, sorted(come), standings, timeout)
        time.sleep(_LOOK)


def _come(name: str) -> set[int]:
    """Return the ranks that have said that they are there."""
    mark = f"@{name}"
    with open("/proc/net/unix") as file:
        words = [line.split()[-1] for line in file]
    ends = [word.removeprefix(mark) for word in words if word.startswith(mark)]
    return {int(end) for end in ends if end.isdigit()}


def _neighbours(job: str) -> dict[int, int]:
    """Return the processes of this host's ranks, of those that could be seen to have come."""
    mine, found = _network("self"), dict[int, int]()
    for entry in sorted((one for one in os.listdir("/proc") if one.isdigit()), key=int):
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{entry}/environ", "rb") as file:
                told = dict(
                    word.split("=", 1)
                    for word in file.read().decode(errors="replace").split("\0")
                    if "=" in word
                )
            if told.get(_JOB) == job and _network(entry) == mine:
                # Its children have the same variables, and later numbers.
                found.setdefault(int(told.get(OPEN_MPI.rank, "")), int(entry))
    return found


def _network(process: str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")


def _end(
    environment: Environment,
    missing: tuple[int, ...],
    come: list[int],
    standings: Mapping[int, Standing],
    timeout: float,
) -> NoReturn:
    names = [f"rank {rank}" for rank in range(environment.size)]
    known = [standings.get(rank, Standing()) for rank in range(environment.size)]
    found = Stall(missing, f"did nothing for {timeout:g} s", ())
    host = socket.gethostname()
    text = stall.describe(found, names, [host] * environment.size, known)
    waiting = [f"rank {rank} waits in the start of MPI.\n" for rank in come]
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        os.write(2, (text + "".join(waiting)).encode())
    os._exit(STUCK)
