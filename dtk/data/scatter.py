"""Scattered datasets: every rank gets a block of rows, as in ChainerMN.

    N = 10 rows over P = 3 ranks, begin of block i = floor(N i / P), ceil(N / P) rows each:

    equal     [0 1 2 3]
                    [3 4 5 6]               neighbours share at most one row
                          [6 7 8 9]
    unequal   [0 1 2 3] [4 5 6] [7 8 9]     the first N mod P ranks get one more

With equal lengths, ranks that loop over their parts take the same number of steps, but two ranks
may read the same row. `fit` needs neither: it cuts every global batch of data that is the same on
all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtk.communicators import objects
from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.data import rows
from dtk.data.rows import Data, Indices
from dtk.data.sharing import drawn, group_of, permutation
from dtk.errors import at_rank
from dtk.even_division import even_bounds
from dtk.strategies.dtk_strategy import DtkStrategy

# Bytes sent to a rank at once: a block may be larger than one message can be.
_MESSAGE = 1 << 24


def block(
    n_total: int, rank: int, size: int, *, force_equal_length: bool = True
) -> tuple[int, int]:
    """Return the first row of a rank's block, and the row after the last.

    Example:
        >>> [block(10, rank, 3) for rank in range(3)]
        [(0, 4), (3, 7), (6, 10)]
        >>> [block(10, rank, 3, force_equal_length=False) for rank in range(3)]
        [(0, 4), (4, 7), (7, 10)]
    """
    if not force_equal_length:
        return even_bounds(n_total, rank, size)
    begin = n_total * rank // size
    return begin, begin + -(-n_total // size)


def scatter_index(
    n_total: int | None,
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    root: int = 0,
    *,
    force_equal_length: bool = True,
) -> tuple[int, int]:
    """Return which rows this rank reads, for data that every rank can reach. Every rank calls it.

    Args:
        n_total: Number of rows in all; only `root`'s number counts.
        strategy_or_communicator: The ranks that share the rows; None inside a strategy's scope.
        root: The rank that knows `n_total`.
        force_equal_length: Whether all ranks get `ceil(n_total / size)` rows; neighbours may then
            share one row. Otherwise ranks differ by at most one row and share none.

    Returns:
        The first row and the row after the last.

    Raises:
        ValueError: `n_total` is not a number of rows, or `root` not a rank.

    Example:
        >>> import dtk
        >>> dtk.data.scatter_index(10, dtk.strategies.AllReduceStrategy("local"))
        (0, 10)
    """
    communicator = group_of(strategy_or_communicator)
    count = communicator.broadcast_object(n_total, root)
    if not isinstance(count, int | np.integer) or count < 0:
        raise ValueError(
            at_rank(communicator.rank, f"n_total={count!r} on rank {root}; expected 0 rows or more")
        )
    rank, size = communicator.rank, communicator.size
    return block(int(count), rank, size, force_equal_length=force_equal_length)


def scatter_dataset(
    dataset: Data,
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    root: int = 0,
    shuffle: bool = False,
    seed: int | None = None,
    *,
    force_equal_length: bool = True,
) -> Data:
    """Give every rank its block of a dataset's rows. Every rank calls it.

    If every rank has the dataset, each takes its own rows and nothing is sent. If some rank has
    None, `root` reads all rows once and sends every rank its block.

    Parts are for custom loops; if their lengths differ, the loops must agree on their steps. For
    `fit`, give each rank's part to
    `strategy.distribute_datasets_from_function(lambda context: part.batch(rows_per_rank))`.

    Args:
        dataset: An array; a tuple or dict of arrays with the same rows; a sequence of samples, read
            one by one; or a `tf.data.Dataset` of single elements with a known cardinality and a
            fixed order. None on a rank without data.
        strategy_or_communicator: The ranks that share the rows; None inside a strategy's scope.
        root: The rank whose dataset, `shuffle`, `seed` and `force_equal_length` count.
        shuffle: Whether to deal out the rows in a random order, the same for all ranks. The rows of
            a `tf.data.Dataset` are then read once and kept in memory.
        seed: Seed of the random order; None draws one from numpy's generator.
        force_equal_length: Whether all ranks get `ceil(rows / size)` rows; neighbours may then
            share one row. Otherwise ranks differ by at most one row and share none.

    Returns:
        This rank's rows: arrays from arrays, a dataset from a dataset, a sequence from a sequence.

    Raises:
        ValueError: On every rank, if `root` has no dataset, its rows cannot be counted, another
            rank has another number of rows, or ragged or sparse elements would have to be kept in
            memory.

    Example:
        >>> import dtk, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> dtk.data.scatter_dataset(np.arange(6), strategy, shuffle=True, seed=0)
        array([5, 2, 1, 3, 0, 4])
    """
    communicator = group_of(strategy_or_communicator)
    asked = (drawn(seed) if shuffle else None, force_equal_length)
    seed, equal = communicator.broadcast_object(asked, root)
    count, everywhere = _agreed_rows(dataset, communicator, root)
    order = range(count) if seed is None else permutation(count, seed)
    size = communicator.size
    bounds = [block(count, rank, size, force_equal_length=equal) for rank in range(size)]
    blocks = [order[begin:end] for begin, end in bounds]
    if everywhere:
        return rows.take(dataset, blocks[communicator.rank])
    return rows.unpack(_deal(dataset, blocks, communicator, root))


def _agreed_rows(dataset: Data, communicator: Communicator, root: int) -> tuple[int, bool]:
    """Return the row count of `root`'s dataset, and whether all ranks have it; raise on all."""
    held = communicator.allgather_object(_counted(dataset))
    wrong = next((told for told in held if isinstance(told, str)), None)
    if wrong is None and held[root] is None:
        wrong = f"rank {root} has no dataset to scatter; give it one, or name the rank that has"
    if wrong is None and len({*held} - {None}) > 1:
        wrong = (
            f"ranks have datasets of different lengths (rows by rank: {held}); give all the same"
        )
    if wrong is not None:
        raise ValueError(at_rank(communicator.rank, wrong))
    counts = [told for told in held if told is not None and not isinstance(told, str)]
    return counts[0], len(counts) == len(held)


def _counted(dataset: Data) -> int | str | None:
    """Return the number of rows, or an error message; None if there is no dataset."""
    try:
        return None if dataset is None else rows.count_rows(dataset)
    except (TypeError, ValueError) as error:
        return str(error)


def _deal(dataset: Data, blocks: Sequence[Indices], communicator: Communicator, root: int) -> Data:
    """Let `root` read all blocks and send the i-th to rank i; return this rank's."""
    written = [b""] * communicator.size

    def write() -> int:
        written[:] = [objects.dumps(part) for part in rows.pack(dataset, blocks)]
        return max(map(len, written))

    longest = on_root(communicator, write, root)
    mine = bytearray()
    for begin in range(0, longest, _MESSAGE):
        pages = [payload[begin : begin + _MESSAGE] for payload in written]
        received, _ = communicator.alltoall(
            np.frombuffer(b"".join(pages), np.uint8), [len(page) for page in pages]
        )
        mine += received.numpy().tobytes()
    return objects.loads(bytes(mine))
