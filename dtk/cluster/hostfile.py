"""Hosts, and how many processes each takes.

# one host per line, in the order ranks are placed
node1 slots=4
node2:4
node3                # one slot
node1 slots=2        # summed: node1 has 6
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

from dtk.errors import ClusterError

_NAME = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[\w.-]*\w)?)"
_WORD = re.compile(rf"(?P<name>{_NAME})(?::(?P<slots>\d+))?", re.ASCII)
_SETTING = re.compile(r"(?P<key>[a-z_-]+)=(?P<value>\S*)")
# Open MPI's hostfiles may also carry these; they change nothing here.
_IGNORED = ("max_slots", "max-slots", "port")


@dataclasses.dataclass(frozen=True)
class Host:
    """One host and how many processes it takes.

    Attributes:
        name: Host name or address.
        slots: Number of processes.

    >>> Host("node1", 4)
    Host(name='node1', slots=4)
    """

    name: str
    slots: int = 1


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse the value of `--hosts`.

    Args:
        text: Comma-separated `host:slots`; a bare host has one slot.

    Returns:
        Hosts in the order given, slots of a repeated host summed.

    Raises:
        ClusterError: An entry is malformed, or there is none.

    >>> parse_hosts("h1:2,h2:2")
    (Host(name='h1', slots=2), Host(name='h2', slots=2))
    """
    entries = [entry.strip() for entry in text.split(",")]
    return _merge(_parse_entry(entry, f"hosts {text!r}") for entry in entries)


def parse_hostfile(text: str, name: str = "hostfile") -> tuple[Host, ...]:
    """Parse the text of a hostfile.

    Args:
        text: Lines of `host slots=n`, `host:n` or `host`; `#` starts a comment.
        name: What error messages call the file.

    Returns:
        Hosts in the order given, slots of a repeated host summed.

    Raises:
        ClusterError: A line is malformed (the message starts with `name:line`), or no host is
            named.

    >>> parse_hostfile("node1 slots=2  # fast\\n\\nnode2:1\\n")
    (Host(name='node1', slots=2), Host(name='node2', slots=1))
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", 1)[0].strip()
        if content:
            hosts.append(_parse_entry(content, f"{name}:{number}"))
    if not hosts:
        raise ClusterError(f"{name} names no host; write one `host slots=n` per line")
    return _merge(hosts)


def read_hostfile(path: str | os.PathLike[str]) -> tuple[Host, ...]:
    """Read and parse a hostfile.

    Args:
        path: The file.

    Returns:
        Hosts in the order given, slots of a repeated host summed.

    Raises:
        ClusterError: The file cannot be read or a line is malformed.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w") as f:
    ...     _ = f.write("node1 slots=2")
    ...     f.flush()
    ...     read_hostfile(f.name)
    (Host(name='node1', slots=2),)
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ClusterError(
            f"cannot read hostfile {os.fspath(path)}: {cause}; expected one `host slots=n` per line"
        ) from None
    return parse_hostfile(text, os.fspath(path))


def _parse_entry(content: str, where: str) -> Host:
    expected = "expected `host slots=n`, `host:n` or `host`"
    word, *settings = content.split() or [""]
    match = _WORD.fullmatch(word)
    if match is None:
        raise ClusterError(f"{where}: {content!r} is not a host; {_meant(word) or expected}")
    slots = match["slots"]
    for setting in settings:
        pair = _SETTING.fullmatch(setting)
        if pair is None or pair["key"] not in ("slots", *_IGNORED):
            raise ClusterError(f"{where}: {setting!r} is not understood; {expected}")
        if pair["key"] == "slots":
            if slots is not None:
                raise ClusterError(f"{where}: {content!r} gives the slots twice; {expected}")
            slots = pair["value"]
    if slots is None:
        return Host(match["name"])
    if not re.fullmatch(r"[0-9]{1,9}", slots) or int(slots) < 1:
        raise ClusterError(
            f"{where}: {content!r} has {slots!r} slots, expected a number of 1 or more"
        )
    return Host(match["name"], int(slots))


def _meant(word: str) -> str:
    """Return what to write for a word of another tool's; empty if it is none."""
    if "@" in word:
        user, _, name = word.partition("@")
        return f"write {name}, and `User {user}` for it in ~/.ssh/config"
    if "[" in word:
        return f"write one name each, as `scontrol show hostnames {word}` prints them"
    if "::" in word or word.count(":") > 4:
        return "for an IPv6 address, write a name that /etc/hosts or ~/.ssh/config gives it"
    return ""


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())
