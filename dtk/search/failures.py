"""Exceptions that end a trial on one rank, carried to all others."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence

import optuna

from dtk.communicators import objects
from dtk.errors import CommunicatorError, DtkError, at_rank


class RankError(DtkError):
    """An exception of another rank whose own class cannot be sent to this one."""


class CaughtRankError(RankError):
    """The same, of a class that is named in `catch`."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception of one rank, as it is sent."""

    rank: int  # where it was raised
    kind: str  # name of its class
    text: str  # its traceback
    # the exception, as `dtk.communicators.objects` writes it; None where it cannot
    sent: bytes | None
    pruned: bool = False  # whether it is Optuna's `TrialPruned`
    caught: bool = False  # whether the study goes on after it

    @classmethod
    def of(cls, error: Exception, rank: int, catch: tuple[type[Exception], ...] = ()) -> Failure:
        """Describe an exception of this rank."""
        return cls(
            rank,
            type(error).__qualname__,
            "".join(traceback.format_exception(error)),
            _written(error),
            isinstance(error, optuna.TrialPruned),
            isinstance(error, catch),
        )

    @property
    def last_line(self) -> str:
        """The exception without its traceback, such as "ValueError: no such width"."""
        lines = [line for line in self.text.splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else self.kind

    def error(self) -> Exception:
        """Make the exception again, on another rank."""
        made = _read(self.sent)
        if made is None:
            made = self._told()
        made.add_note(f"Raised on rank {self.rank}, and here because of it. There:\n{self.text}")
        return made

    def _told(self) -> Exception:
        """Make an exception that says the same, of the class that the study takes it for."""
        if self.pruned:
            return optuna.TrialPruned(at_rank(self.rank, self.last_line))
        kind = CaughtRankError if self.caught else RankError
        return kind(at_rank(self.rank, self.last_line))


def root_of(failures: Sequence[Failure]) -> Failure:
    """Choose the exception that a trial ends with, of those of several ranks."""
    return min(failures, key=lambda failure: (failure.pruned, failure.rank))


def agreed_error(failures: Sequence[Failure], mine: Exception | None) -> Exception:
    """Return the exception to raise on this rank for those of all ranks."""
    root = root_of(failures)
    same = mine is not None and type(mine).__qualname__ == root.kind
    error = mine if mine is not None and same else root.error()
    for failure in failures:
        if failure.kind != root.kind:
            error.add_note(f"Rank {failure.rank} failed, too: {failure.last_line}")
    return error


def _written(error: Exception) -> bytes | None:
    try:
        sent = objects.dumps(error)
    except Exception:  # whatever its attributes and its class raise
        return None
    return sent if type(_read(sent)) is type(error) else None


def _read(sent: bytes | None) -> Exception | None:
    """None for what is no exception here, such as a class whose constructor takes other things."""
    try:
        made = None if sent is None else objects.loads(sent)
    except CommunicatorError:
        return None
    return made if isinstance(made, Exception) else None
