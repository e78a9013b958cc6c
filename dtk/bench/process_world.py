"""Worlds of `dtk bench`: processes that are started together and measure together.

Libraries that cannot share a process, such as two communicators, or PyTorch beside TensorFlow, are
worlds beside each other. Every rank has an agent (see `dtk.bench.agent`) that connects to this
process, which says what is measured next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError, connection
from typing import Any

from dtk.bench import agent, worker
from dtk.bench.measure import WorldLost
from dtk.launch import Job, Process
from dtk.launch.rendezvous import own_address

_START = 300.0  # seconds a world gets to start
_TURN = 1800.0  # and to answer
_END = 10.0  # and to end by itself
_POLL = 1.0


def command(module: str, setting: Mapping[str, Any], python: str = sys.executable) -> list[str]:
    """Return what the agents of a world run: `dtk.bench.worker`, by its path: it needs no dtk.

    Args:
        module: Holds the `Worker`.
        setting: For it.
        python: Of its environment.
    """
    # -P: what is beside `worker` is dtk's, and hides nothing of others.
    return [python, "-P", worker.__file__, module, json.dumps(setting)]


class World:
    """A world of processes; see `dtk.bench.measure.World`.

    Args:
        name: As in tables.
        processes: What to start; each is the agent of one rank, or starts those of all.
        size: How many ranks there are.
        essential: Whether there is nothing to measure without it; what it prints is then shown.
        busy: Whether it computes while nothing is asked of it, and must be stopped.
        remote_shell: Reaches other hosts.

    Attributes:
        hello: What every rank said first, in rank order.
    """

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        size: int,
        *,
        essential: bool = True,
        busy: bool = False,
        remote_shell: str = "ssh",
    ):
        self.name, self.essential, self._size, self._busy = name, essential, size, busy
        self._lines: list[connection.Connection] = []
        self._key = secrets.token_bytes(32)
        self._log = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        address = own_address([process.host for process in processes])
        self._door = socket.create_server((address, 0), backlog=size)
        self.job = Job(
            [self._with_agent(process) for process in processes],
            remote_shell=remote_shell,
            stdout=sys.stderr if essential else self._log,
            stderr=sys.stderr if essential else self._log,
        )
        self.hello: list[dict[str, Any]] = []

    def _with_agent(self, process: Process) -> Process:
        host, port = self._door.getsockname()
        env = {agent.ADDRESS: f"{host}:{port}", agent.KEY: self._key.hex()}
        # Worlds share a GPU: none may take all of its memory.
        env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return dataclasses.replace(process, env={**process.env, **env})

    def start(self) -> None:
        """Start it, and wait until every rank has said hello.

        Raises:
            WorldLost: It cannot.
        """
        self.job.start()
        deadline = time.monotonic() + _START
        with self._door:
            lines = [self._accept(deadline) for _ in range(self._size)]
        said = [(self._hear(line, _START), line) for line in lines]
        said.sort(key=lambda pair: pair[0]["rank"])
        self.hello = [hello for hello, _ in said]
        self._lines = [line for _, line in said]
        self.rest()

    def _accept(self, deadline: float) -> connection.Connection:
        """Wait for an agent that knows the key, as long as none has failed."""
        self._door.settimeout(_POLL)
        while time.monotonic() < deadline:
            try:
                accepted, _ = self._door.accept()
            except TimeoutError:
                if self._ended(0.0):
                    raise self._lost() from None
                continue
            accepted.setblocking(True)
            line = connection.Connection(accepted.detach())
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection.deliver_challenge(line, self._key)
                connection.answer_challenge(line, self._key)
                return line
        raise WorldLost(f"did not start within {_START:g} seconds")

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask all processes the same; see `dtk.bench.measure.World.ask`.

        Args:
            request: What is sent to each.

        Returns:
            Their answers, in rank order.

        Raises:
            WorldLost: One of them has ended.
        """
        try:
            for line in self._lines:
                line.send(request)
        except OSError:
            raise self._lost() from None
        return [self._hear(line, _TURN) for line in self._lines]

    def rest(self) -> None:
        """Stop the processes until they are asked again, if they are busy meanwhile.

        All must have answered: what one still sends, another waits for.
        """
        if self._busy:
            self.ask(agent.REST)

    def _hear(self, line: connection.Connection, patience: float) -> dict[str, Any]:
        try:
            if line.poll(patience):
                answer: dict[str, Any] = line.recv()
                return answer
        except (EOFError, OSError):
            raise self._lost() from None
        raise WorldLost(f"did not answer within {patience:g} seconds")

    def _lost(self) -> WorldLost:
        """Return the error that says why it ended, by the last line of the first that failed."""
        if not self._ended(30.0) or self.job.failure is None:
            return WorldLost("ended too early")
        process, code, words = self.job.failure
        host = "" if process.host == "localhost" else f" on {process.host}"
        why = f"{process.name}{host} ended with exit code {code}: {last_words(words)}"
        return WorldLost(why, code)

    def _ended(self, timeout: float) -> bool:
        with contextlib.suppress(TimeoutError):
            self.job.wait(timeout)
            return True
        return False

    def close(self, hurry: bool = False) -> None:
        """End every rank.

        Args:
            hurry: Do not let them end by themselves.
        """
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        self._ended(_END if self._lines and not hurry else 0.0)
        self.job.stop(hurry)
        for line in self._lines:
            line.close()
        self._door.close()
        self._log.close()


def last_words(output: str) -> str:
    """Return the line that says most: the last exception, or else the last line.

    Args:
        output: What a process wrote.

    Example:
        >>> last_words("RuntimeError: no peer\\nmpirun has exited\\n")
        'RuntimeError: no peer'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or lines or ["it wrote nothing"])[-1]
