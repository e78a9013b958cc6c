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

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Iterator

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.search.failures import Failure


@dataclasses.dataclass(frozen=True)
class RoundMessage:
    """What a rank tells the others."""

    at: str  # what it does, in words that are equal on all ranks
    value: object = None  # what it brings: the answer, on rank 0
    refused: Failure | None = None  # what rank 0 got in place of an answer
    failure: Failure | None = None  # what has ended the trial on this rank


class Rounds:
    """Exchanges messages between the ranks of a study."""

    def __init__(
        self, communicator: Communicator, patience: float, give_up: Callable[[Failure], None]
    ):
        self.rank, self.size = communicator.rank, communicator.size
        self._alone = self.size == 1 or communicator.name == "null"
        self._world = communicator
        self._own = communicator if self._alone else communicator.split(0)
        self._patience = patience
        self._give_up = give_up

    def meet(self, message: RoundMessage) -> list[RoundMessage]:
        """Send this rank's message and receive those of all. Every rank calls it."""
        if self._alone:
            return [message]
        with self._patiently(message.failure):
            return self._own.allgather_object(message)

    def resynchronize(self) -> None:
        """Make up for an exception that has ended a trial earlier on some ranks than on others."""
        self._world.resynchronize()

    @contextlib.contextmanager
    def _patiently(self, failure: Failure | None) -> Iterator[None]:
        """End this process if the others do not come; a collective cannot be left otherwise."""
        if failure is None:
            yield
            return
        timer = threading.Timer(self._patience, self._end, [failure])
        timer.daemon = True
        timer.start()
        try:
            yield
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
            self._give_up(failure)
        finally:
            os._exit(1)
