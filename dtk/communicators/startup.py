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
import logging
import os
import random
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from dtk.cluster import mpi_join, progress, slurm
from dtk.cluster.line import Line, introduce
from dtk.cluster.mpi_server import START_SECONDS
from dtk.cluster.place import Place
from dtk.cluster.startup_barrier import Wait
from dtk.cluster.variables import JOB_SECRET
from dtk.errors import CommunicatorError, as_passing, at_rank
from dtk.quiet import device_start

T = TypeVar("T")
# Between two attempts to reach rank 0: short at first, since ranks start at about the same time.
_FIRST_RETRY_SECONDS = 0.01
_RETRY_SECONDS = 0.1
# Where a wait was too long, and by which other ranks know that rank 0's was.
_LIMIT = "(DTK_START_TIMEOUT sets the limit)"
_SILENCE = 2.0  # seconds for one who has come to rank 0, and says nothing
_WAITING = 1024  # connections that rank 0 has not taken yet


def limit() -> float:
    """Return the seconds a start may take: DTK_START_TIMEOUT, or 120."""
    text = os.environ.get("DTK_START_TIMEOUT") or "120"
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= 1e6:
            return seconds
    raise CommunicatorError(
        f"DTK_START_TIMEOUT={text!r}: expected seconds, above 0 and up to 1000000; or unset it"
    )


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
    _check_free(rank, address, _has_others(address, world))


def _check_free(rank: int, address: str, from_elsewhere: bool) -> None:
    try:
        _listen(address, from_elsewhere).close()
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


class Met(NamedTuple):
    """What a rank learns where all meet."""

    addresses: tuple[str, ...]  # of every rank
    mpi: dict[str, str] = {}  # variables by which it joins MPI's world, if all can


def gather(place: Place, offer: str = "") -> Met:
    """Return once every rank has called this; see `mpi_join.offer`."""
    rank, size, addresses = place.rank, place.size, place.addresses
    if len(addresses) == size:
        check_free(rank, addresses[rank], addresses)
        return meet(rank, addresses, limit(), offer)
    if place.meeting:
        return exchange_addresses(rank, size, place.meeting, limit(), offer)
    message = (
        f"TensorFlow's collectives need rank 0's address or that of each of {size} ranks, "
        f"got {len(addresses)}: start with `dtk run`, or set MASTER_ADDR or TF_CONFIG"
    )
    raise CommunicatorError(at_rank(rank, message))


def meet(rank: int, addresses: Sequence[str], timeout: float, offer: str = "") -> Met:
    """Return once every rank has called this, with the addresses that all know already."""
    names = [f"rank {r} ({address})" for r, address in enumerate(addresses)]
    hello = {"rank": rank, "world": list(addresses), "mpi": offer}
    met = _gather(hello, names, addresses[0], timeout, _has_others(addresses[0], addresses))
    return met._replace(addresses=tuple(addresses))


def exchange_addresses(rank: int, size: int, meeting: str, timeout: float, offer: str = "") -> Met:
    """Return an address of every rank once all have called this: each chooses a port of its own."""
    others = not _is_loopback(meeting)
    if rank == 0:
        _check_free(rank, meeting, others)
    with _reserved() as port:
        names = [f"rank {r}" for r in range(size)]
        # Slurm's ports repeat: another step's rank must not be taken for one of this.
        step = slurm.step_name(os.environ)
        world = f"{size} of Slurm's step {step}" if step else size
        hello = {"rank": rank, "world": world, "port": port, "mpi": offer}
        return _gather(hello, names, meeting, timeout, others)


@contextlib.contextmanager
def _reserved() -> Iterator[int]:
    """Hold a port that nothing uses, so that other ranks of this host take others."""
    # No connection to elsewhere begins at these; and the script's own random numbers stay.
    for port in random.SystemRandom().sample(slurm.PORTS, 1000):
        with socket.socket() as held:
            try:
                held.bind(("", port))
            except OSError:
                continue
            yield port
            return
    raise CommunicatorError("no free port was found on this host among 1,000 of 12000 to 31999")


def _gather(
    hello: Mapping[str, object],
    names: Sequence[str],
    meeting: str,
    timeout: float,
    from_elsewhere: bool,
) -> Met:
    """Say hello to rank 0, and return what all learn; raise the same error on every rank."""
    rank = _number(hello, "rank")
    wait = Wait(f"rank {rank}", timeout)
    if rank == 0:
        answer = _host(meeting, names, hello, wait, from_elsewhere)
    else:
        answer = _ask(meeting, hello, wait)
    if isinstance(answer, Met):
        return answer._replace(mpi=mpi_join.at_this_host(answer.mpi))
    error = _refused(rank, answer)
    raise as_passing(error) if _LIMIT in answer else error


def _host(
    meeting: str,
    names: Sequence[str],
    hello: Mapping[str, object],
    wait: Wait,
    from_elsewhere: bool,
) -> Met | str:
    """Hear all ranks, and tell them all addresses, or what is wrong; return that."""
    with _listen(meeting, from_elsewhere) as listener, contextlib.ExitStack() as ends:
        ranks = _Ranks(meeting, names, hello, ends)
        while True:
            problem = ranks.await_all(listener, wait)
            variables = [] if problem else ranks.join_by_mpi()
            if problem or not ranks.forget_ended():
                break
            if any(variables):
                mpi_join.end_server()
        answer = problem or ranks.in_order(ranks.addresses)
        ranks.tell(answer, variables)
    return answer if isinstance(answer, str) else Met(tuple(answer), variables[0])


class _Ranks:
    """Those that have come to rank 0, itself included, and what they said."""

    def __init__(
        self,
        meeting: str,
        names: Sequence[str],
        hello: Mapping[str, object],
        ends: contextlib.ExitStack,
    ) -> None:
        self._meeting, self._names, self._hello, self._ends = meeting, names, hello, ends
        self.addresses, self._hellos = {0: _address(meeting, meeting, hello)}, {0: hello}
        self._lines: dict[int, Line] = {}
        self._stranger = ""

    def await_all(self, listener: socket.socket, wait: Wait) -> str:
        """Wait until all are there; return what is wrong, if something is."""
        while self.forget_ended() or len(self.addresses) < len(self._names):
            missing = ", ".join(n for r, n in enumerate(self._names) if r not in self.addresses)
            wait.say(missing)
            ready, _, _ = select.select([listener], [], [], wait.quiet)
            self.forget_ended()
            if ready and (problem := self._hear(*listener.accept())):
                return problem
            if not wait.left and len(self.addresses) < len(self._names):
                return self._incomplete(missing, wait)
        return ""

    def forget_ended(self) -> bool:
        """Forget ranks whose processes have ended, since an engine may start them again."""
        gone = [rank for rank, line in self._lines.items() if line.is_over()]
        for rank in gone:
            del self._lines[rank], self.addresses[rank]
        return bool(gone)

    def join_by_mpi(self) -> list[dict[str, str]]:
        """Return by which variables each rank joins MPI's world; it takes a moment."""
        return mpi_join.variables_of_ranks(self.in_order(self._hellos), self._lines)

    def in_order(self, of_ranks: Mapping[int, T]) -> list[T]:
        """Return one of each rank."""
        return [of_ranks[rank] for rank in range(len(self._names))]

    def tell(self, answer: str | list[str], variables: Sequence[Mapping[str, str]]) -> None:
        """Tell all, and wait until they have heard it."""
        for rank, line in self._lines.items():
            with contextlib.suppress(OSError):
                line.send({"answer": answer, "mpi": variables[rank] if variables else {}})
                line.end.shutdown(socket.SHUT_WR)
                line.end.recv(1)  # the client must close first, so that this port is free at once

    def _hear(self, end: socket.socket, source: tuple[str, int]) -> str:
        """Take one who has come; return what is wrong with a rank."""
        host = source[0]
        try:
            line = _introduced(self._ends.enter_context(end))
            hello = line.receive_one(_SILENCE)
            rank = _number(hello, "rank")
            problem = _problem(hello, rank, self._hello, self._lines, len(self._names))
            seen = f"{host.removeprefix('::ffff:')}:0"
            self.addresses[rank] = _address(seen, self._meeting, hello)
            self._lines[rank], self._hellos[rank] = line, hello
        except (OSError, ValueError, KeyError, TypeError):
            self._stranger = host  # a port scanner, a health check: not ours to judge
            return ""
        return problem

    def _incomplete(self, missing: str, wait: Wait) -> str:
        problem = (
            f"the world of {len(self._names)} is not complete after {wait.limit:g} s: no word from "
            f"{missing}. Did it start, and can it reach {self._meeting}? {_LIMIT}"
        )
        if self._stranger:
            problem += (
                f" Somebody at {self._stranger} came who is no rank of this job, or has another "
                f"{JOB_SECRET} than rank 0"
            )
        return problem


def _introduced(end: socket.socket) -> Line:
    """Make a connection a line, and say so, by which the client knows rank 0's secret."""
    line = introduce(end, _secret(), is_listener=True, patience=_SILENCE)
    line.send({})
    return line


def _secret() -> bytes:
    return os.environ.get(JOB_SECRET, "").encode()


def _number(hello: Mapping[str, object], name: str) -> int:
    return int(str(hello[name]))


def _address(seen: str, meeting: str, hello: Mapping[str, object]) -> str:
    """Return where a rank is for all others, by the address at which rank 0 sees it."""
    # What rank 0 sees on its own host is for others where they have met it.
    host = parse_address(meeting if _is_loopback(seen) else seen)[0]
    port = _number(hello, "port") if "port" in hello else 0
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _problem(
    hello: Mapping[str, object],
    rank: int,
    own: Mapping[str, object],
    lines: Mapping[int, Line],
    size: int,
) -> str:
    """Return what is wrong with a client's word for which rank it is."""
    if hello["world"] != own["world"]:
        there, here = hello["world"], own["world"]
        return f"rank {rank} was told another world: {there} there, {here} at rank 0"
    is_there = rank in lines or not 0 < rank < size
    return f"two processes say they are rank {rank}" if is_there else ""


def _ask(meeting: str, hello: Mapping[str, object], wait: Wait) -> Met | str:
    """Wait until rank 0 tells all addresses, or what is wrong."""
    pause, why = _FIRST_RETRY_SECONDS, ""
    while wait.left:
        wait.say(f"rank 0, which does not answer at {meeting}")
        try:
            target = parse_address(meeting)
            with socket.create_connection(target, timeout=max(0.1, wait.quiet)) as end:
                # Others may stand before this one, and say nothing: it keeps its place.
                line = introduce(end, _secret(), is_listener=False, patience=wait.left + 1.0)
                line.receive_one(wait.left + 1.0)
                line.send({**hello, "from": str(end.getsockname()[0]).removeprefix("::ffff:")})
                # Rank 0 knows more than we do about who is missing: give it time to say so.
                told = mpi_join.await_answer(line, wait.left + START_SECONDS)
                answer, mpi = told["answer"], told.get("mpi", {})
                if isinstance(answer, list) and isinstance(mpi, dict):
                    return Met(tuple(map(str, answer)), {str(n): str(v) for n, v in mpi.items()})
                return str(answer)
        except PermissionError:
            return (
                f"what answers at {meeting} is not rank 0 of this job, or has another "
                f"{JOB_SECRET}: give every rank the same"
            )
        except OSError as error:
            is_name = isinstance(error, socket.gaierror)
            why = "its name means no address here, " if is_name else ""
            time.sleep(pause)
            pause = min(1.2 * pause, _RETRY_SECONDS)
    return (
        f"no answer from rank 0 ({meeting}) within {wait.limit:g} s: {why}did it start, and can "
        f"this host reach it? {_LIMIT}"
    )


def _is_loopback(address: str) -> bool:
    host = parse_address(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")


def _has_others(address: str, world: Sequence[str]) -> bool:
    """Return whether ranks of other hosts are to reach an address."""
    here = parse_address(address)[0]
    return any(parse_address(one)[0] != here and not _is_loopback(one) for one in world)


def _listen(address: str, from_elsewhere: bool) -> socket.socket:
    host, port = parse_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        if not from_elsewhere:
            raise
        family, target = socket.AF_INET, ("", port)  # the others' names for it may come later
    if from_elsewhere and host != target[0] and str(target[0]).startswith("127."):
        # Debian's /etc/hosts gives a host's own name 127.0.1.1, which no other host can reach.
        target = ("", port)
    six, waiting = family == socket.AF_INET6, _WAITING
    try:
        return socket.create_server(target, family=family, backlog=waiting, dualstack_ipv6=six)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # A name that leads here through a proxy or NAT is not an address of this host.
        return socket.create_server(("", port), family=family, backlog=waiting, dualstack_ipv6=six)


def check_world(place: Place, rank: int, size: int, library: str, start: str) -> None:
    """Raise if a library sees another world than the launcher described."""
    if (rank, size) != (place.rank, place.size):
        raise _refused(
            place.rank,
            f"the launcher ({place.kind}) started {place.size} ranks, but {library} "
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
    launcher then ends the other ranks. Where dtk has none, it is a signal that ends the process:
    `faulthandler` would end it with 1, as if the script had failed, and engines give up at that.
    """
    handler = signal.getsignal(signal.SIGALRM)
    by_signal = handler is signal.SIG_DFL and not progress.is_launched()
    with contextlib.suppress(AttributeError, ValueError, OSError):  # stderr may not be a real file
        sys.stderr.fileno()
        faulthandler.dump_traceback_later(timeout, exit=not by_signal, file=sys.stderr)
    before = signal.setitimer(signal.ITIMER_REAL, timeout + 1.0) if by_signal else (0.0, 0.0)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if by_signal:
            signal.setitimer(signal.ITIMER_REAL, *before)


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
