"""Which process has something, noted so that other processes can see whether it still runs."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil


def this_process() -> dict[str, object]:
    """Return what this process is known by, on this host and others."""
    return {"host": _host(), "pid": os.getpid(), "since": psutil.Process().create_time()}


@functools.cache
def _host() -> str:
    """Return a name of this host's processes: a container has other ones, and so has a reboot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = ""
    return f"{socket.gethostname()} {boot} {space}"


def host_of(process: Mapping[str, object]) -> str:
    """Return the name of a process's host."""
    return str(process.get("host")).partition(" ")[0]


def is_gone(process: Mapping[str, object]) -> bool | None:
    """Return whether a process has ended; None if that cannot be seen from here."""
    if process.get("host") != _host():
        return None
    try:
        owner = psutil.Process(int(str(process["pid"])))
        # An id alone may be used again.
        same = abs(owner.create_time() - float(str(process["since"]))) < 1
        return not same or owner.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
