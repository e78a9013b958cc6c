"""A connection whose messages nobody else can make, change or repeat, among who knows a secret.

With an empty secret anybody can make them.

Uses the standard library alone, see `dtk.launch.agent`.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import multiprocessing.connection
import os
import socket
import time
from collections.abc import Mapping

HANDSHAKE = 5.0  # seconds for one message of it
# Seconds for one message of who has come, and may be a stranger: less, since others wait meanwhile.
_STRANGER = 2.0
_CODE = 32  # hexadecimal digits
_LONGEST = 1 << 26  # bytes of a message


class Line:
    """One end of a connection."""

    def __init__(self, end: socket.socket, secret: bytes, nonces: bytes, is_listener: bool) -> None:
        self.end = end
        keys = [hmac.digest(secret, side + nonces, "sha256") for side in (b"listener", b"client")]
        self._mine, self._theirs = keys if is_listener else keys[::-1]
        self._sent = self._received = 0
        self._rest = b""
        self._unread: list[Mapping[str, object]] = []

    def send(self, payload: object) -> None:
        """Send a message; of one thread at a time."""
        text = json.dumps(payload).encode()
        self.end.sendall(_code(self._mine, self._sent, text) + text + b"\n")
        self._sent += 1

    def receive(self) -> list[Mapping[str, object]]:
        """Return the messages that have come; wait for some."""
        read = self.end.recv(1 << 16)
        if not read:
            raise ConnectionResetError("the other end is gone")
        *lines, self._rest = (self._rest + read).split(b"\n")
        if len(self._rest) > _LONGEST:
            raise PermissionError("a message that is too long to be of a rank")
        messages, self._unread = self._unread, []
        for line in lines:
            code, text = line[:_CODE], line[_CODE:]
            if not hmac.compare_digest(code, _code(self._theirs, self._received, text)):
                raise PermissionError("a message of somebody else")
            self._received += 1
            messages.append(json.loads(text))
        return messages

    def is_over(self) -> bool:
        """Drop what has come, and return whether the other end is gone."""
        try:
            while multiprocessing.connection.wait([self.end], 0):
                self.receive()
        except (OSError, ValueError):
            return True
        return False

    def receive_one(self, seconds: float) -> Mapping[str, object]:
        """Return the message that has come first; wait so long for it."""
        deadline = time.monotonic() + seconds
        while not self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not multiprocessing.connection.wait([self.end], left):
                raise TimeoutError(f"no message within {seconds:g} s")
            self._unread = self.receive()
        return self._unread.pop(0)

    def end_at_silence(self, seconds: float) -> None:
        """Have the connection end once the other host's system has been silent for so long.

        That answers for a process that is busy, or stopped, too.
        """
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {
            socket.TCP_KEEPIDLE: 15,
            socket.TCP_KEEPINTVL: 5,
            # milliseconds: of probes, and of what has been sent and was not acknowledged
            socket.TCP_USER_TIMEOUT: int(1000 * seconds),
        }.items():
            self.end.setsockopt(socket.IPPROTO_TCP, option, value)


def _code(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, b"%d " % number + text, "sha256").hex()[:_CODE].encode()


def introduce(
    end: socket.socket, secret: bytes, is_listener: bool, patience: float = HANDSHAKE
) -> Line:
    """Make a connection one that nobody has had before, by a number of each end."""
    end.settimeout(patience)
    mine = os.urandom(16)
    end.sendall(mine)
    theirs = end.recv(16)
    if len(theirs) < 16:
        raise ConnectionResetError("the other end is gone")
    return Line(end, secret, mine + theirs if is_listener else theirs + mine, is_listener)


def accept(listener: socket.socket, secret: bytes) -> tuple[int, Line] | None:
    """Return who has come, by its number; None of a stranger."""
    with contextlib.suppress(OSError, ValueError, KeyError), contextlib.ExitStack() as undo:
        end = undo.enter_context(listener.accept()[0])
        line = introduce(end, secret, is_listener=True, patience=_STRANGER)
        number = int(str(line.receive_one(_STRANGER)["number"]))
        line.send({})
        undo.pop_all()
        return number, line
    return None


def reach(
    address: tuple[str, int], secret: bytes, number: int, patience: float = HANDSHAKE
) -> Line:
    """Return a connection to where somebody accepts who knows the secret, as this number."""
    with contextlib.ExitStack() as undo:
        end = undo.enter_context(socket.create_connection(address, timeout=patience))
        line = introduce(end, secret, is_listener=False, patience=patience)
        line.send({"number": number})
        line.receive_one(patience)
        undo.pop_all()
        return line
