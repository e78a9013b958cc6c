"""Ranks that watch each other where no launcher of dtk's does: under `mpirun`, `srun`, by hand.

Rank 0 listens, and every rank keeps one connection to it. They learn its address and a secret by
the communicator that they have already; each message carries a code that only who knows the secret
can make, so others can neither speak nor end the job.

    rank k   what it is doing, once a second  ─────> rank 0   tells stuck from slow (`stall`)
    rank k   tells if rank 0 is silent        <───── rank 0   that it is there
             says why, and ends with 124      <─────          that the job is stuck, and why
    rank k   which exception ends it          ─────> rank 0   compares, and says who failed first
             ends                             <─────          who that was

A rank whose connection has ended has left its script; that is a stall once another waits for it.
Where neither a launcher nor the communicator sees that a rank is gone, that ends the job as soon as
another waits, or is at its end, unless the rank has said before that its script is over.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing.connection
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dtk.cluster import failures, progress, slurm, stall
from dtk.cluster.detect import detect
from dtk.cluster.failures import Failure
from dtk.cluster.line import HANDSHAKE, Line, introduce
from dtk.cluster.stall import STUCK, RankReport, RankStatus, Stall, report_of
from dtk.errors import TRY_AGAIN, ClusterError

_PERIOD = 1.0
# Each rank leaves the one before it this long to say that rank 0 is silent.
_IN_TURN = 2.0
# Seconds in which an earlier failure may be heard of, and the cause where all have lost a peer.
_SETTLE, _LATE = 0.3, 3.0
# Seconds of a network's silence after which a rank is taken for gone, where nobody else tells: less
# than MPI's server waits, which then ends all ranks without a word of dtk's.
_CUT_OFF = 60.0
_LAST_CAME = 52  # where tcp(7)'s tcp_info has it for data, and then for acknowledgements
_PAUSE = 5.0
_GONE = "was gone first, and told of no exception: it was killed, or its script was over"


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

    def __init__(
        self,
        hosts: Sequence[str],
        lines: Mapping[int, Line],
        timeout: float,
        ends_at_loss: bool = False,
        waits_at_end: bool = False,
    ) -> None:
        self._timeout, self._lines = timeout, dict(lines)
        self._ends_at_loss, self._waits_at_end = ends_at_loss, waits_at_end
        self._lost_since = math.inf
        self._over: set[int] = set()  # ranks whose scripts are over
        self._lock = threading.Lock()
        self._awake, self._process = _Awake(), os.getpid()
        self._left = math.inf  # when the script of rank 0 itself was over
        atexit.register(self._say_over)
        self._statuses = [
            RankStatus(f"rank {rank}", host, started=True, moved=time.monotonic())
            for rank, host in enumerate(hosts)
        ]
        self._said = False
        self._lags = dict.fromkeys(self._lines, math.inf)
        self._own: Failure | None = None
        self._failures: dict[int, Failure] = {}  # of the thread alone
        self._failed_since = math.inf
        self._first = ""  # who failed first, once that is known
        self._is_known = threading.Event()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)
        own = self._statuses[0]
        progress.report_to(lambda report: own.take(report, time.monotonic()), timeout)
        failures.tell_by(self.fail)
        threading.Thread(target=self._run, name="dtk-watch", daemon=True).start()

    def fail(self, failure: Failure) -> str:
        """Note what ends rank 0 itself; return who failed first."""
        self._own = failure
        os.eventfd_write(self._woken, 1)
        self._is_known.wait(_LATE + _PERIOD)
        return self._first

    def _run(self) -> None:
        said_at, period = 0.0, min(_PERIOD, self._timeout / 10)
        while True:
            self._hear(max(0.0, min(period, self._known_at() - time.monotonic())))
            now = time.monotonic()
            if now - said_at > period:
                said_at = now
                self._tell({"here": True})
            if now >= self._known_at():
                self._say_first()
            is_lost = now - self._lost_since > _SETTLE and self._own is None
            waits = any(_waits_since(self._lost_since, one) for one in self._statuses)
            ends = now - max(self._left, self._lost_since) > _LATE and self._waits_at_end
            if is_lost and (waits or ends):
                self._end_lost()
            if not self._said and (short := stall.find_short(self._statuses)):
                self._said = True  # a rank is about to end of it
                with contextlib.suppress(OSError):
                    os.write(2, stall.describe_cause(short, self._statuses).encode())
            is_settling = 0 <= now - self._lost_since < 2 * _LATE
            watches = self._timeout < math.inf and not is_settling
            if watches and (stuck := stall.find(self._statuses, now, self._timeout)):
                stall.say_last(stall.describe(stuck, self._statuses))
                self._tell({"stuck": True})
                _leave()

    def _hear(self, seconds: float) -> None:
        """Read what has come, all of it, before anyone is taken for silent."""
        ends: list[int | socket.socket] = [self._woken, *(one.end for one in self._lines.values())]
        # Unlike select(2), of any number of connections.
        ready = multiprocessing.connection.wait(ends, seconds)
        if self._woken in ready:
            os.eventfd_read(self._woken)
            assert self._own is not None
            self._note(0, self._own)
        for rank, line in [one for one in self._lines.items() if one[1].end in ready]:
            try:
                for message in line.receive():
                    self._take(rank, message, time.monotonic())
            except (OSError, ValueError, KeyError, TypeError):
                self._lose(rank)
        is_awake = self._awake.seconds() > _CUT_OFF
        watched = self._lines.items() if self._ends_at_loss and is_awake else ()
        for rank in [one for one, line in watched if _is_cut_off(line.end)]:
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        """Note that the connection to a rank has ended."""
        self._lines.pop(rank).end.close()
        self._statuses[rank].left = True
        if self._ends_at_loss and rank not in self._over:
            self._lost_since = min(self._lost_since, time.monotonic())

    def _take(self, rank: int, message: Mapping[str, object], now: float) -> None:
        self._lags[rank] = lag = min(self._lags[rank], now - float(str(message["sent"])))
        if "over" in message:
            self._over.add(rank)
        elif "failure" in message:
            self._note(rank, failures.read(message, lag))
        else:
            self._statuses[rank].take(report_of(message), now)

    # --- who failed first ---

    def _note(self, rank: int, failure: Failure) -> None:
        self._failures.setdefault(rank, failure)
        self._failed_since = min(self._failed_since, time.monotonic())

    def _gone(self) -> list[int]:
        """Return the ranks that have left, and told of no exception."""
        ranks = enumerate(self._statuses)
        return [rank for rank, one in ranks if one.left and rank not in self._failures]

    def _known_at(self) -> float:
        """Return when it is known who failed first; never, before anyone has, and after that."""
        if self._first:
            return math.inf
        is_known = not all(one.lost_peer for one in self._failures.values()) or bool(self._gone())
        return self._failed_since + (_SETTLE if is_known else _LATE)

    def _say_first(self) -> None:
        rank, gone = failures.first(self._failures), self._gone()
        failure = self._failures[rank]
        said = f"failed first{failure.place}: {failure.text}"
        if failure.lost_peer and gone:
            rank, said = gone[0], _GONE
        self._first = f"{self._statuses[rank].name}, host {self._statuses[rank].host}, {said}"
        stall.say_last(f"dtk: {self._first}\n")
        self._tell({"first": self._first})
        self._is_known.set()

    def _end_lost(self) -> NoReturn:
        """End the job of a rank that is gone, once it is said who failed first."""
        if not self._first and self._failures:
            self._say_first()
        elif not self._first:
            gone = min(rank for rank in self._gone() if rank not in self._over)
            self._first = f"{self._statuses[gone].name}, host {self._statuses[gone].host}, {_GONE}"
            stall.say_last(f"dtk: {self._first}\n")
        self._tell({"lost": True})
        os._exit(TRY_AGAIN)

    def _say_over(self) -> None:
        if os.getpid() == self._process:  # not of a child by os.fork
            self._left = time.monotonic()
            self._tell({"over": True})

    def _tell(self, message: object) -> None:
        with self._lock:
            for line in list(self._lines.values()):
                with contextlib.suppress(OSError):
                    line.send(message)


class Client:
    """What another rank than 0 sees: reports where it is, and ends when it is told to."""

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        line: Line,
        timeout: float,
        ends_at_loss: bool = False,
        waits_at_end: bool = False,
    ) -> None:
        self._rank, self._line, self._timeout = rank, line, timeout
        self._ends_at_loss, self._waits_at_end = ends_at_loss, waits_at_end
        self._fails = self._over = False  # whether this rank fails; whether rank 0's script is over
        self._process = os.getpid()
        self._left = math.inf  # when the script of this rank was over
        atexit.register(self._say_over)
        self._statuses = [RankStatus(f"rank {rank}", host) for rank, host in enumerate(hosts)]
        self._status = self._statuses[rank]
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._first = ""
        self._is_known = threading.Event()
        progress.report_to(self.send, timeout)
        failures.tell_by(self.fail)
        threading.Thread(target=self._run, name="dtk-watch", daemon=True).start()

    def send(self, report: RankReport) -> None:
        """Send a report to rank 0."""
        self._status.take(report, time.monotonic())
        self._send(vars(report))

    def _say_over(self) -> None:
        if os.getpid() == self._process:  # not of a child by os.fork
            self._left = time.monotonic()
            self._send({"over": True})

    def _send(self, message: Mapping[str, object]) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._line.send({**message, "sent": time.monotonic()})

    def fail(self, failure: Failure) -> str:
        """Tell rank 0 what ends this rank; return who failed first, where rank 0 says so."""
        self._fails = True
        self._send({"failure": True, **failure._asdict()})
        self._is_known.wait(_LATE + _PERIOD)
        if self._is_known.is_set() and not self._first and failure.lost_peer:
            self._first = f"rank 0, host {self._statuses[0].host}, {_GONE}"
            stall.say_last(f"dtk: {self._first}\n")
        return self._first

    def _run(self) -> None:
        """Await rank 0's word, or its silence; rank 1 speaks first of it."""
        patience = self._timeout + min(5.0, self._timeout / 4) + _IN_TURN * (self._rank - 1)
        awake = _Awake()
        while True:
            if select.select([self._line.end], [], [], min(_PERIOD, self._timeout / 10))[0]:
                try:
                    messages = self._line.receive()
                except (OSError, ValueError):
                    break
                self._heard = time.monotonic()
                for message in messages:
                    if "stuck" in message:
                        os._exit(STUCK)
                    if "lost" in message and not self._fails:
                        os._exit(TRY_AGAIN)
                    self._over = self._over or "over" in message
                    if "first" in message:
                        self._first = str(message["first"])
                        self._is_known.set()
            is_awake = awake.seconds() > _CUT_OFF
            if self._ends_at_loss and is_awake and _is_cut_off(self._line.end):
                break
            if time.monotonic() - self._heard > patience:
                self._end(f"reported nothing for {self._timeout:g} s, last")
        self._is_known.set()
        gone = time.monotonic()
        while self._ends_at_loss and not (self._over or self._fails):
            # At its end MPI may wait for rank 0, and for ever.
            ends = time.monotonic() - max(gone, self._left) > _LATE and self._waits_at_end
            if ends or _waits_since(gone, self._status):
                why = "is gone, and this rank waited for it at its end" if ends else _GONE
                stall.say_last(f"dtk: rank 0, host {self._statuses[0].host}, {why}\n")
                os._exit(TRY_AGAIN)
            time.sleep(_PERIOD / 10)
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


def _is_cut_off(end: socket.socket) -> bool:
    """Return whether nothing has come from the other host for long, not even what its system sends.

    That answers for a busy process, too; and rank 0 sends something each second.
    """
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_CAME + 8)
    data, acknowledgement = struct.unpack_from("II", info, _LAST_CAME)  # milliseconds ago
    return min(data, acknowledgement) > 1000 * _CUT_OFF


class _Awake:
    """For how long this process has run without a pause, such as by SIGSTOP."""

    def __init__(self) -> None:
        self._since = self._looked = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds; to be asked at least once a second."""
        now = time.monotonic()
        if now - self._looked > _PAUSE:
            self._since = now
        self._looked = now
        return now - self._since


def _waits_since(moment: float, status: RankStatus) -> bool:
    """Return whether a rank waits for others, and has had time to say otherwise since a moment."""
    has_had_time = time.monotonic() - moment > _LATE  # a rank that moves on says so each second
    heard = status.heard is not None and status.heard > moment
    return status.waits and (heard or has_had_time)


def _leave() -> NoReturn:
    """End this process; the launcher ends the others, which may be stopped, on other hosts."""
    try:
        with contextlib.suppress(OSError, ClusterError):  # nothing may keep it from ending
            if detect().kind == "slurm":  # else the step may be the user's shell
                slurm.end_step(os.environ)
    finally:
        os._exit(STUCK)
