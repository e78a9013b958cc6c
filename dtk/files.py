"""Files that are on the disk whole, or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# Names of drafts begin so; one that a killed process has left behind may be removed.
DRAFT = ".writing-"


def flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create(path: Path) -> None:
    """Make an empty file in the place of what has its name.

    Where others may write to the folder, too, that may be a link to a file that only this user may
    change: it is removed, and never followed.
    """
    path.unlink(missing_ok=True)
    path.touch(exist_ok=False)


@contextlib.contextmanager
def written(file: Path) -> Iterator[Path]:
    """Give the block a draft to write, which becomes the file when the block ends well.

    The draft is flushed to the disk before it is renamed, and the folder after: a file that is
    there is whole, even after a crash of the machine.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as place:
        ...     with written(Path(place, "file")) as draft:
        ...         _ = draft.write_text("whole")
        ...     os.listdir(place), Path(place, "file").read_text()
        (['file'], 'whole')
    """
    draft = file.with_name(f"{DRAFT}{os.getpid()}-{file.name}")
    create(draft)
    try:
        yield draft
        flush(draft)
        draft.replace(file)
        flush(file.parent)
    finally:
        draft.unlink(missing_ok=True)
