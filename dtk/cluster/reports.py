"""What a rank says of itself, and reading it from what JSON held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict


class Report(TypedDict):
    """What a rank says of itself.

    Attributes:
        count: How often it has gone inside.
        inside: Whether it is.
        alone: Whether it is where others are inside, and does what needs none of them.
        joining: Whether it waits for the others to start, and may be unable to report.
        loops: How often it has come to the end of its data.
        refused: Whether it has taken part in a collective in which others have not.
        feeds: Whether TensorFlow waits for Python of this rank's, as for a generator.
        what: Where it is, or was last.
        still: Seconds since that changed.
        cpu: Seconds that its process has used, without threads that poll.
        io: Bytes that it has read from storage and written there.
        stack: Its main thread's, where it has been at one place for long, and that of the thread it
            waits for; "" else, and of a task that serves, which runs nothing of the script's.
        held: Of a chief: for how many seconds each worker has had its work, by the worker's number.
    """

    count: int
    inside: bool
    alone: bool
    joining: bool
    loops: int
    refused: bool
    feeds: bool
    what: str
    still: float
    cpu: float
    io: int
    stack: str
    held: dict[str, float]


def report_of(message: Mapping[str, object]) -> Report:
    """Return a message as a report, of the types that it must have.

    Args:
        message: What JSON held.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: It is none.
    """
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
