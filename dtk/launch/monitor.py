"""Telling `dtk top` about the jobs that run here: each launcher answers at a socket of its own.

The sockets are in a folder that only this user can enter. Who connects gets one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

_PATIENCE = 5.0  # seconds for an answer, and for its reader


class JobSnapshot(TypedDict):
    """What a launcher tells of its job."""

    pid: int
    title: str
    rows: list[dict[str, str]]  # of a table, one for each process, by column
    slowest: int | str | None


def folders() -> list[Path]:
    """Return where sockets may be, the best place first; a shell by ssh may lack the variable."""
    user = os.getuid()
    runtime, system = os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"
    own = [Path(runtime, "dtk")] if os.path.isabs(runtime) else []
    return [*own, Path(system, "dtk"), Path(f"/tmp/dtk-{user}")]


def _is_mine(folder: Path) -> bool:
    """Return whether it is a folder, not a link, that only this user can enter."""
    with contextlib.suppress(OSError):
        seen = folder.lstat()
        return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o77
    return False


def _listen() -> socket.socket | None:
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_mine(folder):
                listener = socket.socket(socket.AF_UNIX)
                # Processes of two containers may have one number.
                listener.bind(str(folder / f"{os.getpid()}-{secrets.token_hex(4)}.sock"))
                listener.listen()
                return listener
    return None


@contextlib.contextmanager
def serving(snapshot: Callable[[], JobSnapshot]) -> Iterator[None]:
    """Answer with snapshots as long as the block runs, if a folder for the socket can be had."""
    if (listener := _listen()) is None:
        yield
        return

    def serve() -> None:
        with contextlib.suppress(OSError):  # it is shut down
            while True:
                end, _ = listener.accept()
                with end, contextlib.suppress(OSError):
                    end.settimeout(_PATIENCE)
                    end.sendall(json.dumps(snapshot()).encode())

    threading.Thread(target=serve, name="dtk top", daemon=True).start()
    with listener:
        try:
            yield
        finally:
            Path(listener.getsockname()).unlink(missing_ok=True)
            listener.shutdown(socket.SHUT_RDWR)


def jobs() -> list[JobSnapshot]:
    """Ask all launchers of this user's on this machine; remove the sockets of dead ones."""
    snapshots = []
    mine = filter(_is_mine, dict.fromkeys(folders()))
    for path in (path for folder in mine for path in sorted(folder.glob("*.sock"))):
        with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError, ValueError):
            end.settimeout(_PATIENCE)
            try:
                end.connect(str(path))
            except ConnectionRefusedError:  # nobody listens
                path.unlink(missing_ok=True)
                continue
            with end.makefile("rb") as reading:
                snapshots.append(json.loads(reading.read()))
    return snapshots
