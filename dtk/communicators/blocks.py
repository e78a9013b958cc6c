"""Rows that each rank gets when a number of rows is divided among all."""

from __future__ import annotations


def block_sizes(rows: int, size: int) -> list[int]:
    """Return the rows of every rank's block: as even as can be, the first ranks one more.

    Example:
        >>> block_sizes(8, 3), block_sizes(1, 2)
        ([3, 3, 2], [1, 0])
    """
    each, left = divmod(rows, size)
    return [each + (rank < left) for rank in range(size)]
