"""Ranks that watch each other where no launcher of dtk's does: under `mpirun`, `srun`, by hand.

Rank 0 listens, and every rank keeps one connection to it. They learn its address and a secret by
the communicator that they have already; each message carries a code that only who knows the secret
can make, so others can neither speak nor end the job.

    rank k   what it is doing, once a second  ─────> rank 0   tells stuck from slow (`stall`)
    rank k   tells if rank 0 is silent        <───── rank 0   that it is there
             says why, and ends with 124      <─────          that the job is stuck, and why

A rank whose connection has ended has left its script; that is a stall once another waits for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dtk.cluster import progress, slurm, stall
from dtk.cluster.detect import detect
from dtk.cluster.line import HANDSHAKE, Line, introduce
from dtk.cluster.stall import STUCK, RankReport, RankStatus, Stall, report_of
from dtk.errors import ClusterError

_PERIOD = 1.0
# Each rank leaves the one before it this long to say that rank 0 is silent.
_IN_TURN = 2.0


class Listener:
    """Where rank 0 awaits the others."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self.port = int(self._listener.getsockname()[1])
        self.secret = os.urandom(32)

    def accept_clients(self, size: int, seconds: float) -> dict[int, Line]:
        """Return the connection to each other rank that comes and knows the secret."""
        clients: dict[int, Line] = {}
        deadline = time.monotonic() + seconds
        with self._listener:
            while len(clients) < size - 1 and time.monotonic() < deadline:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    rank, line = self._accept(self._listener.accept()[0])
                    if 0 < rank < size:
                        clients[rank] = line
        return clients

    def _accept(self, end: socket.socket) -> tuple[int, Line]:
        try:
            line = introduce(end, self.secret, is_listener=True)
            (hello,) = line.receive()
            return int(str(hello["rank"])), line
        except BaseException:
            end.close()
            raise


def connect(rank: int, addresses: Sequence[str], port: int, secret: bytes) -> Line | None:
    """Return a connection to rank 0; None if it cannot be reached."""
    for address in addresses:
        with contextlib.suppress(OSError):
            end = socket.create_connection((address, port), timeout=HANDSHAKE)
            try:
                line = introduce(end, secret, is_listener=False)
                line.send({"rank": rank})
                return line
            except OSError:
                end.close()
    return None


class Table:
    """What rank 0 knows of all ranks; a thread of it ends a job that is stuck."""

    def __init__(self, hosts: Sequence[str], lines: Mapping[int, Line], timeout: float) -> None:
        self._timeout, self._lines = timeout, dict(lines)
        self._statuses = [
            RankStatus(f"rank {rank}", host, started=True, moved=time.monotonic())
            for rank, host in enumerate(hosts)
        ]
        self._said = False
        own = self._statuses[0]
        progress.report_to(lambda report: own.take(report, time.monotonic()), timeout)
        threading.Thread(target=self._run, name="dtk-watch", daemon=True).start()

    def _run(self) -> None:
        told = 0.0
        while True:
            self._hear(min(_PERIOD, self._timeout / 10))
            now = time.monotonic()
            if now - told > min(_PERIOD, self._timeout / 10):
                told = now
                self._tell({"here": True})
            if not self._said and (short := stall.find_short(self._statuses)):
                self._said = True  # a rank is about to end of it
                with contextlib.suppress(OSError):
                    os.write(2, stall.describe_cause(short, self._statuses).encode())
            if found := stall.find(self._statuses, now, self._timeout):
                stall.say_last(stall.describe(found, self._statuses))
                self._tell({"stuck": True})
                _leave()

    def _hear(self, seconds: float) -> None:
        """Read what has come, all of it, before anyone is taken for silent."""
        # Unlike select(2), of any number of connections.
        ready = multiprocessing.connection.wait([one.end for one in self._lines.values()], seconds)
        for rank, line in [one for one in self._lines.items() if one[1].end in ready]:
            try:
                for message in line.receive():
                    self._statuses[rank].take(report_of(message), time.monotonic())
            except (OSError, ValueError, KeyError, TypeError):
                del self._lines[rank]
                line.end.close()
                self._statuses[rank].left = True

    def _tell(self, message: object) -> None:
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(message)


class Client:
    """What another rank than 0 sees: reports where it is, and ends when it is told to."""

    def __init__(self, rank: int, hosts: Sequence[str], line: Line, timeout: float) -> None:
        self._rank, self._line, self._timeout = rank, line, timeout
        self._statuses = [RankStatus(f"rank {rank}", host) for rank, host in enumerate(hosts)]
        self._status = self._statuses[rank]
        self._heard = time.monotonic()
        progress.report_to(self.send, timeout)
        threading.Thread(target=self._run, name="dtk-watch", daemon=True).start()

    def send(self, report: RankReport) -> None:
        """Send a report to rank 0."""
        self._status.take(report, time.monotonic())
        with contextlib.suppress(OSError):
            self._line.send(vars(report))

    def _run(self) -> None:
        """Await rank 0's word, or its silence; rank 1 speaks first of it."""
        patience = self._timeout + min(5.0, self._timeout / 4) + _IN_TURN * (self._rank - 1)
        while True:
            if select.select([self._line.end], [], [], min(_PERIOD, self._timeout / 10))[0]:
                try:
                    messages = self._line.receive()
                except (OSError, ValueError):
                    break
                self._heard = time.monotonic()
                if any("stuck" in message for message in messages):
                    os._exit(STUCK)
            if time.monotonic() - self._heard > patience:
                self._end(f"reported nothing for {self._timeout:g} s, last")
        # Rank 0 is gone: that matters once this rank has been inside for the timeout, idle.
        own = self._status
        while not (
            own.last is not None
            and own.last.inside
            and max(own.moved, own.busy) < time.monotonic() - self._timeout
        ):
            time.sleep(_PERIOD)
        self._end("has left its script, last")

    def _end(self, why: str) -> NoReturn:
        stall.say_last(stall.describe(Stall((0,), why, (self._rank,)), self._statuses))
        _leave()


def _leave() -> NoReturn:
    """End this process; the launcher ends the others, which may be stopped, on other hosts."""
    try:
        with contextlib.suppress(OSError, ClusterError):  # nothing may keep it from ending
            if detect().kind == "slurm":  # else the step may be the user's shell
                slurm.end_step(os.environ)
    finally:
        os._exit(STUCK)
