"""Pool of the workers of a parameter-server job, as threads on the chief that ask for work.

Each worker has a TensorFlow thread on the chief, which takes the next piece of work, computes it
remotely, and hands in the result. The script's main thread waits here and does all the rest, such
as applying gradients.

    main thread    offer ------------------ wait: results ------ apply ------ ...
    worker 0           \\-- take, compute, hand in --/
    worker 1            \\-- take, compute ... lost: another takes it
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import tensorflow as tf

from dtk.cluster import progress
from dtk.communicators import startup
from dtk.compat import tf_servers
from dtk.errors import ClusterError, as_passing

# Seconds between two checks of a waiting main thread that a worker and all servers are there.
_LOOK_SECONDS = 5.0
# Seconds after which a worker tries again that could not reach a living server.
_RETRY_SECONDS = 1.0


T = TypeVar("T")


class Piece(NamedTuple):
    """Piece of work that a worker has taken."""

    compute: Callable[[], Callable[[], None]]  # computes, and returns a function that hands in
    lost: Callable[[], None]  # gives the piece back


# Takes a piece for a worker, under the pool's lock; None if there is none yet.
Take: TypeAlias = Callable[[int], Piece | None]


class WorkerPool:
    """Workers that compute pieces of work, as threads on the chief."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        workers: Sequence[str],
        servers: Sequence[str],
        patience: float,
    ):
        self._strategy = strategy
        self._workers, self._servers, self._patience = workers, servers, patience
        self._changed = threading.Condition()
        self._entries: list[Take] = []  # the innermost last
        self._error: BaseException | None = None
        self._session = 0
        self.lost_workers: set[int] = set()
        # When each worker took its piece.
        self._held: dict[int, float] = {}
        progress.tell_held(self._held.copy)

    @contextlib.contextmanager
    def working(self, take: Take) -> Iterator[None]:
        """Let workers compute what `take` hands out in the block; the innermost block counts."""
        with self._changed:
            is_first = not self._entries
            self._entries.append(take)
            if is_first:
                self._error = None
                self._session += 1
            session = self._session
            self._changed.notify_all()
        try:
            if is_first:
                tf_servers.employ(self._strategy, lambda: self._serve(session), len(self._workers))
            yield
        finally:
            with self._changed:
                # An entry may end after an outer one: an exception can leave those inside `fit`.
                self._entries = [other for other in self._entries if other is not take]
                if not self._entries:
                    self._session += 1
                self._changed.notify_all()

    def offer(self, change: Callable[[], object]) -> None:
        """Change the work, for example add to it, and let workers look again."""
        with self._changed:
            change()
            self._changed.notify_all()

    def wait(self, until: Callable[[], T | None]) -> T:
        """Wait until a condition is true."""
        last_seen = time.monotonic()
        with progress.inside("work of the workers"), self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if result := until():
                    return result
                if not self._changed.wait(_LOOK_SECONDS):
                    last_seen = self._check_alive(last_seen)

    @contextlib.contextmanager
    def asking_servers(self) -> Iterator[None]:
        """If the block fails since a parameter server is lost, raise an error that says so."""
        try:
            yield
        except tf.errors.OpError:
            if gone := self._lost_server():
                raise gone from None
            raise

    def _check_alive(self, last_seen: float) -> float:
        """Return when a worker last answered; raise if too long ago, or if a server is gone."""
        if gone := self._lost_server():
            raise gone
        now = time.monotonic()
        if any(startup.answers(address) for address in self._workers):
            return now
        if now - last_seen > self._patience:
            message = (
                f"none of the {len(self._workers)} workers has been there for "
                f"{now - last_seen:.0f} s ({', '.join(self._workers)}); start them again, or start "
                "the job anew with dtk.callbacks.Checkpoint(..., resume=True)"
            )
            raise as_passing(ClusterError(message))
        return last_seen

    def _lost_server(self) -> ClusterError | None:
        for index, address in enumerate(self._servers):
            # A lost packet takes a second to notice.
            if not any(startup.answers(address, timeout) for timeout in (1.0, 2.0, 4.0)):
                message = (
                    f"parameter server {index} ({address}) is gone, and with it a part of the "
                    "weights; start the job again, with dtk.callbacks.Checkpoint(directory, "
                    "resume=True) it continues where it last saved"
                )
                return as_passing(ClusterError(message))
        return None

    def _serve(self, session: int) -> None:
        """Run a worker's thread until the session is over."""
        worker = tf_servers.current_worker()
        while (taken := self._next(worker, session)) is not None:
            self._held[worker] = time.monotonic()
            try:
                hand_in = taken.compute()
            except Exception as error:
                with self._changed:
                    taken.lost()
                    self._changed.notify_all()
                if not self._survives(error, worker, session):
                    return
                if tf_servers.worker_is_lost(error):
                    raise  # TensorFlow waits until it is back
                time.sleep(_RETRY_SECONDS)
                continue
            finally:
                self._held.pop(worker, None)
            with self._changed:
                self.lost_workers.discard(worker)
                hand_in()
                self._changed.notify_all()

    def _next(self, worker: int, session: int) -> Piece | None:
        """Wait for a worker's next piece; None when its session is over."""
        with self._changed:
            while self._session == session and self._error is None:
                taken = self._entries[-1](worker)
                # Taking may have finished slices without rows.
                self._changed.notify_all() if taken is not None else self._changed.wait()
                if taken is not None:
                    return taken
            return None

    def _survives(self, error: Exception, worker: int, session: int) -> bool:
        """Return whether the other workers go on; if not, give the error to the main thread."""
        fatal: BaseException | None = error
        # A server that fails may have lost its connection only.
        passing = isinstance(error, tf.errors.UnavailableError | tf.errors.AbortedError)
        if passing or tf_servers.worker_is_lost(error):
            fatal = self._lost_server()
            if fatal is not None:
                fatal.__cause__ = error
        with self._changed:
            if fatal is not None:
                if self._error is None and self._session == session:
                    self._error = fatal
            elif worker not in self.lost_workers:
                self.lost_workers.add(worker)
                print(
                    f"dtk: worker {worker} ({self._workers[worker]}) is lost; another takes its "
                    "step, and it takes part again when it is back",
                    file=sys.stderr,
                    flush=True,
                )
            self._changed.notify_all()
        return fatal is None
