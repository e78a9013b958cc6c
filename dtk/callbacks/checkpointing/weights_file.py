"""Files that `model.save_weights` writes, without HDF5 meeting an error of the disk.

HDF5 that cannot write to a file can neither close nor forget it, and may take the process along. So
what it writes goes through here: after the first error all else is dropped, and the error is raised
once HDF5 is done.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

import keras

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryFile(io.BytesIO):
    """Weights in memory."""

    def __str__(self) -> str:
        return "memory.weights.h5"  # Keras looks at the end of the name


def save_weights(model: keras.Model, path: str) -> None:
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

    def __init__(self, path: str):
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
        found = os.pread(self._descriptor, len(view), self._at)
        view[:] = found + bytes(len(view) - len(found))  # zeros for what could not be written
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
