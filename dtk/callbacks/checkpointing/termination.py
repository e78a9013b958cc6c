"""SIGTERM, or a request of the launcher's, that all ranks follow together, at the same step."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING

from dtk.cluster import progress, stop_requests
from dtk.cluster.variables import SAVE_GRACE
from dtk.errors import at_rank

if TYPE_CHECKING:
    from dtk.communicators.base import Communicator

# Agreeing costs a collective of a millisecond or so: often enough to leave in time, and seldom
# enough not to be felt.
_SECONDS_BETWEEN = 1.0

EXIT_CODE = 128 + signal.SIGTERM


def _forget(of_parent: weakref.ref[Termination]) -> None:
    termination = of_parent()
    if termination is not None:
        termination.give_back()


class Termination:
    """Catches SIGTERM, and lets ranks agree to act on it.

    Schedulers send SIGTERM to one process or to all, at slightly different times. Ranks therefore
    ask each other at steps they have agreed on, about once a second, by rank 0's clock. Steps of
    training and of validation count alike; between the two the pace is found anew.

    A rank that waits in a collective for one that has died would not notice: Python's handlers run
    between Python instructions only. A thread, woken by the signal itself, ends the process when
    the ranks have not agreed in time.

    In another thread than the main one no signal is caught: see `dtk.cluster.stop_requests`.
    """

    def __init__(self, communicator: Communicator, patience: float | None = None):
        self._communicator = communicator
        self._patience = progress.save_grace() if patience is None else patience
        self._caught = False
        self._before: signal._HANDLER = None
        self._pipe: tuple[int, int] | None = None
        self._woken_before = -1
        self._is_subscribed = False
        self._agreed = threading.Event()
        self._steps = 0
        self.find_pace()

    def install(self) -> bool:
        """Act on requests from now on, or return False; a second one ends the process as before.

        Under `dtk run` it does not: schedulers send the signal to launcher and ranks alike, and the
        launcher knows when to end them.
        """
        if threading.current_thread() is not threading.main_thread():
            self._is_subscribed = stop_requests.subscribe(self._ask)
            if self._is_subscribed:
                progress.tell_saving("waits")
            return self._is_subscribed
        self._before = signal.signal(signal.SIGTERM, self._catch)
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._woken_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True).start()
        # A process forked from this one, such as a worker of a pool, is to end as it would.
        os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))
        progress.tell_saving("ready")
        return True

    def remove(self) -> None:
        """Restore the handler of SIGTERM that was there before, and give it what came too late."""
        # An exception that leaves `fit` ends the process as well, and says why.
        unheard = self._caught and not self._agreed.is_set() and sys.exc_info()[0] is None
        self._restore()
        if unheard:
            os.kill(os.getpid(), signal.SIGTERM)

    def _restore(self) -> None:
        self._agreed.set()
        if self._pipe is not None:
            progress.tell_saving("over")
            self.give_back()
        elif self._is_subscribed:
            self._is_subscribed = False
            stop_requests.unsubscribe()
            progress.tell_saving("over")

    def give_back(self) -> None:
        """Let this process alone end by SIGTERM as before; one that is forked calls it."""
        if self._pipe is None:
            return
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            signal.set_wakeup_fd(self._woken_before)
        os.close(self._pipe[1])  # ends the thread
        self._pipe = None

    def _watch(self, signals: int) -> None:
        with os.fdopen(signals, "rb", buffering=0) as stream:
            while number := stream.read(1):
                if number[0] == signal.SIGTERM:
                    self._await_agreement()

    def _ask(self) -> None:
        """Act on a request that comes by no signal; at once, and a thread looks to the patience."""
        self._caught = True
        threading.Thread(target=self._await_agreement, daemon=True).start()

    def _await_agreement(self) -> None:
        if not self._agreed.wait(self._patience):
            self._give_up()

    def _give_up(self) -> None:
        text = (
            f"no step ended within {self._patience:g} s of SIGTERM, so nothing was saved; set "
            f"{SAVE_GRACE}, or give `dtk run --save-grace`, more seconds"
        )
        try:
            os.write(2, (at_rank(self._communicator.rank, text) + "\n").encode())
        finally:
            os._exit(EXIT_CODE)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._caught and not progress.is_launcher_told_of_saving():
            self._restore()
            os.kill(os.getpid(), signal.SIGTERM)
        self._caught = True

    def wanted_after_step(self) -> bool:
        """Return whether any rank was asked to end, alike on all ranks; call it once per step."""
        if self._communicator.size == 1:
            return self._caught and self.wanted()
        self._steps += 1
        return self._steps >= self._next and self.wanted()

    def find_pace(self) -> None:
        """Ask again at the next step, since the following steps may take a thousand times as long.

        Every rank calls it at the same steps, as where validation begins and ends.
        """
        self._interval, self._next = 0, self._steps + 1
        self._asked = (self._steps, time.monotonic())

    def wanted(self) -> bool:
        """Ask all ranks now whether any was asked to end; see `wanted_after_step`."""
        steps, since = self._asked
        now = time.monotonic()
        pace = (now - since) / max(1, self._steps - steps)
        answers = self._communicator.allgather_object((self._caught, pace))
        self._asked = (self._steps, now)
        # At most doubled: the first steps tell little about how long the others take.
        wished = max(1, round(_SECONDS_BETWEEN / max(answers[0][1], 1e-6)))
        self._interval = min(max(1, 2 * self._interval), wished)
        self._next = self._steps + self._interval
        if any(caught for caught, _ in answers):
            self._agreed.set()
            progress.tell_saving("begun")
            return True
        return False
