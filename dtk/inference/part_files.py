"""Predictions on disk: one file for each part and output, and a manifest of all.

    directory/
        manifest.json                  the plan; when all is there, the rows of every part
        output/part-00000.npy          a model with one output
        output/part-00001.npy
        output.logits/part-00000.npy   one with several: named as in the structure it returns
        data/part-00000.npy            digests of the batches that a part was predicted from
        .writing-...                   a write that is under way, or was cut short

A file is written under another name, flushed to the disk and renamed: a part is there completely or
not at all, and a run that goes on makes the missing ones.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from dtk.files import DRAFT, written
from dtk.nests import Array, Tree

_FORMAT = "dtk predictions, 1"
_DATA = "data"  # names of outputs begin otherwise
# How outputs are nested, written to JSON: the name of a folder, or ["list" or "tuple", parts], or
# ["dict", {name: part}].
Structure: TypeAlias = "str | list[str | list[Structure] | dict[str, Structure]]"
# Rows that are asked for: one, a range, or a list of them.
Index: TypeAlias = "int | slice[int | None, int | None, int | None] | Sequence[int] | Array"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is predicted, and how it is cut."""

    weights: str  # digest of the model's weights
    kind: str  # what the data is
    data: int  # digest of the data
    rows: int | None  # rows of the data; None where only reading tells
    steps: int | None  # batches of the data; None where only reading tells
    batch_size: int | None  # rows of a batch, where dtk cuts them
    per_part: int  # batches of a part
    structure: Structure = ""  # how outputs are nested
    # dtype of the entries, as NumPy calls it, and shape of a row, by the name of an output's folder
    outputs: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    parts: tuple[int, ...] | None = None  # rows of each part, when all are there; None before
    settings: str = ""  # digest of how the model's layers are configured


class PartFiles:
    """Files of one directory of predictions."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest_file = directory / "manifest.json"

    def manifest(self) -> Manifest | None:
        """Return what the directory says of itself; None where it says nothing."""
        if not self.manifest_file.is_file():
            return None
        try:
            said = json.loads(self.manifest_file.read_text())
            if said.pop("format") != _FORMAT:
                raise ValueError("another format")
            outputs = {name: (dtype, tuple(row)) for name, (dtype, row) in said["outputs"].items()}
            parts = None if said["parts"] is None else tuple(said["parts"])
            return Manifest(**{**said, "outputs": outputs, "parts": parts})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{self.manifest_file} is not what predict_to_disk writes ({error}); give another "
                "directory, or remove this file"
            ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace the manifest, and make the folders of its outputs."""
        for name in (_DATA, *manifest.outputs):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        with written(self.manifest_file) as draft:
            said = {"format": _FORMAT, **dataclasses.asdict(manifest)}
            draft.write_text(json.dumps(said, indent=1))

    def clear(self, manifest: Manifest) -> None:
        """Remove everything that was predicted, the manifest first."""
        self.manifest_file.unlink()
        for name in (_DATA, *manifest.outputs):
            for file in (self.directory / name).glob("part-*.npy"):
                file.unlink()

    def clear_drafts(self) -> None:
        """Remove what a killed process has left half written."""
        for draft in self.directory.rglob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)

    def file(self, name: str, part: int) -> Path:
        return self.directory / name / f"part-{part:05d}.npy"

    def write(self, part: int, arrays: dict[str, Array], digests: Sequence[int]) -> None:
        # Digests last: they are of the rows that are there.
        for name, rows in {**arrays, _DATA: np.array(digests)}.items():
            with written(self.file(name, part)) as draft, open(draft, "wb") as stream:
                np.save(stream, rows, allow_pickle=False)

    def digests(self, part: int) -> list[int] | None:
        """Return the digests of the batches of a part; None if they are not there."""
        try:
            return [int(one) for one in np.load(self.file(_DATA, part), allow_pickle=False)]
        except (OSError, ValueError):
            return None

    def rows(self, manifest: Manifest, part: int) -> int | None:
        """Return how many rows a part has; None if it is not there completely."""
        if self.digests(part) is None:
            return None
        counts = set()
        for name, output in manifest.outputs.items():
            try:
                rows = np.load(self.file(name, part), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError):  # not there, or not whole
                return None
            if (rows.dtype.name, rows.shape[1:]) != output:
                return None
            counts.add(len(rows))
        return counts.pop() if len(counts) == 1 else None

    def done(self, manifest: Manifest) -> frozenset[int]:
        """Return the numbers of the parts that are there completely."""
        first = self.directory / next(iter(manifest.outputs))
        numbers = (int(file.stem.removeprefix("part-")) for file in first.glob("part-*.npy"))
        return frozenset(n for n in numbers if self.rows(manifest, n) is not None)


def outputs_of(predicted: Tree) -> tuple[Structure, dict[str, Array]]:
    """Name the arrays of a structure.

    Example:
        >>> structure, arrays = outputs_of({"a": np.zeros(2), "b": (np.ones(2),)})
        >>> list(arrays), structure
        (['output.a', 'output.b.0'], ['dict', {'a': 'output.a', 'b': ['tuple', ['output.b.0']]}])
    """
    arrays: dict[str, Array] = {}

    def of(part: Tree, name: str) -> Structure:
        if isinstance(part, dict):
            return ["dict", {key: of(each, f"{name}.{key}") for key, each in part.items()}]
        if isinstance(part, list | tuple):
            kind = "list" if isinstance(part, list) else "tuple"
            return [kind, [of(each, f"{name}.{index}") for index, each in enumerate(part)]]
        folder = name.replace("/", "_")  # a name of a layer may be a path
        while folder.casefold() in map(str.casefold, arrays):  # "a/b" and "a_b"
            folder += "_"
        arrays[folder] = _storable(np.asarray(part), folder)
        return folder

    structure = of(predicted, "output")
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(
            f"the outputs of a batch have different numbers of rows ({counts}), so that no row of "
            "the data has all of them; return one value of each output for each row"
        )
    return structure, arrays


def _storable(array: Array, name: str) -> Array:
    """Return an array in a dtype that `.npy` files have, without loss."""
    if array.ndim == 0:
        raise ValueError(
            f"{name} of a batch is a scalar, and has no rows to put into a file; return one value "
            "for each row"
        )
    if array.dtype.kind in "biufc":
        return array
    if array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return array.astype(np.float32)
    raise ValueError(
        f"{name} has dtype {array.dtype}, which is no number; let the model return numbers"
    )


def _structured(structure: Structure, arrays: Mapping[str, Array | Rows]) -> Tree:
    """Tree arrays as a model returned them."""
    if isinstance(structure, str):
        return arrays[structure]
    kind, parts = structure
    if isinstance(parts, dict):
        return {name: _structured(part, arrays) for name, part in parts.items()}
    assert not isinstance(parts, str)
    nested = [_structured(part, arrays) for part in parts]
    return nested if kind == "list" else tuple(nested)


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
                f"{files.manifest_file} is not there; give the directory that predict_to_disk was "
                "given"
            )
        if manifest.parts is None:
            raise ValueError(
                f"the predictions in {self.directory} are not complete: "
                f"{len(files.done(manifest))} parts are there; call predict_to_disk again with the "
                "same arguments, and it makes the others"
            )
        counts, self._structure = manifest.parts, manifest.structure
        self._rows = {
            name: Rows([files.file(name, part) for part in range(len(counts))], counts, *output)
            for name, output in manifest.outputs.items()
        }
        self.outputs = _structured(self._structure, self._rows)

    def __len__(self) -> int:
        return len(next(iter(self._rows.values())))

    def __getitem__(self, index: Index) -> Tree:
        return _structured(
            self._structure, {name: rows[index] for name, rows in self._rows.items()}
        )

    def __repr__(self) -> str:
        return f"Predictions({str(self.directory)!r}, {self.outputs})"

    def batches(self, size: int) -> Iterator[Tree]:
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
        self._ends = np.cumsum(counts)
        self.shape = (sum(counts), *shape)
        self.dtype = np.dtype(dtype)
        self._opened = functools.lru_cache(maxsize=64)(
            lambda part: np.load(files[part], mmap_mode="r", allow_pickle=False)
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index) -> Array:
        if isinstance(index, slice):
            asked = np.arange(*index.indices(len(self)))
        else:
            np.broadcast_to(0, len(self))[index]  # raises what NumPy raises
            asked = np.asarray(index)
            asked = np.flatnonzero(asked) if asked.dtype == bool else asked.astype(int) % len(self)
        wanted = asked.reshape(-1)
        parts = np.searchsorted(self._ends, wanted, "right")
        values = np.empty((len(wanted), *self.shape[1:]), self.dtype)
        # Runs of rows that are in one file.
        for run in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(parts)) + 1):
            if len(run):
                rows = self._opened(part := int(parts[run[0]]))
                values[run] = rows[wanted[run] - (self._ends[part] - len(rows))]
        return values.reshape(*asked.shape, *self.shape[1:])[()]

    def __array__(self, dtype: tf.DType = None, copy: bool | None = None) -> Array:
        everything = self[:]
        return everything if dtype is None else everything.astype(dtype)

    def __repr__(self) -> str:
        return f"Rows(shape={self.shape}, dtype={self.dtype}, files={len(self._files)})"
