"""Work of a checkpoint that rank 0 does for all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from dtk.communicators.root import on_root
from dtk.trainer.strategy import Strategy

T = TypeVar("T")


def on_chief(strategy: Strategy, work: Callable[[], T]) -> T:
    """Do work on rank 0, and return its result on every rank. All ranks call it together."""

    def alone() -> T:
        with _local_reads(strategy):
            return work()

    return on_root(strategy.world, alone)


@contextlib.contextmanager
def _local_reads(strategy: Strategy) -> Iterator[None]:
    """Let one rank read summed state without waiting for the others."""
    with getattr(strategy.extended, "local_reads", contextlib.nullcontext)():
        yield
