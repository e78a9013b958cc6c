"""Iterators for ranks that must work on the same batches, after ChainerMN.

broadcast_iterator       root reads and sends: for data that only root can reach
synchronized_iterator    every rank reads for itself, in the same random order: nothing is sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.data.sharing import agree_on_seed, group_of
from dtk.strategies.dtk_strategy import DtkStrategy

_Item = TypeVar("_Item")


def broadcast_iterator(
    iterable: Iterable[_Item] | None,
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    root: int = 0,
) -> Iterator[_Item]:
    """Iterate on every rank over the batches that `root` reads.

    Every rank takes the same number of batches: if the iterator ends or raises on `root`, it does
    so on all ranks.

    Args:
        iterable: Yields structures of arrays or tensors, or other values that can be sent, see
            `dtk.communicators.objects`. Only `root`'s is read; None elsewhere.
        strategy_or_communicator: The ranks; None inside a strategy's scope.
        root: The rank that reads.

    Returns:
        An iterator over `root`'s batches. If `root`'s iterable raises, it raises the same error on
        every rank.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> list(dtk.data.broadcast_iterator([[1, 2], [3]], strategy))
        [[1, 2], [3]]
    """
    return _broadcast(iterable, group_of(strategy_or_communicator), root)


def _broadcast(
    iterable: Iterable[_Item] | None, communicator: Communicator, root: int
) -> Iterator[_Item]:
    source = _items(iterable)
    while True:
        try:
            batch = on_root(communicator, lambda: next(source), root)
        except StopIteration:
            return
        yield batch


def _items(iterable: Iterable[_Item] | None) -> Iterator[_Item]:
    """Yield the items; if there is no iterable, raise at the first item, where all ranks see it."""
    if iterable is None:
        raise TypeError("'NoneType' object is not iterable")
    yield from iterable


def synchronized_iterator(
    make: Callable[[int], Iterable[_Item]],
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    seed: int | None = None,
    root: int = 0,
) -> Iterator[_Item]:
    """Iterate on every rank over its own data, in the same random order.

    Args:
        make: Makes the batches from a seed, such as
            `lambda seed: dataset.shuffle(1000, seed=seed)`. Their order may depend on nothing else.
        strategy_or_communicator: The ranks; None inside a strategy's scope.
        seed: The seed for `make`; None draws one from numpy's generator.
        root: The rank whose seed counts.

    Returns:
        An iterator over the result of `make`.

    Example:
        >>> import dtk, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy("local")
        >>> def shuffled(seed):
        ...     return np.random.RandomState(seed).permutation(6).reshape(3, 2)
        >>> batches = dtk.data.synchronized_iterator(shuffled, strategy, seed=0)
        >>> [batch.tolist() for batch in batches]
        [[5, 2], [1, 3], [0, 4]]
    """
    return iter(make(agree_on_seed(seed, group_of(strategy_or_communicator), root)))
