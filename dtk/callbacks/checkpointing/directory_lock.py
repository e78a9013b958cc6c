"""One job at a time in a directory of checkpoints.

    .lock      held by flock(2) while `fit` runs; says who holds it: host, process id, start time

The kernel lets go of the file when the process ends, however it ends, so that a killed job is in
nobody's way. Where the file system has no flock, the process that is named decides: one that does
not run any more holds nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import weakref
from pathlib import Path

from dtk.cluster import process_owner
from dtk.cluster.variables import RESTARTS
from dtk.errors import CheckpointInUseError

NAME = ".lock"
# Seconds for a job that is just ending, as when a scheduler starts its successor at once.
_PATIENCE = 2.0
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


# The process that holds a directory, as `process_owner.this_process` notes it.
Holder = dict[str, object]


class DirectoryLock:
    """Keeps other jobs out of a directory."""

    def __init__(self, directory: Path, patience: float = _PATIENCE):
        self._directory = directory
        self._patience = patience
        self._descriptor: int | None = None
        mine = weakref.ref(self)
        # A process that is forked from this one would hold the lock beyond this one's end.
        os.register_at_fork(after_in_child=lambda: _forget(mine))

    def take(self) -> None:
        """Hold the directory until `release`, or the end of this process."""
        deadline = time.monotonic() + self._patience
        while self._descriptor is None:
            holder = self._try()
            if self._descriptor is None and time.monotonic() >= deadline:
                raise CheckpointInUseError(self._refusal(holder))
            if self._descriptor is None:
                time.sleep(0.1)

    def release(self) -> None:
        """Let go of the directory, and leave no trace."""
        if self._descriptor is not None:
            # While it is held: nobody else's file can have this name. A disk may be read-only now.
            with contextlib.suppress(OSError):
                (self._directory / NAME).unlink(missing_ok=True)
            self.forget()

    def _try(self) -> Holder | None:
        """Try once; return who holds it, where that is known."""
        path = self._directory / NAME
        descriptor = _opened(path)
        try:
            holder = _read(descriptor)
            locked = _flock(descriptor)
            free = _is_free(holder) if locked is None else locked
            # Released in between, the file is not there any more, and its lock keeps nobody out.
            if free and _is_there(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(process_owner.this_process()).encode(), 0)
                self._descriptor = descriptor
            return holder
        finally:
            if self._descriptor is None:
                os.close(descriptor)

    def _refusal(self, holder: Holder | None) -> str:
        who = "another process"
        if holder is not None:
            who = f"process {holder['pid']} on {process_owner.host_of(holder)}"
        return (
            f"{self._directory}: {who} saves its checkpoints there; end that job first, or give "
            "this one another directory"
        )

    def forget(self) -> None:
        """Close the file; the lock goes with the last process that has it open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _forget(reference: weakref.ref[DirectoryLock]) -> None:
    lock = reference()
    if lock is not None:
        lock.forget()


def _opened(path: Path) -> int:
    """Open the file, or make it."""
    try:
        # Not to wait for a pipe's reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
            return descriptor
        os.close(descriptor)
    raise OSError(
        errno.ELOOP,
        "the name of dtk's lock file is taken by a link, or by something that is no regular file; "
        "find out who made it, then remove it, or give another directory",
        str(path),
    )


def _flock(descriptor: int) -> bool | None:
    """Return whether the file could be locked; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_there(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _read(descriptor: int) -> Holder | None:
    """Return who has written the file; None where nobody has, or not to its end."""
    try:
        fields = json.loads(os.pread(descriptor, 4096, 0))
        kinds = {"host": str, "pid": int, "since": float}
        return {name: kind(fields[name]) for name, kind in kinds.items()}
    except (ValueError, KeyError, TypeError):
        return None


def _is_free(holder: Holder | None) -> bool:
    """Return whether nobody holds the directory any more, as far as can be told from here."""
    if holder is None:
        return True
    gone = process_owner.is_gone(holder)
    if gone is not None:
        return gone
    # Of another host nothing is known, unless `dtk run` has ended that job and started it again.
    here = process_owner.host_of(holder) == socket.gethostname()
    return here or os.environ.get(RESTARTS, "0") not in ("", "0")
