"""Write files that are on the disk whole or not at all, even if the process or machine stops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# The names of drafts begin so; a draft that a killed process left behind may be removed.
DRAFT = ".writing-"


def flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written(file: Path) -> Iterator[Path]:
    """Give the block a draft to write; it becomes the file if the block does not fail.

    The draft is flushed to the disk before it is renamed, and the folder after it: a file that
    exists is whole, even after the machine crashes. A device or a pipe is written itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with written(Path(place, "file")) as draft:
        ...         _ = draft.write_text("whole")
        ...     os.listdir(place), Path(place, "file").read_text()
        (['file'], 'whole')
    """
    if file.exists() and not file.is_file():  # /dev/null or a pipe, which stays what it is
        yield file
        return
    draft = file.with_name(f"{DRAFT}{os.getpid()}-{file.name}")
    # Where other users may write to the folder, the name may be their link to a file that only this
    # user may change. So the link is removed, never followed.
    draft.unlink(missing_ok=True)
    draft.touch(exist_ok=False)
    try:
        yield draft
        flush(draft)
        draft.replace(file)
        flush(file.parent)
    finally:
        draft.unlink(missing_ok=True)
