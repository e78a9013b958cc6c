"""MPI requests: TensorFlow's threads post them, and a progress thread completes them.

A step's graph holds a host function for each collective. It posts the collective and returns at
once, so that no TensorFlow thread waits for another rank: there are only as many threads as cores,
and ranks that wait for different collectives would wait for ever.

    host function  -- posts -->  MPI  -- within 0.3 ms -->  returns the result
                                   \\-- later -->  progress thread  -- enqueues -->  graph dequeues

TensorFlow's queues wake the graph without a waiting thread. MPI moves bytes only while one of its
functions runs, so the progress thread keeps testing while any request is under way.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from mpi4py import MPI

from dtk.cluster import failures, progress
from dtk.cluster.mpi_join import is_joined
from dtk.errors import OTHER_IS_GONE, CommunicatorError, as_passing, at_rank, exit_code
from dtk.nests import Array

# For at most this many bytes a host function itself waits, at most this long: the thread and the
# queue take 0.2 ms more. Waiting ten times as long slowed small steps by a fifth, and synchronized
# norms too.
SOON_SECONDS = 3e-4
SOON_BYTES = 1 << 16
# After so many tests that find nothing done, the thread sleeps this long, in seconds, between two
# tests: a rank often has one core, and computing needs it.
_EAGER_TESTS = 50
_PAUSE = 2e-5
# Seconds between two checks whether a rank that others wait for has left, and seconds to go on
# after it left: its last messages may still be on their way.
_LOOK = 0.25
_AFTER_LEAVING = 2.0
_LEFT_TAG = 1
_AT_END = 1e-3  # seconds between two looks whether the others have left, too
# What MPI says of a rank that is gone, where it goes on without: see `mpi_join`.
_LOST = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
# Buffers kept of each size, and the least size in bytes, a multiple of a page.
_KEPT = 4
_POOLED = 1 << 16
_ALIGNED = 64


class PendingRequest(NamedTuple):
    """A collective that was posted."""

    request: MPI.Request
    result: Array  # filled by the collective; the caller may use it once that is done
    kept: Sequence[Array]  # MPI reads these until then
    members: frozenset[int]  # world ranks that take part
    what: str  # names the collective in an error
    # returns how many elements came, by MPI's status, if only the sender knows
    came: Callable[[MPI.Status], int] | None = None


class Buffers:
    """Memory for results, used again once TensorFlow has released it.

    New memory of many megabytes costs as much as sending them: the system hands it out in pages.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[Array]] = {}
        self._lock = threading.Lock()

    def take(self, elements: int, dtype: tf.DType) -> Array:
        """Return an uninitialised, aligned array of one dimension."""
        nbytes = elements * dtype.itemsize
        if nbytes < _POOLED:
            return _part(np.empty(nbytes + _ALIGNED, np.uint8), nbytes).view(dtype)
        size = -(-nbytes // _POOLED) * _POOLED + _ALIGNED
        with self._lock:
            known = self._known.setdefault(size, [])
            # Three references are the list, the loop and the argument: no array or tensor uses it.
            free = next((room for room in known if sys.getrefcount(room) <= 3), None)
            if free is None:
                free = np.empty(size, np.uint8)
                if len(known) < _KEPT:
                    known.append(free)
            return _part(free, nbytes).view(dtype)


def _part(room: Array, nbytes: int) -> Array:
    """Return a part, aligned so that TensorFlow takes it without a copy."""
    skipped = -room.ctypes.data % _ALIGNED
    return room[skipped : skipped + nbytes]


class RequestProgress:
    """Completes posted collectives."""

    def __init__(self, world: MPI.Intracomm) -> None:
        self.buffers = Buffers()
        self._world = world
        self._new: collections.deque[tuple[PendingRequest, Callable[[Array], None]]] = (
            collections.deque()
        )
        self._wake = threading.Event()
        self._left: dict[int, float] = {}
        self._goodbye = np.zeros(1, np.uint8)
        self._hearing: MPI.Request | None = None
        self._hear_lock = threading.Lock()
        self._ending = False
        self._stopped = threading.Event()
        with progress.polling_threads():
            threading.Thread(target=self._run, name="dtk-mpi", daemon=True).start()

    def soon(self, job: PendingRequest) -> bool:
        """Return whether a small collective is done within a moment."""
        if job.result.nbytes > SOON_BYTES:
            return False
        until = time.perf_counter() + SOON_SECONDS
        status = MPI.Status()
        with self.explaining(job.what):
            while not job.request.Test(status):
                if time.perf_counter() > until:
                    return False
        self._check_length(job, status)
        return True

    def later(self, job: PendingRequest, deliver: Callable[[Array], None]) -> None:
        """Have the progress thread complete a collective."""
        self._new.append((job, deliver))
        self._wake.set()

    def wait(self, job: PendingRequest) -> Array:
        """Wait for a collective and return its result."""
        idle, look = 0, time.monotonic() + _LOOK
        status = MPI.Status()
        with progress.polling(), self.explaining(job.what):
            while not job.request.Test(status):
                idle = _pause(idle)
                if time.monotonic() > look:
                    look = time.monotonic() + _LOOK
                    self._check([job])
        self._check_length(job, status)
        return job.result

    def _check_length(self, job: PendingRequest, status: MPI.Status) -> None:
        """Raise if fewer elements came than expected: the rest would be uninitialised memory."""
        room = job.result.size
        if job.came is not None and (came := job.came(status)) != room:
            raise self._refused(job.what, f"{came} elements came, {room} were expected")

    @contextlib.contextmanager
    def explaining(self, what: str, statuses: Sequence[MPI.Status] = ()) -> Iterator[None]:
        """Return a context that says why MPI has given up collectives, or a message."""
        try:
            yield
        except MPI.Exception as error:
            codes = [error.Get_error_code()]
            if error.Get_error_class() == MPI.ERR_IN_STATUS:
                codes = [status.Get_error() for status in statuses if status.Get_error()] or codes
            told = MPI.Get_error_string(codes[0])
            if not {MPI.Get_error_class(code) for code in codes} & _LOST:
                raise self._refused(what, told) from error
            message = f"{what}: {OTHER_IS_GONE} it wrote ({told})"
            raise as_passing(CommunicatorError(at_rank(self._world.rank, message))) from error

    def _refused(self, what: str, told: str) -> CommunicatorError:
        """Return an error with MPI's message and its most likely cause."""
        progress.refused()
        return CommunicatorError(
            at_rank(
                self._world.rank,
                f"{what}: {told}; another rank passed another tensor to it, or is in another "
                "collective: all ranks must call the same collectives in the same order, and take "
                "the same number of steps in an epoch",
            )
        )

    def leave(self) -> None:
        """Tell the other ranks that this rank leaves; stop testing."""
        self._ending = True
        self._wake.set()
        self._stopped.wait(_AFTER_LEAVING)
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        with contextlib.suppress(MPI.Exception):  # one is gone
            sent = [self._world.Isend(np.zeros(1, np.uint8), rank, _LEFT_TAG) for rank in others]
            MPI.Request.Waitall(sent)  # such short messages do not wait to be received
        # Where no launcher sees that a rank is gone, MPI's end may wait for it, and no thread of
        # Python's, such as that of `heartbeats`, runs in that.
        is_watched = is_joined() and progress.is_reporting() and not progress.is_launched()
        while is_watched and len(self._left) < len(others):
            with self._hear_lock, contextlib.suppress(CommunicatorError):
                self._hear()
            time.sleep(_AT_END)

    def _run(self) -> None:
        """Test all requests under way until they are done; sleep while there are none."""
        try:
            self._test_until_left()
            self._stopped.set()
            # Never end: Open MPI's shutdown corrupts memory if a thread that called it has ended.
            threading.Event().wait()
        except BaseException as error:
            # A graph cannot be told: it would wait for ever, and so would the other ranks.
            if not isinstance(error, CommunicatorError):
                traceback.print_exc()
            print(f"dtk: {error}", file=sys.stderr, flush=True)
            failures.tell(failures.of(error))
            os._exit(1 if progress.is_launched() else exit_code(error))

    def _test_until_left(self) -> None:
        jobs: list[tuple[PendingRequest, Callable[[Array], None]]] = []
        idle, look = 0, 0.0
        while not self._ending:
            if not jobs and not self._new:
                self._wake.wait()
                look = time.monotonic() + _LOOK
            self._wake.clear()
            while self._new:
                jobs.append(self._new.popleft())
            requests, statuses = [job.request for job, _ in jobs], [MPI.Status() for _ in jobs]
            with self.explaining(" or ".join(job.what for job, _ in jobs), statuses):
                done = MPI.Request.Testsome(requests, statuses) if jobs else []
            for index, status in zip(done or (), statuses, strict=False):
                job, deliver = jobs[index]
                self._check_length(job, status)
                deliver(job.result)
            if done:
                finished = set(done)
                jobs = [pair for index, pair in enumerate(jobs) if index not in finished]
                idle = 0
                continue
            idle = _pause(idle)
            if time.monotonic() > look:
                look = time.monotonic() + _LOOK
                self._check([job for job, _ in jobs])

    def _check(self, jobs: Sequence[PendingRequest]) -> None:
        """Raise if a rank that takes part in one of the requests has left."""
        with self._hear_lock:
            self._hear()
        over = time.monotonic() - _AFTER_LEAVING
        gone = {rank for rank, when in self._left.items() if when < over}
        for job in jobs:
            missing = sorted(gone & job.members)
            if missing:
                names = ", ".join(f"rank {rank}" for rank in missing)
                message = (
                    f"{job.what} waits for {names}, whose script has ended; see what {names} wrote"
                )
                raise CommunicatorError(at_rank(self._world.rank, message))

    def _hear(self) -> None:
        """Note which ranks have said that they leave."""
        with self.explaining("a rank that waits for messages"):
            while True:
                if self._hearing is None:
                    self._hearing = self._world.Irecv(self._goodbye, MPI.ANY_SOURCE, _LEFT_TAG)
                status = MPI.Status()
                if not self._hearing.Test(status):
                    return
                self._left[status.source] = time.monotonic()
                self._hearing = None


def _pause(idle: int) -> int:
    """Let other threads compute, after `idle` tests in a row that found nothing done."""
    time.sleep(0 if idle < _EAGER_TESTS else _PAUSE)
    return idle + 1
