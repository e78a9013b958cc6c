"""Which processes of this machine are connected to one of its processes."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Collection
from pathlib import Path

_LOOPBACK = "0100007F:"  # of /proc/net/tcp, see proc(5)
_ESTABLISHED, _LISTENS = "01", "0A"


def strangers(server: int, own: Collection[int]) -> list[str]:
    """Name those who are connected to a process by 127.0.0.1, beside some that are meant to be."""
    found = []
    with contextlib.suppress(OSError):  # a file of /proc that this user may not read
        for inode, user in _connected(server).items():
            pid = _owner(inode)
            if pid not in own:
                found.append(f"{_named(pid)}user {_user(user)}")
    return found


def _connected(server: int) -> dict[str, int]:
    """Return the sockets that are connected to a process, by their inodes, and whose they are."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = _sockets(server)
    ports = {
        line[1]
        for line in lines
        if line[3] == _LISTENS and line[1].startswith(_LOOPBACK) and line[9] in mine
    }
    return {
        line[9]: int(line[7])
        for line in lines
        if line[2] in ports and line[3] == _ESTABLISHED and line[9] != "0"
    }


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none of one that this user may not look at."""
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/{pid}/fd/{number}"))
    return {name[8:-1] for name in found if name.startswith("socket:[")}


def _owner(inode: str) -> int | None:
    everyone = map(int, filter(str.isdigit, os.listdir("/proc")))
    return next((pid for pid in everyone if inode in _sockets(pid)), None)


def _named(pid: int | None) -> str:
    if pid is None:
        return "a process of "
    with contextlib.suppress(OSError):
        return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()}) of "
    return f"process {pid} of "


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)
