"""What a rank says of itself, and reading it from what JSON held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class RankReport(TypedDict):
    """What a rank says of itself."""

    count: int  # how often it has gone inside
    inside: bool
    alone: bool  # whether it is where others are inside, and does what needs none of them
    joining: bool  # whether it waits for the others to start, and may be unable to report
    loops: int  # how often it has come to the end of its data
    refused: bool  # whether it has taken part in a collective in which others have not
    feeds: bool  # whether TensorFlow waits for Python of this rank's, as for a generator
    what: str  # where it is, or was last
    still: float  # seconds since that changed
    cpu: float  # seconds that its process has used, without threads that poll
    io: int  # bytes that it has read from storage and written there
    # its main thread's, where it has been at one place for long, and that of the thread it waits
    # for; "" else, and of a task that serves, which runs nothing of the script's
    stack: str
    # of a chief: for how many seconds each worker has had its work, by the worker's number
    held: dict[str, float]


def report_of(message: Mapping[str, object]) -> RankReport:
    """Return a message as a report, of the types that it must have."""
    held = message["held"]
    return {
        "count": int(str(message["count"])),
        "inside": bool(message["inside"]),
        "alone": bool(message["alone"]),
        "joining": bool(message["joining"]),
        "loops": int(str(message["loops"])),
        "refused": bool(message["refused"]),
        "feeds": bool(message["feeds"]),
        "what": str(message["what"]),
        "still": float(str(message["still"])),
        "cpu": float(str(message["cpu"])),
        "io": int(str(message["io"])),
        "stack": str(message["stack"]),
        "held": {str(int(worker)): float(age) for worker, age in held.items()},  # type: ignore[attr-defined]
    }
