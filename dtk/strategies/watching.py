"""Watch for stalls in jobs that `dtk run` has not started; see `dtk.cluster.heartbeats`."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import psutil

from dtk.cluster import heartbeats, progress
from dtk.communicators.base import Communicator
from dtk.errors import ClusterError

DEFAULT_TIMEOUT = 300.0
# Seconds for all ranks to reach rank 0; some of its addresses may be unreachable.
_REACH = 30.0


class _Meeting(NamedTuple):
    """Rank 0's message to the other ranks: how to reach its listener."""

    timeout: float  # seconds in which the job must make progress; 0: no watch
    addresses: tuple[str, ...] = ()  # rank 0's possible addresses
    port: int = 0  # rank 0's port
    secret: bytes = b""  # proves that a client is a rank of this job


def checked(stall_timeout: float | None) -> float:
    """Return the stall timeout in seconds: the argument, DTK_STALL_TIMEOUT, or 300."""
    if stall_timeout is not None:
        if not _is_timeout(stall_timeout):
            raise ValueError(f"stall_timeout={stall_timeout!r}: expected 1 second or more, or 0")
        return float(stall_timeout)
    text = os.environ.get(progress.VARIABLE) or str(DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not _is_timeout(seconds):
        raise ClusterError(f"{progress.VARIABLE}={text!r}: expected 1 second or more, or 0")
    return seconds


def _is_timeout(seconds: float) -> bool:
    return seconds == 0.0 or 1.0 <= seconds <= 1e6


def watch(communicator: Communicator, timeout: float) -> None:
    """Make all ranks of a job watch each other; only the first call counts. All ranks call it."""
    progress.start()
    among_processes = communicator.environment is not None and communicator.name != "null"
    if not among_processes or progress.is_launched() or progress.is_reporting():
        return
    rank, hosts = communicator.rank, communicator.hosts
    listener = None
    meeting = _Meeting(0.0)
    if rank == 0 and timeout:
        addresses = _addresses(communicator)
        listener = heartbeats.Listener(addresses[0] if addresses == ("127.0.0.1",) else "")
        meeting = _Meeting(timeout, addresses, listener.port, listener.secret)
    meeting = communicator.broadcast_object(meeting, 0)
    if not meeting.timeout:
        return
    lines: dict[int, heartbeats.Line] = {}
    if listener is not None:
        lines = listener.accept_clients(communicator.size, _REACH)
    else:
        line = heartbeats.connect(rank, meeting.addresses, meeting.port, meeting.secret)
        lines = {} if line is None else {0: line}
    # A rank that reached another listener by mistake is not among rank 0's clients.
    there = communicator.allgather_object(sorted(lines))[0]
    if len(there) < communicator.size - 1:
        for line in lines.values():
            line.end.close()
        if rank == 0:
            missing = [str(one) for one in range(1, communicator.size) if one not in there]
            print(
                f"dtk: stalls will not be detected: rank {', '.join(missing)} cannot reach port "
                f"{meeting.port} of rank 0 ({', '.join(meeting.addresses)})"
            )
    elif listener is not None:
        heartbeats.Table(hosts, lines, meeting.timeout)
    else:
        heartbeats.Client(rank, hosts, lines[0], meeting.timeout)


def _addresses(communicator: Communicator) -> tuple[str, ...]:
    """Return the addresses at which others may reach this rank, the likeliest first."""
    if len(set(communicator.hosts)) == 1:
        return ("127.0.0.1",)
    environment = communicator.environment
    told = [] if environment is None else [one.rpartition(":")[0] for one in environment.addresses]
    own = [
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    return tuple(dict.fromkeys([*told[:1], *own, communicator.hosts[0]]))
