"""Ranks that watch each other where no launcher of dtk's does: under `mpirun`, `srun`, by hand.

Rank 0 listens, and every rank keeps one connection to it. They learn its address and a secret by
the communicator that they have already; each message carries a code that only who knows the secret
can make, so others can neither speak nor end the job.

    rank k   what it is doing, once a second  ─────> rank 0   tells stuck from slow (`stall`)
    rank k   tells if rank 0 is silent        <───── rank 0   that it is there, now and then
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
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from dtk.cluster import failures, progress, slurm, stall
from dtk.cluster.detect import detect
from dtk.cluster.failures import Failure
from dtk.cluster.line import Line, reach, welcome
from dtk.cluster.messages import record_of
from dtk.cluster.stall import STUCK, RankReport, RankStatus, Stall
from dtk.errors import TRY_AGAIN, ClusterError

_PERIOD = 1.0
# Seconds between two words of rank 0 that it is there: seldom, since a process that is stopped
# reads none, and takes none any more once they fill its buffer.
_HERE = 15.0
# Each rank leaves the one before it this long to say that rank 0 is silent.
_IN_TURN = 2.0
# Seconds in which an earlier failure may be heard of, and the cause where all have lost a peer.
_SETTLE, _LATE = 0.3, 3.0
# Seconds of a network's silence after which a rank is taken for gone, where nobody else tells: less
# than MPI's server waits, which then ends all ranks without a word of dtk's.
_CUT_OFF = 60.0
_PAUSE = 5.0  # seconds in which this process would have looked, if it had not been stopped
_GONE = "was gone first, and told of no exception: it was killed, or its script was over"
_GONE_AT_END = "is gone, and this rank waited for it at its end"


class Listener:
    """Where rank 0 awaits the others."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self.port = int(self._listener.getsockname()[1])
        self.secret = os.urandom(32)

    def accept_clients(self, size: int, seconds: float) -> dict[int, Line]:
        """Return the connection to each other rank that comes and knows the secret."""
        clients: dict[int, Line] = {}
        deadline = time.monotonic() + seconds
        with self._listener:
            while len(clients) < size - 1 and (left := deadline - time.monotonic()) > 0:
                ready = multiprocessing.connection.wait([self._listener], left)
                come = welcome(self._listener.accept()[0], self.secret) if ready else None
                if come is not None and 0 < come[0] < size:
                    clients.update([come])
        return clients


def connect(rank: int, addresses: Sequence[str], port: int, secret: bytes) -> Line | None:
    """Return a connection to rank 0; None if it cannot be reached."""
    for address in addresses:
        with contextlib.suppress(OSError):
            return reach((address, port), secret, rank)
    return None


class Watched(NamedTuple):
    """The ranks of a job, as one of them sees them."""

    rank: int
    hosts: Sequence[str]  # of all ranks
    lines: Mapping[int, Line]  # to rank 0, or to all others
    timeout: float
    ends_at_loss: bool = False  # whether nobody else ends a job that has lost a rank
    waits_at_end: bool = False  # whether a rank at its end waits for the others


class _Watcher:
    """What every rank does: it reports, and tells of its end and of what fails."""

    def __init__(self, job: Watched) -> None:
        self._job, self._lines = job, dict(job.lines)
        for line in job.lines.values():
            line.probe()
        self._awake_since = self._looked = time.monotonic()
        self._statuses = [
            RankStatus(f"rank {rank}", host, started=True, moved=time.monotonic())
            for rank, host in enumerate(job.hosts)
        ]
        self._status = self._statuses[job.rank]
        self._lock = threading.Lock()
        self._failure: Failure | None = None  # of this rank
        self._first = ""  # who failed first, once that is known
        self._is_known = threading.Event()
        self._process = os.getpid()
        os.register_at_fork(after_in_child=self._close)
        self._left = math.inf  # when the script of this rank was over
        atexit.register(self._say_over)
        progress.report_to(self._report, job.timeout)
        failures.tell_by(self.fail)
        threading.Thread(target=self._run, name="dtk-watch", daemon=True).start()

    def _run(self) -> None:
        raise NotImplementedError

    def _report(self, report: RankReport) -> None:
        self._status.take(report, time.monotonic())

    def fail(self, failure: Failure) -> str:
        """Tell of what ends this rank; return who failed first, where that is known in time."""
        self._failed_at, self._failure = time.monotonic(), failure
        self._is_known.wait(_LATE + _PERIOD)
        return self._first

    def _say_over(self) -> None:
        self._left = time.monotonic()
        self._tell({"over": True})

    def _tell(self, message: Mapping[str, object]) -> None:
        if os.getpid() != self._process:  # a child by os.fork, which has the same connections
            return
        with self._lock:
            for line in list(self._lines.values()):
                with contextlib.suppress(OSError):
                    line.offer({**message, "sent": time.monotonic()})

    def _close(self) -> None:
        """Close a forked child's copies, which would keep connections open when this rank ends."""
        for line in self._lines.values():
            line.end.close()

    def _is_cut_off(self, line: Line) -> bool:
        """Return whether the network has been silent, and it is not this process that was."""
        now = time.monotonic()
        if now - self._looked > _PAUSE:
            self._awake_since = now
        self._looked = now
        is_awake = now - self._awake_since > _CUT_OFF
        return self._job.ends_at_loss and is_awake and line.silence() > _CUT_OFF

    def _say_first_is(self, rank: int, how: str) -> None:
        """Say who failed first, as the last thing that is said."""
        self._first = f"rank {rank}, host {self._statuses[rank].host}, {how}"
        stall.say_last(f"dtk: {self._first}\n")


class Table(_Watcher):
    """What rank 0 knows of all ranks; a thread of it ends a job that is stuck."""

    def __init__(self, job: Watched) -> None:
        self._lost_since = self._failed_since = math.inf
        self._over: set[int] = set()  # ranks whose scripts are over
        self._lags = dict.fromkeys(job.lines, math.inf)
        self._failures: dict[int, Failure] = {}
        super().__init__(job)

    def _run(self) -> None:
        timeout = self._job.timeout
        said_at, period, said_short = 0.0, min(_PERIOD, timeout / 10), False
        while True:
            self._hear(max(0.0, min(period, self._known_at() - time.monotonic())))
            if self._failure is not None:
                self._note(0, self._failure, self._failed_at)
            now = time.monotonic()
            if now - said_at > min(_HERE, timeout / 10):
                said_at = now
                self._tell({"here": True})
            if now >= self._known_at():
                self._say_first()
            is_lost = now - self._lost_since > _SETTLE and self._failure is None
            waits = any(_waits_since(self._lost_since, one) for one in self._statuses)
            ends = now - max(self._left, self._lost_since) > _LATE and self._job.waits_at_end
            if is_lost and (waits or ends):
                self._say_first()
                self._tell({"lost": True})
                os._exit(TRY_AGAIN)
            if not said_short and (short := stall.find_short(self._statuses)):
                said_short = True  # a rank is about to end of it
                with contextlib.suppress(OSError):
                    os.write(2, stall.describe_cause(short, self._statuses).encode())
            is_settling = 0 <= now - self._lost_since < 2 * _LATE
            watches = timeout < math.inf and not is_settling
            if watches and (stuck := stall.find(self._statuses, now, timeout)):
                stall.say_last(stall.describe(stuck, self._statuses))
                self._tell({"stuck": True})
                _leave()

    def _hear(self, seconds: float) -> None:
        """Read what has come, all of it, before anyone is taken for silent."""
        # Unlike select(2), of any number of connections.
        ready = multiprocessing.connection.wait([one.end for one in self._lines.values()], seconds)
        for rank, line in [one for one in self._lines.items() if one[1].end in ready]:
            try:
                for message in line.receive():
                    self._take(rank, message, time.monotonic())
            except (OSError, ValueError, KeyError, TypeError):
                self._lose(rank)
        for rank, line in list(self._lines.items()):
            if self._is_cut_off(line):
                self._lose(rank)

    def _lose(self, rank: int) -> None:
        """Note that the connection to a rank has ended."""
        self._lines.pop(rank).end.close()
        self._statuses[rank].left = True
        if self._job.ends_at_loss and rank not in self._over:
            self._lost_since = min(self._lost_since, time.monotonic())

    def _take(self, rank: int, message: Mapping[str, object], now: float) -> None:
        self._lags[rank] = lag = min(self._lags[rank], now - float(str(message["sent"])))
        if "over" in message:
            self._over.add(rank)
        elif "failure" in message:
            self._note(rank, failures.read(message, lag), now)
        else:
            self._statuses[rank].take(record_of(RankReport, message), now)

    # --- who failed first ---

    def _note(self, rank: int, failure: Failure, since: float) -> None:
        self._failures.setdefault(rank, failure)
        self._failed_since = min(self._failed_since, since)

    def _gone(self) -> list[int]:
        """Return the ranks that have left, and told of no exception; last those at their end."""
        ranks = enumerate(self._statuses)
        gone = [rank for rank, one in ranks if one.left and rank not in self._failures]
        return sorted(gone, key=lambda rank: rank in self._over)

    def _known_at(self) -> float:
        """Return when it is known who failed first; never, before anyone has, and after that."""
        if self._first:
            return math.inf
        is_known = not all(one.lost_peer for one in self._failures.values()) or bool(self._gone())
        return self._failed_since + (_SETTLE if is_known else _LATE)

    def _say_first(self) -> None:
        """Say once who failed first, or is gone."""
        if self._first:
            return
        gone, known = self._gone(), self._failures
        if gone and all(one.lost_peer for one in known.values()):
            self._say_first_is(gone[0], _GONE)
        else:
            rank = failures.first(known)
            failure = known[rank]
            self._say_first_is(rank, f"failed first{failure.place}: {failure.text}")
        self._tell({"first": self._first})
        self._is_known.set()


class Client(_Watcher):
    """What another rank than 0 sees: reports where it is, and ends when it is told to."""

    def _report(self, report: RankReport) -> None:
        super()._report(report)
        self._tell(vars(report))

    def fail(self, failure: Failure) -> str:
        """Tell rank 0 what ends this rank; return who failed first, or that rank 0 is gone."""
        self._tell({"failure": True, **vars(failure)})
        if not super().fail(failure) and self._is_known.is_set() and failure.lost_peer:
            self._say_first_is(0, _GONE)
        return self._first

    def _run(self) -> None:
        """Await rank 0's word, or its silence; rank 1 speaks first of it."""
        rank, timeout, line = self._job.rank, self._job.timeout, self._lines[0]
        patience = timeout + min(5.0, timeout / 4) + _IN_TURN * (rank - 1)
        heard, is_over = time.monotonic(), False  # whether rank 0's script is over
        while True:
            if multiprocessing.connection.wait([line.end], min(_PERIOD, timeout / 10)):
                try:
                    messages = line.receive()
                except (OSError, ValueError):
                    break
                heard = time.monotonic()
                for message in messages:
                    if "stuck" in message:
                        os._exit(STUCK)
                    if "lost" in message and self._failure is None:
                        os._exit(TRY_AGAIN)
                    is_over = is_over or "over" in message
                    if "first" in message:
                        self._first = str(message["first"])
                        self._is_known.set()
            if self._is_cut_off(line):
                break
            if time.monotonic() - heard > patience:
                self._end(f"reported nothing for {timeout:g} s, last")
        self._is_known.set()
        gone = time.monotonic()
        while self._job.ends_at_loss and not is_over and self._failure is None:
            # At its end MPI may wait for rank 0, and for ever.
            ends = time.monotonic() - max(gone, self._left) > _LATE and self._job.waits_at_end
            if ends or _waits_since(gone, self._status):
                if self._first:
                    stall.say_last(f"dtk: {self._first}\n")
                else:
                    self._say_first_is(0, _GONE_AT_END if ends else _GONE)
                os._exit(TRY_AGAIN)
            time.sleep(_PERIOD / 10)
        # Rank 0 is gone: that matters once this rank has been inside for the timeout, idle.
        own = self._status
        while not (
            own.last is not None
            and own.last.inside
            and max(own.moved, own.busy) < time.monotonic() - timeout
        ):
            time.sleep(_PERIOD)
        self._end("has left its script, last")

    def _end(self, why: str) -> NoReturn:
        stall.say_last(stall.describe(Stall((0,), why, (self._job.rank,)), self._statuses))
        _leave()


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
