"""Messages between the ranks of a study: one of every rank at a time.

Whatever a rank does with a trial that concerns the others (it asks for a parameter, it begins or
ends an epoch, its objective has returned or raised) is a message, and all ranks send one before any
goes on. So ranks that run different lines of the objective notice it, and one that has failed tells
the others at the next thing they do, instead of leaving them to wait:

    rank 0   suggest "rate" -> 0.1   fit begins      -> raises, too
    rank 1   suggest "rate" -> 0.1   ValueError

They travel by a communicator of their own, which no collective of `fit` can be mistaken for. What
cannot be told is a failure in the middle of a step, while others wait in a collective of TensorFlow
or Horovod, which nothing ends: then `patience` runs out, and the job is ended.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

import optuna

from dtk.communicators import objects
from dtk.communicators.base import Communicator
from dtk.errors import CommunicatorError, at_rank
from dtk.errors import RankError as RankError


class CaughtRankError(RankError):
    """An exception of another rank, of a class that is named in `catch`."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An exception that ends a trial on one rank, as it is sent to the others."""

    rank: int  # where it was raised
    kind: str  # name of its class
    text: str  # its traceback
    # the exception, as `dtk.communicators.objects` writes it; None where it cannot
    sent: bytes | None
    pruned: bool = False  # whether it is Optuna's `TrialPruned`
    caught: bool = False  # whether the study goes on after it

    @classmethod
    def of(cls, error: Exception, rank: int, catch: tuple[type[Exception], ...] = ()) -> Failure:
        try:
            sent = objects.dumps(error)
        except Exception:  # whatever its attributes and its class raise
            sent = None
        return cls(
            rank,
            type(error).__qualname__,
            "".join(traceback.format_exception(error)),
            sent if type(_read(sent)) is type(error) else None,
            isinstance(error, optuna.TrialPruned),
            isinstance(error, catch),
        )

    @property
    def last_line(self) -> str:
        """The exception without its traceback, such as "ValueError: no such width"."""
        lines = [line for line in self.text.splitlines() if line and not line.startswith(" ")]
        return lines[-1] if lines else self.kind

    def __str__(self) -> str:
        return at_rank(self.rank, self.last_line)

    def error(self) -> Exception:
        """Make the exception again, on another rank."""
        made = _read(self.sent)
        if made is None and self.pruned:
            made = optuna.TrialPruned(str(self))
        elif made is None:  # of a class that the study takes it for
            made = (CaughtRankError if self.caught else RankError)(str(self))
        made.add_note(f"Raised on rank {self.rank}, and here because of it. There:\n{self.text}")
        return made


def _read(sent: bytes | None) -> Exception | None:
    """Return None if that is no exception here, such as of a class with another constructor."""
    try:
        made = None if sent is None else objects.loads(sent)
    except CommunicatorError:
        return None
    return made if isinstance(made, Exception) else None


def agreed(failures: Sequence[Failure], mine: Exception | None) -> tuple[Failure, Exception]:
    """Choose the failure that a trial ends with, and return what this rank raises for it."""
    root = min(failures, key=lambda failure: (failure.pruned, failure.rank))
    same = mine is not None and type(mine).__qualname__ == root.kind
    error = mine if mine is not None and same else root.error()
    for failure in failures:
        if failure.kind != root.kind:
            error.add_note(f"Rank {failure.rank} failed, too: {failure.last_line}")
    return root, error


@dataclasses.dataclass(frozen=True)
class RoundMessage:
    """What a rank tells the others."""

    at: str  # what it does, in words that are equal on all ranks
    value: object = None  # what it brings: the answer, on rank 0
    refused: Failure | None = None  # what rank 0 got in place of an answer
    failure: Failure | None = None  # what has ended the trial on this rank


class Rounds:
    """Exchanges messages between the ranks of a study.

    Attributes:
        give_up: Called with this rank's failure before the job is ended because of it.
    """

    def __init__(self, communicator: Communicator, patience: float):
        self.rank, self.size = communicator.rank, communicator.size
        self.give_up: Callable[[Failure], None] = lambda failure: None
        self._alone = self.size == 1 or communicator.name == "null"
        self._own = communicator if self._alone else communicator.split(0)
        self._patience = patience

    def meet(self, message: RoundMessage) -> list[RoundMessage]:
        """Send this rank's message and receive those of all. Every rank calls it."""
        if self._alone:
            return [message]
        # A collective cannot be left: if the others do not come, the timer ends this process.
        timer = threading.Timer(self._patience, self._end, [message.failure])
        timer.daemon = True
        if message.failure is not None:
            timer.start()
        try:
            return self._own.allgather_object(message)
        finally:
            timer.cancel()

    def _end(self, failure: Failure) -> None:
        print(
            failure.text
            + at_rank(
                self.rank,
                f"failed as above, and the other ranks did not end this trial within "
                f"{self._patience:g} s: they wait for it in the middle of a step, or compute for "
                "longer. Ending the job; start it again to go on with the study. To go on after "
                "such an exception, raise it on all ranks, or where no step is under way; "
                "optimize(..., patience=seconds) waits longer",
            ),
            file=sys.stderr,
            flush=True,
        )
        try:
            self.give_up(failure)
        finally:
            os._exit(1)
