"""Minibatches in an order that depends only on a seed (CNTK's partitioned minibatches).

    sweep 0                        sweep 1
    3 0 4 1 2                      1 4 0 2 3             a new order every sweep, from one seed
    [3 0 4] [1 2]                  [1 4 0] [2 3]         size 3: a minibatch ends with its sweep
    [3 0|4] [1|2]                  [1 4|0] [2|3]         two ranks: each has a slice of every one

All minibatches of all ranks, one after the other, have the same rows in the same order: for any
size, even one that changes, for any number of workers, and however often the job was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypedDict

import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.data import rows
from dtk.data.rows import Data, Indices
from dtk.data.sharing import drawn, group_of
from dtk.errors import at_rank
from dtk.even_division import even_bounds
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.ranks import rank_checks


class Minibatch(NamedTuple):
    """One rank's slice of a global minibatch.

    Attributes:
        data: This rank's rows, in the structure of the data. If a minibatch has fewer rows than
            there are ranks, the last ranks get no rows.
        rows: Rows of the global minibatch.
        ends_sweep: Whether the minibatch is the last of its sweep.
    """

    data: Data
    rows: int
    ends_sweep: bool


class Position(TypedDict):
    """Where a reader is, and in which order it goes on."""

    position: int  # rows taken so far by all ranks together
    rows: int  # rows of the data
    seed: int | None  # seed of the orders; None for the order of the data


class PartitionedMinibatches:
    """Reader of arrays by minibatches: every rank calls `next_minibatch` and gets its slice.

    Ranks send nothing after the constructor: a rank's position follows from the number of rows that
    all ranks have taken. `get_state` and `set_state` save and restore it, also for another number
    of workers.

    Args:
        data: An array, or a tuple or dict of arrays with the same rows; the same on every rank. A
            `numpy.memmap` is read minibatch by minibatch.
        strategy_or_communicator: The ranks that share each minibatch; None inside a strategy's
            scope.
        shuffle: Whether each sweep over the rows has a new random order.
        seed: Seed of the random orders; None draws one, the same for all ranks.
        sweeps: Number of sweeps after which the data ends; None never ends it.

    Raises:
        TypeError: The data is not an array, or a tuple or dict of arrays.
        ValueError: The data has no rows, or `sweeps` is less than 1.
        DisagreementError: Ranks have different numbers of rows, seeds or sweeps.

    Example:
        >>> import dtk, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> reader = dtk.data.PartitionedMinibatches(np.arange(5), strategy, shuffle=False)
        >>> [reader.next_minibatch(size).data.tolist() for size in (3, 3, 2)]
        [[0, 1, 2], [3, 4], [0, 1]]
        >>> reader.get_state()["position"]
        7
    """

    def __init__(
        self,
        data: Data,
        strategy_or_communicator: DtkStrategy | Communicator | None = None,
        *,
        shuffle: bool = True,
        seed: int | None = 0,
        sweeps: int | None = None,
    ):
        communicator = group_of(strategy_or_communicator)
        self._data = data
        self._rows = _checked_rows(data, sweeps)
        settings = {"rows of data": self._rows, "shuffle": shuffle, "seed": seed, "sweeps": sweeps}
        rank_checks.compare(list(settings.items()), communicator)
        self._rank, self._size = communicator.rank, communicator.size
        self._sweeps = sweeps
        if shuffle and seed is None:
            seed = communicator.broadcast_object(drawn(None))
        self._seed = seed if shuffle else None
        self._position = 0
        # The last order, with its seed and sweep.
        self._kept: tuple[tuple[int, int] | None, Indices] = (None, ())

    @property
    def position(self) -> int:
        """Rows taken so far by all ranks together, over all sweeps."""
        return self._position

    def steps(self, batch_size: int) -> int:
        """Return the number of minibatches in a whole sweep.

        Args:
            batch_size: Rows of a global minibatch.
        """
        return -(-self._rows // self._checked_size(batch_size))

    def next_minibatch(self, size: int) -> Minibatch | None:
        """Return this rank's slice of the next `size` rows, or of the rest of the sweep.

        Args:
            size: Rows of the global minibatch, the same on every rank; each minibatch may have
                another size.

        Returns:
            The slice; None after the last sweep, on all ranks.

        Raises:
            ValueError: The size is not at least 1.
        """
        if self._is_over(self._position):
            return None
        taken, ends_sweep = self._minibatch(self._position, self._checked_size(size))
        self._position += len(taken)
        begin, end = even_bounds(len(taken), self._rank, self._size)
        return Minibatch(rows.take(self._data, taken[begin:end]), len(taken), ends_sweep)

    def dataset(self, batch_size: int) -> tf.data.Dataset:
        """Return a dataset of the global minibatches from here on; `fit` slices it itself.

        The dataset does not move `position`, since `fit` reads ahead: `dtk.callbacks.Checkpoint`
        keeps the place instead. Without `sweeps` the dataset never ends: give `fit` steps_per_epoch
        as well.

        Args:
            batch_size: Rows of a global minibatch.

        Example:
            >>> import dtk, numpy as np
            >>> strategy = dtk.strategies.AllReduceStrategy("local")
            >>> reader = dtk.data.PartitionedMinibatches(np.arange(5), strategy, shuffle=False)
            >>> for batch in reader.dataset(3).take(reader.steps(3)):
            ...     print(batch.numpy())
            [0 1 2]
            [3 4]
        """
        begin, size = self._position, self._checked_size(batch_size)

        def read() -> Iterator[Data]:
            position = begin
            while not self._is_over(position):
                taken, _ = self._minibatch(position, size)
                position += len(taken)
                yield rows.take(self._data, taken)

        specs = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype)), self._data
        )
        return tf.data.Dataset.from_generator(read, output_signature=specs)

    def get_state(self) -> Position:
        """Return the position and the seed of the order, as plain numbers."""
        return {"position": self._position, "rows": self._rows, "seed": self._seed}

    def set_state(self, state: Position) -> None:
        """Go on where `get_state` was called, in that reader's order.

        Args:
            state: The result of `get_state`.

        Raises:
            ValueError: The state is from data with another number of rows.
        """
        if state["rows"] != self._rows:
            message = (
                f"the saved state is at row {state['position']} of data with {state['rows']} "
                f"rows, and this data has {self._rows}; give the data it was saved with"
            )
            raise ValueError(at_rank(self._rank, message))
        self._position, self._seed = state["position"], state["seed"]

    def _is_over(self, position: int) -> bool:
        return self._sweeps is not None and position >= self._sweeps * self._rows

    def _minibatch(self, position: int, size: int) -> tuple[Indices, bool]:
        """Return the rows of a global minibatch, and whether it ends its sweep."""
        sweep, begin = divmod(position, self._rows)
        end = min(begin + size, self._rows)
        return self._order(sweep)[begin:end], end == self._rows

    def _order(self, sweep: int) -> Indices:
        if self._seed is None:
            return range(self._rows)
        kept, order = self._kept
        if kept != (self._seed, sweep):
            order = np.random.RandomState([self._seed, sweep]).permutation(self._rows)
            self._kept = ((self._seed, sweep), order)
        return order

    def _checked_size(self, size: int) -> int:
        if size < 1:
            raise ValueError(at_rank(self._rank, f"a minibatch of {size} rows; ask for 1 or more"))
        return size


def _checked_rows(data: Data, sweeps: int | None) -> int:
    if not rows.are_arrays(data):
        raise TypeError(
            f"minibatches are taken from an array, or a tuple or dict of arrays, not from a "
            f"{type(data).__name__}; stack the samples, or give fit a tf.data.Dataset"
        )
    count = rows.count_rows(data)
    if count == 0 or (sweeps is not None and sweeps < 1):
        raise ValueError(f"{count} rows and sweeps={sweeps}; expected at least 1 of each")
    return count
