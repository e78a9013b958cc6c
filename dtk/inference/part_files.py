"""Predictions on disk: one file for each part and output, and a manifest of all.

    directory/
        manifest.json                  the plan; when all is there, the rows of every part
        output/part-00000.npy          a model with one output
        output/part-00001.npy
        output.logits/part-00000.npy   one with several: named as in the structure it returns
        .writing-...                   a write that is under way, or was cut short

A file is written under another name, flushed to the disk and renamed: a part is there completely or
not at all, and a run that goes on makes the missing ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dtk.files import DRAFT, written
from dtk.inference.rows import Rows
from dtk.nests import Array, Nest

MANIFEST = "manifest.json"
_FORMAT = "dtk predictions, 1"

# How outputs are nested, written to JSON: the name of a folder, or ["list" or "tuple", parts], or
# ["dict", {name: part}].
Shape: TypeAlias = "str | list[str | list[Shape] | dict[str, Shape]]"


@dataclasses.dataclass(frozen=True)
class Output:
    """One output of a model."""

    dtype: str  # of its entries, as NumPy calls it
    shape: tuple[int, ...]  # of one row


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
    structure: Shape  # how outputs are nested
    outputs: dict[str, Output]  # each output, by the name of its folder
    parts: tuple[int, ...] | None = None  # rows of each part, when all are there; None before


def outputs_of(predicted: Nest, name: str = "output") -> tuple[Shape, dict[str, Array]]:
    """Name the arrays of a structure.

    Example:
        >>> shape, arrays = outputs_of({"a": np.zeros(2), "b": (np.ones(2),)})
        >>> list(arrays), shape
        (['output.a', 'output.b.0'], ['dict', {'a': 'output.a', 'b': ['tuple', ['output.b.0']]}])
    """
    arrays: dict[str, Array] = {}

    def of(part: Nest, name: str) -> Shape:
        if isinstance(part, dict):
            return ["dict", {key: of(each, f"{name}.{key}") for key, each in part.items()}]
        if isinstance(part, list | tuple):
            kind = "list" if isinstance(part, list) else "tuple"
            return [kind, [of(each, f"{name}.{index}") for index, each in enumerate(part)]]
        # A name of a layer may be a path.
        folder = name.replace("/", "_")
        arrays[folder] = _storable(np.asarray(part), folder)
        return folder

    return of(predicted, name), arrays


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


def structured(shape: Shape, arrays: Mapping[str, Array | Rows]) -> Nest:
    """Nest arrays as a model returned them."""
    if isinstance(shape, str):
        return arrays[shape]
    kind, parts = shape
    if isinstance(parts, dict):
        return {name: structured(part, arrays) for name, part in parts.items()}
    assert not isinstance(parts, str)
    nested = [structured(part, arrays) for part in parts]
    return nested if kind == "list" else tuple(nested)


class PartFiles:
    """Files of one directory of predictions."""

    def __init__(self, directory: Path):
        self.directory = directory

    def manifest(self) -> Manifest | None:
        """Return what the directory says of itself; None where it says nothing."""
        file = self.directory / MANIFEST
        if not file.is_file():
            return None
        try:
            said = json.loads(file.read_text())
            if said.pop("format") != _FORMAT:
                raise ValueError("another format")
            said["outputs"] = {
                name: Output(dtype, tuple(shape))
                for name, (dtype, shape) in said["outputs"].items()
            }
            said["parts"] = None if said["parts"] is None else tuple(said["parts"])
            return Manifest(**said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is not what predict_to_disk writes ({error}); give another directory, or "
                "remove this file"
            ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace the manifest, and make the folders of its outputs."""
        for name in manifest.outputs:
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        said = dataclasses.asdict(manifest)
        said["outputs"] = {
            name: (each.dtype, each.shape) for name, each in manifest.outputs.items()
        }
        with written(self.directory / MANIFEST) as draft:
            draft.write_text(json.dumps({"format": _FORMAT, **said}, indent=1))

    def clear(self) -> None:
        """Remove everything that was predicted, the manifest first."""
        manifest = self.manifest()
        (self.directory / MANIFEST).unlink(missing_ok=True)
        for name in manifest.outputs if manifest else ():
            for file in (self.directory / name).glob("part-*.npy"):
                file.unlink()

    def clear_drafts(self) -> None:
        """Remove what a killed process has left half written."""
        for draft in self.directory.rglob(f"{DRAFT}*"):
            draft.unlink(missing_ok=True)

    def file(self, name: str, part: int) -> Path:
        """Return the file of one output's part."""
        return self.directory / name / f"part-{part:05d}.npy"

    def write(self, part: int, arrays: dict[str, Array]) -> None:
        for name, rows in arrays.items():
            with written(self.file(name, part)) as draft, open(draft, "wb") as stream:
                np.save(stream, rows, allow_pickle=False)

    def rows(self, manifest: Manifest, part: int) -> int | None:
        """Return how many rows a part has; None if it is not there completely."""
        counts = set()
        for name, output in manifest.outputs.items():
            try:
                rows = np.load(self.file(name, part), mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError):  # not there, or not whole
                return None
            if (rows.shape[1:], rows.dtype.name) != (output.shape, output.dtype):
                return None
            counts.add(len(rows))
        return counts.pop() if len(counts) == 1 else None

    def numbers(self, manifest: Manifest) -> Iterator[int]:
        """Return the numbers of the parts of which some file is there."""
        names = {file.stem for name in manifest.outputs for file in self._parts(name)}
        yield from sorted(int(name.removeprefix("part-")) for name in names)

    def _parts(self, name: str) -> Iterator[Path]:
        yield from (self.directory / name).glob("part-*.npy")
