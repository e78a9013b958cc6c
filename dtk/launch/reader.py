"""One thread that reads many descriptors."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import selectors
import threading
import time
from collections.abc import Callable


class Reader:
    """Calls back for each descriptor as soon as there is something to read.

    Args:
        name: Of its thread.
        on_error: Is told what a callback has raised; its descriptor is read no more.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._new = collections.deque[tuple[int, Callable[[], bool], threading.Event]]()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, descriptor: int, read: Callable[[], bool]) -> threading.Event:
        """Have `read` called whenever something has come, until it returns False.

        Returns:
            What is set then.
        """
        over = threading.Event()
        self._new.append((descriptor, read, over))
        os.eventfd_write(self._woken, 1)
        return over

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something once, so many seconds from now."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._number), call))
        os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Read no more."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._woken, 1)
        self._thread.join()
        os.close(self._woken)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._woken, selectors.EVENT_READ)
            while not self._is_closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                for key, _ in ready.select(None if wait is None else max(0.0, wait)):
                    if key.fd == self._woken:
                        os.eventfd_read(self._woken)
                    else:
                        read, over = key.data
                        if not self._told(read):
                            ready.unregister(key.fd)
                            over.set()
                while self._due and self._due[0][0] <= time.monotonic():
                    self._told(heapq.heappop(self._due)[2])
                while self._new:
                    descriptor, read, over = self._new.popleft()
                    ready.register(descriptor, selectors.EVENT_READ, (read, over))

    def _told(self, call: Callable[[], object]) -> bool:
        try:
            return bool(call())
        except Exception as error:  # whatever it is, nobody reads any more
            self._on_error(error)
            return False
