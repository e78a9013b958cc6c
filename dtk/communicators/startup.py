"""Start a runtime so that it cannot wait for ever, and without noise.

TensorFlow's start waits in C++ for all peers: without a limit, deaf to signals, and holding
Python's interpreter lock, so that no Python thread could watch it. Hence two phases:

    1. meet       in Python, over the addresses that TensorFlow will use: rank 0 listens, every rank
                  sends its number, and when all have, rank 0 tells them to go on. A missing rank is
                  named with its address, and Ctrl-C works.
    2. start      TensorFlow's, which then takes about a second. If a peer dies in that second,
                  `faulthandler`, which needs no lock, ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from dtk.cluster.environment import Environment
from dtk.cluster.startup_barrier import Wait
from dtk.errors import CommunicatorError, at_rank
from dtk.quiet import device_start

# Between two attempts to reach rank 0: short at first, since ranks start at about the same time.
_FIRST_RETRY_SECONDS = 0.01
_RETRY_SECONDS = 0.1
_GO = b"go"


def limit() -> float:
    """Return the seconds a start may take: DTK_START_TIMEOUT, or 120."""
    text = os.environ.get("DTK_START_TIMEOUT", "120")
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise CommunicatorError(f"DTK_START_TIMEOUT={text!r} is not a number of seconds above 0")


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port"; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise CommunicatorError(f"cannot read address {address!r}; expected host:port")
    return host.strip("[]"), int(port)


def _refused(rank: int, told: str) -> CommunicatorError:
    return CommunicatorError(at_rank(rank, told))


def check_free(rank: int, address: str, world: Sequence[str] = ()) -> None:
    """Raise if this rank cannot listen on its own address."""
    try:
        _listen(address, world).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cause = f"in use by {_holder(address)}; end that process or give this rank another port"
        else:
            what = "it must be an address of this host and a port this user may use"
            cause = f"{error.strerror or error}; {what}"
        raise _refused(rank, f"cannot listen on its own address {address}: {cause}") from None


def _holder(address: str) -> str:
    """Name the process that listens on an address, as far as this user may see."""
    import psutil

    port = parse_address(address)[1]
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f"process {connection.pid} ({process.name()})"
    return "another process"


def meet(rank: int, addresses: Sequence[str], timeout: float) -> None:
    """Return once every rank has called this."""
    wait = Wait(f"rank {rank}", timeout)
    problem = _host(addresses, wait) if rank == 0 else _connect(rank, addresses, wait)
    if problem:
        raise _refused(rank, problem)


def _host(addresses: Sequence[str], wait: Wait) -> str:
    """Collect all ranks, and tell them to go on, or what is wrong: that is returned, too."""
    size = len(addresses)
    problem = ""
    clients: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(addresses[0], addresses))
        while len(clients) < size - 1 and not problem:
            missing = [r for r in range(1, size) if r not in clients]
            names = ", ".join(f"rank {r} ({addresses[r]})" for r in missing)
            wait.say(names)
            ready, _, _ = select.select([listener], [], [], wait.quiet)
            if ready:
                client = stack.enter_context(listener.accept()[0])
                problem = _welcome(client, clients, addresses)
            elif not wait.left:
                problem = (
                    f"the world of {size} is not complete after {wait.limit:g} s: no word from "
                    f"{names}. Did it start, and can it reach {addresses[0]}? "
                    "(DTK_START_TIMEOUT sets the limit)"
                )
        for client in clients.values():
            with contextlib.suppress(OSError):
                client.sendall(problem.encode() or _GO)
                client.shutdown(socket.SHUT_WR)
                client.recv(1)  # the client must close first, so that this port is free at once
    return problem


def _welcome(
    client: socket.socket, clients: dict[int, socket.socket], addresses: Sequence[str]
) -> str:
    """Take a client's word for which rank it is; return what is wrong with it."""
    client.settimeout(5.0)
    try:
        with client.makefile("rb") as lines:
            hello = json.loads(lines.readline(1 << 20))
        rank, world = int(hello["rank"]), [str(address) for address in hello["world"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # a port scanner, a health check: not ours to judge
    problem = ""
    if world != list(addresses):
        problem = f"rank {rank} was told another world: {world} there, {list(addresses)} at rank 0"
    elif rank in clients or not 0 < rank < len(addresses):
        problem = f"two processes say they are rank {rank}"
    clients[rank] = client
    return problem


def _connect(rank: int, addresses: Sequence[str], wait: Wait) -> str:
    """Wait until rank 0 says that all ranks are there; return what is wrong otherwise."""
    hello = json.dumps({"rank": rank, "world": list(addresses)}).encode() + b"\n"
    answer = b""
    pause = _FIRST_RETRY_SECONDS
    while wait.left and not answer:
        wait.say(f"rank 0, which does not answer at {addresses[0]}")
        with contextlib.suppress(OSError):
            target = parse_address(addresses[0])
            with socket.create_connection(target, timeout=wait.quiet) as line:
                line.sendall(hello)
                # Rank 0 knows more than we do about who is missing: give it time to say so.
                line.settimeout(wait.left + 5.0)
                answer = line.makefile("rb").read()
        if not answer:
            time.sleep(pause)
            pause = min(1.2 * pause, _RETRY_SECONDS)
    if answer == _GO:
        return ""
    return answer.decode(errors="replace") or (
        f"no answer from rank 0 ({addresses[0]}) within {wait.limit:g} s: did it start, and can "
        "this host reach it? (DTK_START_TIMEOUT sets the limit)"
    )


def _listen(address: str, world: Sequence[str]) -> socket.socket:
    host, port = parse_address(address)
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    others = {parse_address(one)[0] for one in world} - {host, "localhost", "127.0.0.1", "::1"}
    if others and host != target[0] and str(target[0]).startswith("127."):
        # Debian's /etc/hosts gives a host's own name 127.0.1.1, which no other host can reach.
        target = ("", port)
    six, waiting = family == socket.AF_INET6, max(1, len(world))
    try:
        return socket.create_server(target, family=family, backlog=waiting, dualstack_ipv6=six)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # A name that leads here through a proxy or NAT is not an address of this host.
        return socket.create_server(("", port), family=family, backlog=waiting, dualstack_ipv6=six)


def check_world(environment: Environment, rank: int, size: int, library: str, start: str) -> None:
    """Raise if a library sees another world than the launcher described."""
    if (rank, size) != (environment.rank, environment.size):
        raise _refused(
            environment.rank,
            f"the launcher ({environment.kind}) started {environment.size} ranks, but {library} "
            f"sees rank {rank} of {size}: {start}",
        )


def answers(address: str, timeout: float = 1.0) -> bool:
    """Return whether something accepts connections at "host:port"."""
    try:
        with socket.create_connection(parse_address(address), timeout=timeout):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def at_most(timeout: float) -> Iterator[None]:
    """End this process when the block takes longer than `timeout` seconds.

    The block may hold the interpreter lock and never return, so nothing gentler would work. The
    launcher then ends the other ranks.
    """
    with contextlib.suppress(AttributeError, ValueError, OSError):  # stderr may not be a real file
        sys.stderr.fileno()
        faulthandler.dump_traceback_later(timeout, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide TensorFlow's INFO lines about cluster and devices for the block; warnings stay."""
    logger = logging.getLogger("tensorflow")
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        with device_start():
            yield
    finally:
        logger.setLevel(level)
