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
import select
import socket
import struct
import time
from collections.abc import Mapping

HANDSHAKE = 5.0  # seconds for one message of it
_LAST_CAME = 52  # where tcp(7)'s tcp_info has it for data, and then for acknowledgements
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
        self._unsent = b""

    def send(self, payload: object) -> None:
        """Send a message; of one thread at a time."""
        rest, self._unsent = self._unsent, b""
        self.end.sendall(rest + self._next(payload))

    def offer(self, payload: object) -> None:
        """Send a message without waiting; not if the other end does not take those before it."""
        self._send_rest()
        if not self._unsent:
            self._unsent = self._next(payload)
            self._send_rest()

    def _send_rest(self) -> None:
        room = select.poll()
        room.register(self.end, select.POLLOUT)
        while self._unsent and room.poll(0):
            self._unsent = self._unsent[self.end.send(self._unsent) :]

    def _next(self, payload: object) -> bytes:
        text = json.dumps(payload).encode()
        code = _code(self._mine, self._sent, text)
        self._sent += 1
        return code + text + b"\n"

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

    def probe(self) -> None:
        """Ask the other host's system now and then whether it is there; see `silence`."""
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds in {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5}.items():
            self.end.setsockopt(socket.IPPROTO_TCP, option, seconds)

    def silence(self) -> float:
        """Return the seconds since the other host's system was heard of.

        That answers for a process that is busy, or stopped, too.
        """
        info = self.end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_CAME + 8)
        data, acknowledgement = struct.unpack_from("II", info, _LAST_CAME)  # milliseconds ago
        return min(data, acknowledgement) / 1000

    def end_at_silence(self, seconds: float) -> None:
        """Have the connection end if the other end takes nothing for so long, or is not there."""
        self.probe()
        milliseconds = int(1000 * seconds)
        self.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


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


def welcome(end: socket.socket, secret: bytes) -> tuple[int, Line] | None:
    """Return who has come, by its number; None of a stranger."""
    strange = (OSError, ValueError, KeyError, TypeError)
    with contextlib.suppress(*strange), contextlib.ExitStack() as undo:
        undo.enter_context(end)
        line = introduce(end, secret, is_listener=True)
        number = int(str(line.receive_one(HANDSHAKE)["number"]))
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
