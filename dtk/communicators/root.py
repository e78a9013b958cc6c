"""Run work on one rank for all: the other ranks get its result, or raise its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from dtk.communicators import objects
from dtk.communicators.base import Communicator
from dtk.errors import at_rank

_T = TypeVar("_T")


def on_root(communicator: Communicator, work: Callable[[], _T], root: int = 0) -> _T:
    """Run `work` on `root` only; every rank gets the result, or the error.

    Every rank calls this.

    Example:
        >>> from dtk.communicators import LocalCommunicator
        >>> on_root(LocalCommunicator(), lambda: {"epoch": 3})
        {'epoch': 3}
    """
    if communicator.size == 1 and root == 0:
        return work()
    payload, failure = _outcome(work) if communicator.rank == root else (b"", None)
    outcome = objects.loads(communicator.broadcast_object(payload, root))
    result, error = cast(tuple[_T, Exception | None], outcome)
    if failure is not None:
        raise failure  # root's own, with its traceback
    if error is not None:
        error.add_note(at_rank(communicator.rank, f"this happened on rank {root}"))
        raise error
    return result


def _outcome(work: Callable[[], object]) -> tuple[bytes, Exception | None]:
    """Return the pair (result, error) as bytes for other ranks, and the error itself."""
    try:
        return objects.dumps((work(), None)), None
    except Exception as caught:
        return objects.dumps((None, _sendable(caught))), caught


def _sendable(error: Exception) -> Exception:
    """Return the error, or one with the same message if it cannot be sent."""
    try:
        objects.loads(objects.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
