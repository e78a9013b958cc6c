"""One thread that reads many descriptors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Reader:
    """Calls back for each descriptor as soon as there is something to read.

    Args:
        name: Of its thread.
        on_error: Is told what a callback has raised; its descriptor is read no more.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def add(self, descriptor: int, read: Callable[[], bool]) -> threading.Event:
        """Have `read` called whenever something has come, until it returns False.

        Returns:
            What is set then.
        """
        over = threading.Event()

        def hear() -> None:
            if not self._told(read):
                self._loop.remove_reader(descriptor)
                over.set()

        self._loop.call_soon_threadsafe(self._loop.add_reader, descriptor, hear)
        return over

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something once, so many seconds from now."""
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._told, call)

    def close(self) -> None:
        """Read no more."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _told(self, call: Callable[[], object]) -> bool:
        try:
            return bool(call())
        except Exception as error:  # whatever it is, nobody reads any more
            self._on_error(error)
            return False
