"""What starts waits for others for a bounded time, and says once for whom.

Where no launcher of dtk's watches, ranks of one host wait for each other before MPI starts.
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

from dtk.cluster import stall, usage
from dtk.cluster.place import Place
from dtk.cluster.stall import STUCK, RankStatus, Stall

AFTER = 10.0  # seconds; processes of one job often start a few seconds apart
# The same in all processes of a job, and in no other: Open MPI's, from version 4 on.
_JOB = "PMIX_NAMESPACE"
_LOOK = 0.05  # seconds between two looks at who has come
_SCAN = 1.0  # and at the processes of those that have not
# Seconds in which all processes of this host are there, though they may compute still.
_STARTED = 2.0
# Each rank leaves the one before it this long to say who is missing.
_IN_TURN = 2.0


class Wait:
    """A wait for other processes, which begins now."""

    def __init__(self, who: str, limit: float) -> None:
        self._who = who
        self.limit = limit
        self._began = time.monotonic()
        self._told = False

    @property
    def left(self) -> float:
        """Seconds until the limit; 0 after it."""
        return max(0.0, self._began + self.limit - time.monotonic())

    @property
    def quiet(self) -> float:
        """Seconds until `say` writes, or until the limit where it has, or where that is earlier."""
        due = self._began + AFTER - time.monotonic()
        return self.left if self._told else max(0.0, min(due, self.left))

    def say(self, whom: str, bound: str = "") -> None:
        """Write to standard error, once, not in the first seconds: which rank is waited for."""
        if self._told or time.monotonic() < self._began + AFTER:
            return
        self._told = True
        bound = bound or f", for {self.left:.0f} s more (DTK_START_TIMEOUT sets the limit)"
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed
            print(f"dtk: {self._who}: waiting for {whom}{bound}", file=sys.stderr, flush=True)


def await_neighbours(place: Place, timeout: float) -> None:
    """Wait until the other ranks of this host are about to start MPI, too.

    Returns at once where that cannot be known: under other launchers, or where processes cannot see
    each other.
    """
    job = os.environ.get(_JOB, "")
    if not (job and timeout and place.kind == "mpi" and place.local_size > 1):
        return
    name = f"dtk.{job}."
    with contextlib.suppress(OSError):  # it has said so before, for another strategy
        here = socket.socket(socket.AF_UNIX)
        here.bind(f"\0{name}{place.rank}")
        here.detach()  # it lasts as long as this process
    wait = Wait(f"rank {place.rank}", math.inf)
    began = scanned = time.monotonic() - _SCAN
    host = socket.gethostname()
    statuses = [RankStatus(f"rank {rank}", host) for rank in range(place.size)]
    while len(come := _come(name)) < place.local_size:
        now = time.monotonic()
        if now - scanned >= _SCAN:
            scanned = now
            neighbours = _neighbours(job)
            for rank, pid in neighbours.items():
                if not statuses[rank].started:
                    statuses[rank].started, statuses[rank].moved = True, now
                statuses[rank].observe(usage.usage_of(pid), now)
            missing = sorted(set(neighbours) - come)
            if not missing and now - began > _STARTED:
                return
            turn = sorted(come).index(place.rank) if place.rank in come else 0
            if missing and turn == 0:
                names = ", ".join(f"rank {rank} (process {neighbours[rank]})" for rank in missing)
                wait.say(
                    f"{names} to make a strategy",
                    f"; the job is ended once one of them has done nothing for {timeout:g} s",
                )
            since = now - timeout - _IN_TURN * turn
            idle = tuple(rank for rank in missing if statuses[rank].is_idle(since))
            if idle and began < since:
                found_stuck = Stall(idle, f"did nothing for {timeout:g} s", ())
                waits = [f"rank {rank} waits in the start of MPI.\n" for rank in sorted(come)]
                stall.say_last(stall.describe(found_stuck, statuses) + "".join(waits))
                os._exit(STUCK)
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
    import psutil  # here, since few jobs wait like that

    mine, pids = _network("self"), dict[int, int]()
    for process in psutil.process_iter(["environ"]):  # by their numbers
        variables = process.info["environ"] or {}
        with contextlib.suppress(OSError, ValueError):
            if variables.get(_JOB) == job and _network(process.pid) == mine:
                # Its children have the same variables, and later numbers.
                pids.setdefault(int(variables.get("OMPI_COMM_WORLD_RANK", "")), process.pid)
    return pids


def _network(process: int | str) -> str:
    return os.readlink(f"/proc/{process}/ns/net")
