"""The ranks that share data, their random numbers, and iterators over the same batches.

broadcast_iterator       root reads and sends: for data that only root can reach
synchronized_iterator    every rank reads for itself, in the same random order: nothing is sent
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.compat import tf_replicas
from dtk.compat.random_draws import spread_seed
from dtk.nests import Array
from dtk.strategies.dtk_strategy import DtkStrategy


def group_of(strategy_or_communicator: DtkStrategy | Communicator | None = None) -> Communicator:
    """Return a strategy's communicator, or the communicator itself.

    Example:
        >>> from dtk.communicators import create
        >>> group_of(create("local")).size
        1
    """
    group = strategy_or_communicator
    if group is None and tf.distribute.has_strategy():
        group = tf.distribute.get_strategy()
    if isinstance(group, DtkStrategy):
        return group.communicator
    if isinstance(group, Communicator):
        return group
    what = "nothing outside a strategy's scope" if group is None else f"a {type(group).__name__}"
    raise ValueError(
        f"which ranks share the data? got {what}; give one of dtk's strategies or communicators, "
        "or call this inside strategy.scope()"
    )


def set_seed(seed: int, strategy: DtkStrategy) -> int:
    """Seed everything that must be equal on all ranks, and return another seed for each rank.

    Weights and the order of rows must be the same everywhere, because every rank reads the same
    global batches and keeps a slice. Use the returned seed where ranks must differ, for example for
    the augmentation in a pipeline made with `dtk.data.shard`.

    Args:
        seed: The job's seed.
        strategy: The strategy, which knows this process's rank.

    Returns:
        `seed` on rank 0, and a different number on every other rank.

    Example:
        >>> import dtk
        >>> dtk.data.set_seed(7, dtk.strategies.AllReduceStrategy("local"))
        7
    """
    keras.utils.set_random_seed(seed)
    return spread_seed(seed, strategy.communicator.rank)


def drawn(seed: int | None) -> int:
    """Return the seed, or a number from numpy's generator if it is None.

    Every rank draws, even if only one rank's number counts, so that generators stay equal.
    """
    return int(np.random.randint(2**31)) if seed is None else seed


def permutation(rows: int, seed: int) -> Array:
    """Return the rows `0 .. rows - 1` in random order.

    Like ChainerMN, this draws from numpy's `RandomState`, which gives the same numbers in every
    version of numpy. So a seed gives the same order as in ChainerMN.

    Example:
        >>> permutation(6, seed=0).tolist()
        [5, 2, 1, 3, 0, 4]
    """
    return np.random.RandomState(seed).permutation(rows)


_Item = TypeVar("_Item")


def broadcast_iterator(
    iterable: Iterable[_Item] | None,
    strategy_or_communicator: DtkStrategy | Communicator | None = None,
    root: int = 0,
) -> Iterator[_Item]:
    """Iterate on every rank over the batches that `root` reads.

    All ranks make it together. Every rank takes the same number of batches: if the iterator ends or
    raises on `root`, it does so on all ranks.

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
    group = group_of(strategy_or_communicator)
    # `fit` reads ahead in a thread of TensorFlow's, beside the collectives of its own.
    return _broadcast(iterable, group.split(0) if group.size > 1 else group, root)


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
            `lambda seed: dataset.shuffle(1000, seed=seed)`. Their order may depend on nothing else,
            but for TensorFlow's global seed: what `make` itself shuffles has that of `root`.
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
    group = group_of(strategy_or_communicator)
    agreed, of_root = group.broadcast_object((drawn(seed), tf_replicas.global_seed()), root)
    with tf_replicas.with_global_seed(of_root):
        return iter(make(agreed))
