"""Files of checkpoints on disk, so that no crash can harm one that is complete.

    directory/
        checkpoint-00000007/    weights.weights.h5   Keras's own format: weights and optimizer
                                arrays.npz           arrays of the state
                                state.json           all the rest, and digests of all three
        checkpoint-00000008/
        best.weights.h5         copy of the best one's weights
        best.json               which epoch, which value
        .writing-.../           a write that is under way, or was cut short

A checkpoint is written under a temporary name, flushed to the disk, and renamed: it is there
completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dtk.callbacks.checkpointing.state import CheckpointState, Packed
from dtk.files import DRAFT, flush, written
from dtk.nests import Array

WEIGHTS, ARRAYS, STATE = "weights.weights.h5", "arrays.npz", "state.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")


class CorruptCheckpointError(Exception):
    """Error of a checkpoint that cannot be read; the message says why."""


class CheckpointFiles:
    """Checkpoints of one directory."""

    def __init__(self, directory: str | os.PathLike[str]):
        if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
            raise ValueError(
                f"directory={directory!r}; expected the path of a folder for checkpoints, such as "
                "'checkpoints'"
            )
        self.directory = Path(directory)

    def check_writable(self) -> None:
        """Make the directory, and find out whether files can be made in it."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            is_file = isinstance(error, FileExistsError)
            why = "it is no directory" if is_file else error.strerror
            raise type(error)(
                error.errno,
                f"no checkpoint can be written ({why}); give another directory, or "
                "make this one writable",
                str(self.directory),
            ) from None

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first."""
        if not self.directory.is_dir():
            return []
        found = [entry.name for entry in self.directory.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=_serial, reverse=True)

    def next_name(self) -> str:
        """Return the name of the next checkpoint that is written."""
        newest = next(iter(self.names()), None)
        return f"checkpoint-{_serial(newest) + 1 if newest else 1:08d}"

    def weights(self, name: str) -> Path:
        """Return the path of one checkpoint's weights."""
        return self.directory / name / WEIGHTS

    def write(
        self,
        save_weights: Callable[[str], object],
        state: Mapping[str, Packed],
        arrays: Mapping[str, Array],
    ) -> str:
        """Write one more checkpoint."""
        name = self.next_name()
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / f"{DRAFT}{name}"
        _remove(draft)
        draft.mkdir()
        try:
            self._fill(draft, save_weights, state, arrays)
            os.rename(draft, self.directory / name)
        except BaseException:
            # Half a checkpoint would keep the room that the next one needs.
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.directory)
        return name

    def _fill(
        self,
        draft: Path,
        save_weights: Callable[[str], object],
        state: Mapping[str, Packed],
        arrays: Mapping[str, Array],
    ) -> None:
        save_weights(str(draft / WEIGHTS))
        with open(draft / ARRAYS, "xb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # no array is its allow_pickle
        digests = {file: digest(draft / file) for file in (WEIGHTS, ARRAYS)}
        digests[STATE] = _digest_of(json.loads(json.dumps(state)))
        with open(draft / STATE, "x") as text:
            text.write(json.dumps({**state, "digests": digests}))
        for file in (WEIGHTS, ARRAYS, STATE):
            flush(draft / file)
        flush(draft)

    def read(self, name: str) -> tuple[CheckpointState, dict[str, Array]]:
        """Read state and arrays of one checkpoint, once its files have been checked."""
        folder = self.directory / name
        try:
            state = json.loads(_regular(folder / STATE).read_text())
            digests = state.pop("digests")
            # The first checkpoints had none of the state itself.
            digests.setdefault(STATE, found := _digest_of(state))
            if digests[STATE] != found or digests.keys() != {WEIGHTS, ARRAYS, STATE}:
                raise CorruptCheckpointError(f"{STATE} is not what was written")
            for file in (WEIGHTS, ARRAYS):
                if digest(_regular(folder / file)) != digests[file]:
                    raise CorruptCheckpointError(f"{file} is not what was written")
            with np.load(folder / ARRAYS, allow_pickle=False) as stored:
                return state, dict(stored)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(f"{Path(error.filename).name} is missing") from error
        except OSError as error:  # a folder in the place of a file, a disk that does not answer
            name = Path(error.filename or folder).name
            raise CorruptCheckpointError(f"{name} cannot be read ({error.strerror})") from error
        except (
            ValueError,
            KeyError,
            AttributeError,
            TypeError,
            RecursionError,
            zipfile.BadZipFile,
        ) as error:
            raise CorruptCheckpointError(f"{STATE} cannot be read ({error})") from error

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest checkpoints."""
        for name in self.names()[keep:] if keep else []:
            # Renamed first: a removal that is cut short leaves no half checkpoint.
            doomed = self.directory / f"{DRAFT}{name}"
            _remove(doomed)
            os.rename(self.directory / name, doomed)
            _remove(doomed)

    def clear_unfinished(self) -> None:
        """Remove what an earlier process left half written."""
        for draft in self.directory.glob(f"{DRAFT}*"):
            _remove(draft)

    def keep_best(self, name: str, note: Mapping[str, object]) -> None:
        """Copy one checkpoint's weights to `best.weights.h5`, and a note to `best.json`."""
        with written(self.directory / "best.weights.h5") as draft:
            shutil.copyfile(self.weights(name), draft)
        with written(self.directory / "best.json") as draft:
            draft.write_text(json.dumps(note))


def _remove(path: Path) -> None:
    """Remove a file or a folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _regular(path: Path) -> Path:
    """Return the path of a file, and not of a pipe, whose reader would wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise CorruptCheckpointError(f"{path.name} is no file")
    return path


def _digest_of(state: object) -> str:
    """Return a digest of what JSON has given back, whatever the order of its keys."""
    text = json.dumps(state, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digest(file: Path) -> str:
    """Return the hash of a file's bytes."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]


def _serial(name: str) -> int:
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else 0
