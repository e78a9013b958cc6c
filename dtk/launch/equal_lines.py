"""Lines that several processes write equally, as warnings are: each is shown once."""

from __future__ import annotations

import bisect
import collections
import threading

_HOLD = 0.5  # seconds that a line waits for those of others
_EQUAL = 10.0  # seconds in which an equal line of another process is the same event
_MOST = 10_000  # lines that are held, and as many that are known afterwards


class EqualLines:
    """Holds lines for a moment, to show those that several processes write equally once.

    A line is shown as often as the process wrote it that wrote it most often. Those that come too
    late to be named with it are only counted.
    """

    def __init__(self) -> None:
        self.late = 0
        self._held: collections.deque[_Line] = collections.deque()
        self._shown: collections.deque[_Line] = collections.deque()
        self._equal: dict[str, list[_Line]] = {}
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether so many lines are held that the first must be shown."""
        return len(self._held) > _MOST

    def add(self, writer: int, text: str, now: float) -> None:
        with self._lock:
            equal = self._equal.setdefault(text, [])
            # Those that it wrote, too, come first.
            at = bisect.bisect(equal, False, key=lambda one: writer not in one.writers)
            if at == len(equal):
                equal.append(_Line(text, now))
                self._held.append(equal[at])
            line = equal[at]
            self.late += line.is_shown
            line.writers.append(writer)

    def due(self, now: float | None = None) -> list[tuple[str, list[int]]]:
        """Return the lines that were held for long enough, or are too many, and who wrote them."""
        found = []
        with self._lock:
            while self._held and (now is None or self.is_full or now - self._held[0].when >= _HOLD):
                line = self._held.popleft()
                line.is_shown = True
                self._shown.append(line)
                found.append((line.text, line.writers))
            while self._shown and (
                len(self._shown) > _MOST
                or (now is not None and now - self._shown[0].when >= _EQUAL)
            ):
                line = self._shown.popleft()
                self._equal[line.text].remove(line)
                if not self._equal[line.text]:
                    del self._equal[line.text]
        return found


class _Line:
    def __init__(self, text: str, when: float) -> None:
        self.text, self.when = text, when
        self.writers: list[int] = []
        self.is_shown = False
