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

from dtk.launch.events import Event

_PATIENCE = 5.0  # seconds for an answer, and for its reader


def folders() -> list[Path]:
    """Return where sockets may be, the best place first; a shell by ssh may lack the variable."""
    user = os.getuid()
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    system = [Path(given)] if os.path.isabs(given) else []
    system.append(Path(f"/run/user/{user}"))
    own = [place / "dtk" for place in dict.fromkeys(system) if place.is_dir()]
    return [*own, Path(f"/tmp/dtk-{user}")]


def _is_mine(folder: Path) -> bool:
    """Return whether it is a folder, not a link, that only this user can enter."""
    with contextlib.suppress(OSError):
        seen = folder.lstat()
        return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o77
    return False


@contextlib.contextmanager
def serving(snapshot: Callable[[], Event]) -> Iterator[None]:
    """Answer with snapshots as long as the block runs, if a folder for the socket can be had."""
    with contextlib.ExitStack() as held:
        for folder in folders():
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, exist_ok=True)
                if not _is_mine(folder):
                    continue
                # Processes of two containers may have one number.
                path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.sock"
                listener = held.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(path))
                held.callback(path.unlink, missing_ok=True)
                listener.listen()
                held.callback(listener.shutdown, socket.SHUT_RDWR)
                serve = threading.Thread(target=_serve, args=(listener, snapshot), daemon=True)
                serve.start()
                break
        yield


def _serve(listener: socket.socket, snapshot: Callable[[], Event]) -> None:
    while True:
        try:
            end, _ = listener.accept()
        except OSError:  # it is closed
            return
        with end, contextlib.suppress(OSError):
            end.settimeout(_PATIENCE)
            end.sendall(json.dumps(snapshot()).encode())


def jobs() -> list[Event]:
    """Ask all launchers of this user's on this machine; remove the sockets of dead ones."""
    found = []
    for folder in filter(_is_mine, folders()):
        for path in sorted(folder.glob("*.sock")):
            with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError, ValueError):
                end.settimeout(_PATIENCE)
                try:
                    end.connect(str(path))
                except (ConnectionRefusedError, FileNotFoundError):  # nobody listens
                    path.unlink(missing_ok=True)
                    continue
                with end.makefile("rb") as reading:
                    told = json.loads(reading.read())
                found.append(told)
    return found
