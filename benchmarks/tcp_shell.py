"""A remote shell over one TCP connection: like ssh's, it breaks when the network does.

    python benchmarks/tcp_shell.py serve 4022                      # on a host
    python benchmarks/tcp_shell.py call 4022 10.0.0.2 hostname     # on another one

`ip netns exec` reaches a namespace without its network, so a link that is cut does not cut it. Like
sshd, the server closes a command's standard input when the connection ends, and notices nothing of
one that was cut. It asks for no password: for namespaces only.

`served` gives a host processes of its own as well, of which other hosts see nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HEAD = struct.Struct(">cI")  # what follows, and how many bytes
COMMAND, INPUT, OUTPUT, ERRORS, CODE = b"c", b"i", b"o", b"e", b"x"
LOST = 255  # the exit code of ssh, too
READY = "ready"
PORT = 4022  # of `served`: in a new namespace nobody else listens


@contextlib.contextmanager
def served(shell: str, address: str) -> Iterator[str]:
    """Serve on a host for a while; what was started there is killed then.

    Args:
        shell: Reaches the host, otherwise than over its network.
        address: Of the host.

    Yields:
        A program to call as `ssh` is.
    """
    this = f"{sys.executable} -I -S {Path(__file__).resolve()}"
    own = "exec unshare --pid --fork --kill-child --mount-proc"
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [shell, address, f"{own} {this} serve {PORT}"], stdout=subprocess.PIPE, text=True
        ) as server,
    ):
        assert server.stdout is not None
        try:
            if server.stdout.readline().strip() != READY:
                raise RuntimeError(f"no shell could be served on {address}")
            program = Path(folder, "shell")
            program.write_text(f'#!/bin/sh\nexec {this} call {PORT} "$@"\n')
            program.chmod(0o755)
            yield str(program)
        finally:
            server.kill()


def serve(port: int) -> None:
    """Run commands that callers send, until this process is killed."""
    with socket.create_server(("", port)) as door:
        print(READY, flush=True)
        while True:
            connection, _ = door.accept()
            threading.Thread(target=run, args=(connection,), daemon=True).start()


def run(connection: socket.socket) -> None:
    """Run one command, with a caller's input and output."""
    with connection:
        _, command = receive(connection)
        child = subprocess.Popen(
            ["sh", "-c", command.decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        lock = threading.Lock()

        def pump(pipe: IO[bytes], kind: bytes) -> None:
            with pipe, contextlib.suppress(OSError):
                while data := os.read(pipe.fileno(), 1 << 16):
                    send(connection, kind, data, lock)

        threading.Thread(target=feed, args=(connection, child.stdin), daemon=True).start()
        pumps = [
            threading.Thread(target=pump, args=ends, daemon=True)
            for ends in ((child.stdout, OUTPUT), (child.stderr, ERRORS))
        ]
        for thread in pumps:
            thread.start()
        code = child.wait()
        for thread in pumps:
            thread.join(1.0)  # what it has started may keep its output open
        with contextlib.suppress(OSError):
            send(connection, CODE, bytes([code % 256 if code >= 0 else 128 - code]), lock)


def feed(connection: socket.socket, stdin: IO[bytes]) -> None:
    """Pass a caller's input on to a command, until there is none or the connection ends."""
    with contextlib.suppress(OSError), stdin:
        while True:
            _, data = receive(connection)
            if not data:
                return
            stdin.write(data)
            stdin.flush()


def call(port: int, host: str, command: str) -> int:
    """Have a command run on a host; returns its exit code, or `LOST`."""
    try:
        connection = socket.create_connection((host, port), timeout=10)
    except OSError as error:
        print(f"tcp_shell: {host}: {error}", file=sys.stderr)
        return LOST
    connection.settimeout(None)
    lock = threading.Lock()

    def pass_on() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, 1 << 16):
                send(connection, INPUT, data, lock)
            send(connection, INPUT, b"", lock)

    try:
        send(connection, COMMAND, command.encode(), lock)
        threading.Thread(target=pass_on, daemon=True).start()
        while True:
            kind, data = receive(connection)
            if kind == CODE:
                return data[0]
            write(1 if kind == OUTPUT else 2, data)
    except OSError as error:
        print(f"tcp_shell: the connection to {host} is lost: {error}", file=sys.stderr)
        return LOST


def write(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def send(connection: socket.socket, kind: bytes, data: bytes, lock: threading.Lock) -> None:
    """Send a piece, after those of other threads."""
    with lock:
        connection.sendall(HEAD.pack(kind, len(data)) + data)


def receive(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the next piece, and what it is.

    Raises:
        OSError: The connection has ended.
    """
    kind, size = HEAD.unpack(exactly(connection, HEAD.size))
    return kind, exactly(connection, size)


def exactly(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; `OSError` if they do not come."""
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the other side has closed it")
        found += part
    return found


def main() -> None:
    """Serve, or call."""
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    code = call(int(sys.argv[2]), sys.argv[3], " ".join(sys.argv[4:]))
    sys.stdout.flush()
    os._exit(code)  # a thread may still wait for input


if __name__ == "__main__":
    main()
