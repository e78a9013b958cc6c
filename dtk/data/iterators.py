"""Iterators for ranks that must work on the same batches (ChainerMN's two).

broadcast_iterator       root reads and sends: whatever root alone can reach
synchronized_iterator    every rank reads for itself, in one random order: nothing is sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.data.group import group_of
from dtk.data.seed import agree_on_seed
from dtk.strategies.base import DtkStrategy

_Item = TypeVar("_Item")


def broadcast_iterator(
    iterable: Iterable[_Item] | None,
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    root: int = 0,
) -> Iterator[_Item]:
    """Iterate on every rank over the batches that `root` reads.

    Every rank takes the same number of batches; what ends or breaks the iterator on `root` ends or
    breaks it on all.

    Args:
        iterable: Of structures of arrays or tensors, or of what else can be sent, see
            `dtk.communicators.objects`. Only `root`'s is read; None elsewhere.
        strategy_or_communicator: The ranks; None inside a strategy's scope.
        root: The rank that reads.

    Returns:
        An iterator over `root`'s batches. Where `root`'s iterator raises, it raises the same on
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
    """Yield its items; what cannot be iterated over raises at the first, for all ranks to hear."""
    if iterable is None:
        raise TypeError("'NoneType' object is not iterable")
    yield from iterable


def synchronized_iterator(
    make: Callable[[int], Iterable[_Item]],
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    seed: int | None = None,
    root: int = 0,
) -> Iterator[_Item]:
    """Iterate on every rank over what it reads for itself, in the same random order.

    Args:
        make: Makes the batches from a seed, of which alone their order may depend; such as
            `lambda seed: dataset.shuffle(1000, seed=seed)`.
        strategy_or_communicator: The ranks; None inside a strategy's scope.
        seed: What `make` is given; None draws one from numpy's generator.
        root: The rank whose seed counts.

    Returns:
        An iterator over what `make` returned.

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
