"""Rows that lie in several files, read as one array."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from dtk.nests import Array

# Rows that are asked for: one, a range, or a list of them.
Index: TypeAlias = "int | slice[int | None, int | None, int | None] | Sequence[int] | Array"


class Rows:
    """Rows of one output, of which only what is asked for is read.

    Args:
        files: One `.npy` file after the other.
        counts: Rows of each.
        dtype: Of the entries.
        shape: Of one row.

    Attributes:
        shape: Of all rows together.
        dtype: Of the entries.
    """

    def __init__(
        self, files: Sequence[Path], counts: Sequence[int], dtype: str, shape: tuple[int, ...]
    ):
        self._files = files
        self._ends = list(itertools.accumulate(counts))
        self.shape = (sum(counts), *shape)
        self.dtype = np.dtype(dtype)
        self._opened = functools.lru_cache(maxsize=64)(self._open)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index) -> Array:
        if isinstance(index, slice):
            return self._range(*index.indices(len(self)))
        if isinstance(index, int | np.integer):
            part, place = self._place(operator.index(index))
            return self._opened(part)[place]
        wanted = np.asarray(index)
        if wanted.dtype == bool:
            if wanted.shape != (len(self),):
                raise IndexError(f"a mask of shape {wanted.shape} for {len(self)} rows")
            wanted = np.flatnonzero(wanted)
        found = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        for row, each in enumerate(wanted):
            part, place = self._place(operator.index(each))
            found[row] = self._opened(part)[place]
        return found

    def __array__(self, dtype: tf.DType = None, copy: bool | None = None) -> Array:
        everything = self[:]
        return everything if dtype is None else everything.astype(dtype)

    def __repr__(self) -> str:
        return f"Rows(shape={self.shape}, dtype={self.dtype}, files={len(self._files)})"

    def _open(self, part: int) -> Array:
        return np.load(self._files[part], mmap_mode="r", allow_pickle=False)

    def _place(self, index: int) -> tuple[int, int]:
        """Return the file that holds a row, and which row of it that is."""
        row = index + len(self) if index < 0 else index
        if not 0 <= row < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        part = bisect.bisect_right(self._ends, row)
        return part, row - (self._ends[part - 1] if part else 0)

    def _range(self, start: int, stop: int, step: int) -> Array:
        if step != 1:
            return self[np.arange(start, stop, step)]
        found = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        while start < stop:
            part, place = self._place(start)
            rows = self._opened(part)[place : place + stop - start]
            found[len(found) - (stop - start) :][: len(rows)] = rows
            start += len(rows)
        return found
