"""The exception that has ended a rank, as other processes know it, and which of several came first.

Under `dtk run` the rank's bootstrap tells the launcher of it by `report_channel`; elsewhere the
strategy does, by the connection to rank 0 of `heartbeats`, and waits a moment for what rank 0 says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from dtk.cluster.messages import record_of
from dtk.errors import failure_record


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that has ended a rank; `dtk.errors.failure_record` makes it there."""

    time: float  # seconds of `time.monotonic()`, of whoever has the record
    error: str
    message: str
    file: str  # of the script
    line: int
    lost_peer: bool  # whether it says that another rank is gone

    @property
    def place(self) -> str:
        """Where in the script, for a sentence: " at train.py:12"; "" where that is not known."""
        return f" at {self.file}:{self.line}" if self.file else ""

    @property
    def text(self) -> str:
        """Its type and message."""
        return f"{self.error}: {self.message}" if self.message else self.error


def read(record: Mapping[str, object], lag: float = 0.0) -> Failure:
    """Return a record of a rank whose clock is so many seconds behind; fails of a wrong one."""
    failure = record_of(Failure, record)
    return dataclasses.replace(failure, time=failure.time + lag)


def first(failures: Mapping[int, Failure]) -> int:
    """Return the rank that failed first: those that have lost a peer come last."""
    return min(failures, key=lambda rank: (failures[rank].lost_peer, failures[rank].time))


# In a rank that no launcher of dtk's watches.

_tell: Callable[[Failure], str] | None = None


def tell_by(tell: Callable[[Failure], str]) -> None:
    """Note what tells the other ranks of a failure, and returns who failed first, if it learns."""
    global _tell
    _tell = tell


def of(error: BaseException) -> Failure:
    """Return the record of an exception that ends this rank now."""
    return read(failure_record(error))


def tell(failure: Failure) -> str:
    """Tell the other ranks, and wait a moment for who failed first; "" where nobody can say."""
    return "" if _tell is None else _tell(failure)
