"""The order of rows depends on a seed and a sweep only."""

from __future__ import annotations

import numpy as np

from dtk.nests import Array


def permutation(rows: int, seed: int) -> Array:
    """Return the rows `0 .. rows - 1` in random order.

    Like ChainerMN, this draws from numpy's `RandomState`, which gives the same numbers in every
    version of numpy. So a seed gives the same order as in ChainerMN.

    Example:
        >>> permutation(6, seed=0).tolist()
        [5, 2, 1, 3, 0, 4]
    """
    return np.random.RandomState(seed).permutation(rows)


def sweep_order(rows: int, seed: int, sweep: int) -> Array:
    """Return the order of one sweep over the rows, another one for each sweep.

    Example:
        >>> sorted(sweep_order(5, seed=0, sweep=3).tolist())
        [0, 1, 2, 3, 4]
    """
    return np.random.RandomState([seed, sweep]).permutation(rows)


def minibatch_at(position: int, size: int, rows: int) -> tuple[int, int, int]:
    """Return the sweep, begin and end of a minibatch; it ends with its sweep, as in CNTK.

    Example:
        >>> [minibatch_at(position, 4, rows=10) for position in (0, 4, 8, 10)]
        [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]
    """
    sweep, begin = divmod(position, rows)
    return sweep, begin, min(begin + size, rows)
