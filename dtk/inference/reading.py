"""Predictions on disk, read as one array though they are many files."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from dtk.inference.part_files import MANIFEST, PartFiles, structured
from dtk.nests import Array, Nest

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


class Predictions:
    """Everything that `predict_to_disk` has written to a directory; see `read`.

    Args:
        directory: The directory.

    Attributes:
        directory: The directory.
        outputs: The structure that the model returns, of `Rows`.

    Raises:
        FileNotFoundError: There are no predictions.
        ValueError: Some are missing.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = Path(directory)
        files = PartFiles(self.directory)
        manifest = files.manifest()
        if manifest is None:
            raise FileNotFoundError(
                f"{self.directory / MANIFEST} is not there; give the directory that "
                "predict_to_disk was given"
            )
        if manifest.parts is None:
            there = sum(files.rows(manifest, n) is not None for n in files.numbers(manifest))
            raise ValueError(
                f"the predictions in {self.directory} are not complete: {there} parts are there; "
                "call predict_to_disk again with the same arguments, and it makes the others"
            )
        counts = manifest.parts
        self._rows = {
            name: Rows(
                [files.file(name, part) for part in range(len(counts))],
                counts,
                output.dtype,
                output.shape,
            )
            for name, output in manifest.outputs.items()
        }
        self._structure = manifest.structure
        self.outputs = structured(self._structure, self._rows)

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def __getitem__(self, index: Index) -> Nest:
        return structured(self._structure, {name: rows[index] for name, rows in self._rows.items()})

    def __repr__(self) -> str:
        return f"Predictions({str(self.directory)!r}, {self.outputs})"

    def batches(self, size: int) -> Iterator[Nest]:
        """Read all rows in order, a few at a time.

        Args:
            size: How many at a time; fewer at the end.

        Yields:
            The structure that the model returns, of arrays.

        Raises:
            ValueError: `size` is less than 1.
        """
        if size < 1:
            raise ValueError(f"size={size}, but a batch has 1 row or more")
        for start in range(0, len(self), size):
            yield self[start : start + size]


def read(directory: str | os.PathLike[str]) -> Predictions:
    """Open predictions that `predict_to_disk` has written.

    Args:
        directory: Where they are.

    Returns:
        An object with `len`, of which `[i]`, `[a:b]` and `[list of rows]` are what `Model.predict`
        would return of those rows: one array, or the model's structure of arrays. Only these rows
        are read. `outputs` is the structure of all rows, each a `Rows` with shape and dtype;
        `batches(size)` reads everything, a few rows at a time.

    Raises:
        FileNotFoundError: There are no predictions.
        ValueError: Some are missing.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> from dtk.inference import predict_to_disk
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     rows = predict_to_disk(model, np.ones((100, 4), "float32"), f"{place}/rows")
        ...     [len(batch) for batch in read(f"{place}/rows").batches(60)]
        [60, 40]
    """
    return Predictions(directory)
