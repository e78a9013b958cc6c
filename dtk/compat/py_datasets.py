"""Items of a `PyDataset` that `fit` reads: the order in which Keras shuffles them, and their cost.

of one PyDatasetAdapter    _finite_generator    ordered
of its enqueuer            _send_py_dataset     ordered
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence

from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from keras.utils import PyDataset

from dtk.cluster.variables import SELF_TEST
from dtk.communicators.base import Communicator
from dtk.errors import script_line
from dtk.nests import Array, Tree

# Items that are timed, and from how many seconds on rank 0 says what they cost.
_ITEMS, _LONG_ITEM = 20, 0.005


class OrderedItems(PyDataset):
    """The items of a `PyDataset`, in the order of the open data."""

    def __init__(self, source: PyDataset):
        super().__init__()
        self._source = source
        self.order: Sequence[int] = ()
        self.next_order: Sequence[int] | Array | None = None  # from a checkpoint; else it is drawn

    @property
    def num_batches(self) -> int:
        return self._source.num_batches

    def __getitem__(self, index: int) -> Tree:
        return self._source[self.order[index]]

    def on_epoch_begin(self) -> None:
        self._source.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._source.on_epoch_end()

    def shuffle(self) -> None:
        """Take the order of a checkpoint, or draw one as Keras draws it."""
        order, self.next_order = self.next_order, None
        if order is None:
            order = list(range(self.num_batches))
            random.shuffle(order)
        self.order = [int(number) for number in order]


def ordered(adapter: PyDatasetAdapter) -> OrderedItems | None:
    """Let an adapter read items in an order that is known here; None if it does not shuffle."""
    if not adapter.shuffle or adapter.num_batches is None:
        return None
    reader, name = adapter, "_finite_generator"
    if adapter.enqueuer is not None:
        reader, name = adapter.enqueuer, "_send_py_dataset"  # inside its `try`
    read, items = getattr(reader, name), OrderedItems(reader.py_dataset)

    def shuffled() -> object:
        items.shuffle()
        return read()

    reader.py_dataset, reader.shuffle = items, False
    setattr(reader, name, shuffled)
    return items


def tell_cost(adapter: PyDatasetAdapter, world: Communicator) -> None:
    """Let rank 0 say once what the items cost every rank, if that is much."""
    at = script_line()

    def tell(seconds: float) -> None:
        if seconds >= _LONG_ITEM:
            saved = seconds * (world.size - 1) / world.size
            print(
                f"dtk: every worker makes every item of the PyDataset at {at}, {seconds:.3f} s "
                "each; dtk.data.shard(dataset, strategy), with items of batch_size / "
                f"{world.size} rows, saves {saved:.3f} s a step",
                flush=True,
            )

    if world.size > 1 and world.rank == 0:
        count = 1 if os.environ.get(SELF_TEST) == "only" else _ITEMS
        adapter.py_dataset = _TimedItems(adapter.py_dataset, count, tell)


class _TimedItems:
    """A `PyDataset` that tells the mean seconds of its first items."""

    def __init__(self, source: PyDataset, count: int, tell: Callable[[float], None]):
        self._source, self._left, self._count, self._tell = source, count, count, tell
        self._seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def __getitem__(self, index: int) -> Tree:
        begin = time.perf_counter()
        item = self._source[index]
        self._seconds += time.perf_counter() - begin
        self._left -= 1
        if self._left == 0:
            self._tell(self._seconds / self._count)
        return item
