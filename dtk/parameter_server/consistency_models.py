"""Consistency models of parameter servers: synchronous, bounded delay, asynchronous.

One rule covers all of them; see `scheduler`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


def _check_count(name: str, value: object, hint: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name}={value!r}; expected 0 or more, a whole number: {hint}")


def _check_workers(workers: int) -> None:
    if workers < 1:
        raise ValueError(f"workers={workers}; expected 1 or more: start a task of type worker")


@dataclass(frozen=True)
class SerialStart:
    """Serial steps at the start of a training, as one process would take them.

    Stale gradients do most harm while weights still move far: Downpour (Dean et al. 2012) warms up
    with one replica. Any free worker takes the next serial step.

    Args:
        epochs: Number of epochs of `fit` to take serially, counted from epoch 0.
        samples: Number of rows to take serially instead; in a resumed run, each earlier step counts
            as one full batch.

    Raises:
        ValueError: Both or none are given, or not a number of 1 or more.

    Example:
        >>> Async(warm_start=SerialStart(epochs=1))
        Async(warm_start=SerialStart(epochs=1, samples=0))
    """

    epochs: int = 0
    samples: int = 0

    def __post_init__(self) -> None:
        _check_count("epochs", self.epochs, "epochs to take serially")
        _check_count("samples", self.samples, "rows to take serially")
        if bool(self.epochs) == bool(self.samples):
            raise ValueError(
                f"SerialStart(epochs={self.epochs}, samples={self.samples}); expected one of them, "
                "1 or more"
            )

    def is_over(self, epoch: int, samples: int) -> bool:
        """Return whether steps may be asynchronous.

        Args:
            epoch: Number of the running epoch, from 0.
            samples: Rows trained with so far.
        """
        return epoch >= self.epochs if self.epochs else samples >= self.samples


class _OneWorkerSteps:
    """Steps that are one worker's batch each."""

    spare: ClassVar[int] = 0
    warm_start: SerialStart | None

    def __post_init__(self) -> None:
        value = self.warm_start
        if value is not None and not isinstance(value, SerialStart):
            raise TypeError(
                f"warm_start={value!r}; expected dtk.strategies.SerialStart(epochs=1), or None. "
                "(dtk.exchange.WarmStart, whole gradients first, is for "
                "AllReduceStrategy(exchange=...))"
            )

    def slices(self, workers: int) -> int:
        """Return the number of gradients in one step, which is 1.

        Args:
            workers: Number of workers.

        Raises:
            ValueError: There is none.
        """
        _check_workers(workers)
        return 1


def check_no_exchange(value: object) -> None:
    """Refuse a `SerialStart` where an exchange was expected."""
    if isinstance(value, SerialStart):
        raise TypeError(
            f"exchange={value!r} is no exchange: it says how asynchronous steps begin, as in "
            f"ParameterServerStrategy(dtk.strategies.Async(warm_start={value!r})). For whole "
            "gradients first, under AllReduceStrategy, use dtk.exchange.WarmStart(exchange, "
            "samples=60_000)"
        )


@dataclass(frozen=True)
class Sync:
    """Synchronous steps: each applies the sum of exactly N gradients, N = workers - backup_workers.

    A global batch is cut into N slices. A worker without work repeats a slice that another worker
    still computes, and the first result for a slice counts. Unlike the backup workers of Chen et
    al. 2016 it computes the same rows, so no data is dropped and the result equals that of one
    process. (Workers that read their own pipelines have other rows, see `worker_data`.)

    Args:
        backup_workers: How many workers may be slow or silent without delaying a step.

    Raises:
        ValueError: Not an int of 0 or more.
    """

    backup_workers: int = 0
    tau: ClassVar[float] = 0
    warm_start: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check_count("backup_workers", self.backup_workers, "how many slow workers to bear")

    @property
    def spare(self) -> int:
        """Number of workers that may be busy with results no longer needed."""
        return self.backup_workers

    def slices(self, workers: int) -> int:
        """Return the number of gradients in one step.

        Args:
            workers: Number of workers, backup workers included.

        Raises:
            ValueError: There is none, or all are backup workers.
        """
        _check_workers(workers)
        if self.backup_workers >= workers:
            raise ValueError(
                f"backup_workers={self.backup_workers} leaves no worker of {workers} whose "
                f"gradients count; use at most {workers - 1}, or start more workers"
            )
        return workers - self.backup_workers


@dataclass(frozen=True)
class BoundedDelay(_OneWorkerSteps):
    """Bounded delay: step t starts once every step before t - tau is finished.

    A step is one worker's batch (Li et al., OSDI'14).

    Args:
        tau: How many steps a worker may be ahead of the oldest unfinished one; 0 is serial.
        warm_start: Serial steps to begin with, see `SerialStart`; None for none.

    Raises:
        ValueError: Not an int of 0 or more.
        TypeError: `warm_start` is something else.
    """

    tau: int
    warm_start: SerialStart | None = None

    def __post_init__(self) -> None:
        _check_count("tau", self.tau, 'the steps a worker may be ahead; for no bound use "async"')
        super().__post_init__()


@dataclass(frozen=True)
class Async(_OneWorkerSteps):
    """Asynchronous steps: no step waits for another; a step is one worker's batch.

    Args:
        warm_start: Serial steps to begin with, see `SerialStart`; None for none.

    Raises:
        TypeError: `warm_start` is something else.
    """

    warm_start: SerialStart | None = None
    tau: ClassVar[float] = math.inf


Consistency = Sync | BoundedDelay | Async


def parse(consistency: object) -> Consistency:
    """Return the consistency for a user's argument.

    Example:
        >>> parse("sync"), parse(BoundedDelay(4))
        (Sync(backup_workers=0), BoundedDelay(tau=4, warm_start=None))
    """
    if isinstance(consistency, Sync | BoundedDelay | Async):
        return consistency
    if consistency == "sync":
        return Sync()
    if consistency == "async":
        return Async()
    raise ValueError(
        f'consistency={consistency!r}; expected "sync", "async", '
        "Sync(backup_workers=1) or BoundedDelay(tau=4), with any numbers"
    )


def ahead(tau: float, workers: int) -> int:
    """Return how many offered steps may be unapplied when `fit` goes on with the next batch.

    With steps waiting, asynchronous workers stay busy while the main thread does other work. The
    number bounds how stale their steps can be, see `Staleness`.
    """
    return 2 * workers if tau else 0
