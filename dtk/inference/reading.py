"""Predictions on disk, read as one array though they are many files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dtk.inference.part_files import MANIFEST, PartFiles, structured
from dtk.inference.rows import Index, Rows
from dtk.nests import Nest


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
