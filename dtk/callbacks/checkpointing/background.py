"""Writing on a thread of its own, one piece of work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dtk.cluster import progress

# Seconds after which it is said that training waits for the disk.
_LONG = 10.0


class Background:
    """Does work on a thread, while training goes on; the next work waits for it."""

    def __init__(self, say: Callable[[str], None], long: float = _LONG):
        self._say = say
        self._long = long
        self._thread: threading.Thread | None = None
        self._what = ""
        self.failure: Exception | None = None

    def start(self, what: str, work: Callable[[], object]) -> None:
        """Begin a piece of work; `finish` has been called since the last."""

        def run() -> None:
            try:
                work()
            except Exception as failure:
                self.failure = failure

        self._what = what
        # Not a daemon: a script that ends by itself leaves nothing half written.
        self._thread = threading.Thread(target=run, name="dtk-checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the work that is under way."""
        failure = self.left()
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raise what `finish` would, if the work has failed already; wait for nothing."""
        if self.failure is not None:
            self.finish()

    def left(self) -> Exception | None:
        """Wait for the work that is under way, and return what it has raised."""
        if self._thread is not None:
            with progress.awaiting(self._thread):
                self._thread.join(self._long)
                if self._thread.is_alive():
                    self._say(f"waiting for {self._what}, which takes more than {self._long:g} s")
                    self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        return failure
