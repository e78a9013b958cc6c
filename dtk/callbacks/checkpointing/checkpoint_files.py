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
import io
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import numpy as np

from dtk.callbacks.checkpointing.checkpoint_state import CheckpointState, Packed
from dtk.errors import CheckpointSaveError
from dtk.files import DRAFT, flush, written
from dtk.nests import Array

if TYPE_CHECKING:
    from typing_extensions import Buffer

WEIGHTS, ARRAYS, STATE = "weights.weights.h5", "arrays.npz", "state.json"
_BEST = "best.json"
_NAME = re.compile(r"checkpoint-(\d{8,})")
# What reading JSON and arrays raises where they are not what was written.
_UNREADABLE = (
    *(ValueError, KeyError, AttributeError, TypeError, RecursionError),
    zipfile.BadZipFile,
)


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
        if "://" in os.fspath(directory):
            raise ValueError(
                f"directory={os.fspath(directory)!r} is an address, and checkpoints are written to "
                "a folder; mount it, such as by gcsfuse or s3fs, and give the path of its folder"
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
        names = [entry.name for entry in self.directory.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(names, key=_serial, reverse=True)

    def newest(self) -> str | None:
        """Return the name of the newest complete checkpoint."""
        return next(iter(self.names()), None)

    def next_name(self) -> str:
        """Return the name of the next checkpoint that is written."""
        newest = self.newest()
        return f"checkpoint-{_serial(newest) + 1 if newest else 1:08d}"

    def weights(self, name: str) -> Path:
        """Return the path of one checkpoint's weights."""
        return self.directory / name / WEIGHTS

    def save(
        self,
        save_weights: Callable[[Path], object],
        state: Mapping[str, Packed],
        arrays: Mapping[str, Array],
        keep: int | None,
        best: Mapping[str, object] | None,
    ) -> str:
        """Write a checkpoint, keep it as the best if it has a note of that, and remove old ones."""
        name = None
        try:
            name = self.write(save_weights, state, arrays)
            if best is not None:
                self.keep_best(name, best)
            self.prune(keep)
        except OSError as error:
            what = "no checkpoint" if name is None else f"{name}, but not all beside it,"
            newest = self.newest()
            kept = f"the newest one is {newest}" if newest else "there is none yet"
            raise CheckpointSaveError(
                f"{self.directory}: {what} was written, {kept}: {error}"
            ) from error
        return name

    def write(
        self,
        save_weights: Callable[[Path], object],
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
            save_weights(draft / WEIGHTS)
            with open(draft / ARRAYS, "xb") as stream:
                np.savez(stream, **arrays)  # type: ignore[arg-type]  # no array is its allow_pickle
            digests = {file: digest(draft / file) for file in (WEIGHTS, ARRAYS)}
            digests[STATE] = _digest_of(json.loads(json.dumps(state)))
            with open(draft / STATE, "x") as text:
                text.write(json.dumps({**state, "digests": digests}))
            for file in (WEIGHTS, ARRAYS, STATE):
                flush(draft / file)
            flush(draft)
            os.rename(draft, self.directory / name)
        except BaseException:
            # Half a checkpoint would keep the room that the next one needs.
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.directory)
        return name

    def read(self, name: str) -> tuple[CheckpointState, dict[str, Array]]:
        """Read state and arrays of one checkpoint, once its files have been checked."""
        folder = self.directory / name
        try:
            state = json.loads(_regular(folder / STATE).read_text())
            digests = state.pop("digests")
            # The first checkpoints had none of the state itself.
            digests.setdefault(STATE, digest_of_state := _digest_of(state))
            if digests[STATE] != digest_of_state or digests.keys() != {WEIGHTS, ARRAYS, STATE}:
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
        except _UNREADABLE as error:
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

    def complete_best(self, name: str, note: Mapping[str, object]) -> None:
        """Keep the best where a job has written its checkpoint, and was ended before it kept it."""
        try:
            kept = json.loads((self.directory / _BEST).read_text())
        except (OSError, *_UNREADABLE):
            kept = None
        if kept != note:
            self.keep_best(name, note)

    def keep_best(self, name: str, note: Mapping[str, object]) -> None:
        """Copy one checkpoint's weights to `best.weights.h5`, and a note to `best.json`."""
        with written(self.directory / "best.weights.h5") as draft:
            shutil.copyfile(self.weights(name), draft)
        with written(self.directory / _BEST) as draft:
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


# HDF5 that cannot write to a file can neither close nor forget it, and may take the process along.
# So what it writes goes through an object of Python: after the first error all else is dropped, and
# the error is raised once HDF5 is done.


class MemoryFile(io.BytesIO):
    """Weights in memory."""

    def __str__(self) -> str:
        return "memory.weights.h5"  # Keras looks at the end of the name


def save_weights(model: keras.Model, path: Path) -> None:
    """Write what `model.save_weights` would."""
    with _DiskFile(path) as file:
        try:
            keras.Model.save_weights(model, file)
        finally:
            # Whatever HDF5 has made of it.
            if file.failure is not None:
                raise file.failure


class _DiskFile(MemoryFile):
    """A file that behaves as if every write went well; Keras takes no other kind of object."""

    def __init__(self, path: Path):
        super().__init__()
        self.failure: OSError | None = None
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        self._at = self._size = 0

    def write(self, data: Buffer, /) -> int:
        left = memoryview(data).cast("B")
        end = self._at + len(left)
        try:
            while len(left) and self.failure is None:
                left = left[os.pwrite(self._descriptor, left, end - len(left)) :]
        except OSError as error:
            self.failure = error
        written, self._at, self._size = end - self._at, end, max(self._size, end)
        return written

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        content = os.pread(self._descriptor, len(view), self._at)
        view[:] = content + bytes(len(view) - len(content))  # zeros for what could not be written
        self._at += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None, /) -> int:
        self._size = self._at if size is None else size
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError as error:
            self.failure = self.failure or error
        return self._size

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
