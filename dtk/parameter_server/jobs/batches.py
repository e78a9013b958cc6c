"""Global batches as work for workers behind parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.input import slicing
from dtk.nests import Nest, Specs
from dtk.parameter_server import gradient_buffers, worker_data
from dtk.trainer.replica import replica_step


class Batch(NamedTuple):
    """Global batch in slices."""

    parts: tuple[Nest, ...]  # the slices
    # real rows of each slice; 0 for a slice that holds only a padding row
    counts: tuple[int, ...]
    rows: int  # rows of all slices
    spec: Specs  # specification of a slice of any number of rows
    # the source of the rows if workers read them and the chief has none
    pipelines: worker_data.Pipelines | None = None

    @classmethod
    def of(cls, given: slicing.Slices | worker_data.Pipelines, spec: Specs, slices: int) -> Batch:
        """Make a batch from slices or pipelines that Keras's loop has read."""
        if isinstance(given, worker_data.Pipelines):
            # Every slice has the same number of rows, see `worker_dataset`.
            return cls((), (1,) * slices, slices, spec, given)
        return cls(given.parts, tuple(map(int, given.counts)), int(given.rows), spec)

    @property
    def empty(self) -> list[int]:
        """Numbers of the slices without rows."""
        return [part for part, count in enumerate(self.counts) if not count]

    @property
    def holders(self) -> float:
        """Number of slices with rows."""
        return float(sum(count > 0 for count in self.counts))

    def share_of(self, part: int) -> float:
        """Return a slice's part of the rows, 0 to 1."""
        return self.counts[part] / self.rows


def is_read_by_workers(batch: Batch) -> bool:
    """Return whether workers read a batch's rows from their own pipelines."""
    return batch.pipelines is not None


def whole_batch(data: Nest | tf.data.Iterator) -> Nest:
    """Return a batch as Keras's steps take it; called while tracing."""
    if isinstance(data, tf.data.Iterator):
        data = data.get_next()
    return replica_step.without_optionals(data)


class Batcher:
    """Collects batches of one specification, up to the number that a worker takes at once."""

    def __init__(self, size: int):
        self._size = size
        self._waiting: list[Batch] = []

    def add(self, batch: Batch) -> list[Batch]:
        key = gradient_buffers.key_of(batch.spec)
        others = self._waiting and gradient_buffers.key_of(self._waiting[0].spec) != key
        ready = self.take() if others else []
        self._waiting.append(batch)
        return ready + (self.take() if len(self._waiting) == self._size else [])

    def take(self) -> list[Batch]:
        """Remove and return the waiting batches, joined into one; nothing if there are none."""
        waiting, self._waiting = self._waiting, []
        return [_joined(waiting)] if waiting else []


def _joined(batches: Sequence[Batch]) -> Batch:
    rows = sum(batch.rows for batch in batches)
    parts = tuple(batch.parts[0] if batch.parts else None for batch in batches)
    return Batch((parts,), (rows,), rows, batches[0].spec, batches[0].pipelines)
