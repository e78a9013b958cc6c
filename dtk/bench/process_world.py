"""Worlds of `dtk bench`: processes that are started together and measure together.

Libraries that cannot share a process, such as two communicators, or PyTorch beside TensorFlow, are
worlds beside each other. Every rank has an agent (see `dtk.bench.agent`) that connects to this
process, which says what is measured next.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from dtk.bench import agent, worker
from dtk.bench.measure import WorldLost
from dtk.bench.ranks import Ranks, RanksFailed
from dtk.launch import Job, Process, machines

_START = 300.0  # seconds a world gets to start
_TURN = 1800.0  # and to answer
_END = 10.0  # and to end by itself
_FAIL = 30.0  # and to end when one of its processes has failed


def command(module: str, setting: Mapping[str, object], python: str = sys.executable) -> list[str]:
    """Return what the agents of a world run: `dtk.bench.worker`, by its path: it needs no dtk."""
    # -P: what is beside `worker` is dtk's, and hides nothing of others.
    return [python, "-P", worker.__file__, module, json.dumps(setting)]


class World:
    """A world of processes; see `dtk.bench.measure.World`."""

    def __init__(
        self,
        name: str,
        processes: Sequence[Process],
        size: int,
        *,
        essential: bool = True,
        busy: bool = False,
        remote_shell: str = machines.DEFAULT_REMOTE_SHELL,
    ):
        self.name, self.essential, self._busy = name, essential, busy
        self._unseen = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        output = sys.stderr if essential else self._unseen
        self._ranks: Ranks[worker.Hello, worker.Answer] = Ranks(
            processes, size, output=output, remote_shell=remote_shell
        )

    @property
    def job(self) -> Job:
        """What runs the processes."""
        return self._ranks.job

    @property
    def hello(self) -> list[worker.Hello]:
        """What every rank said first, in rank order."""
        return self._ranks.hello

    def start(self) -> None:
        """Start it, and wait until every rank has said hello."""
        with self._explained():
            self._ranks.start(_START)
        self.rest()

    def ask(self, request: Mapping[str, object]) -> list[worker.Answer]:
        """Ask all processes the same; see `dtk.bench.measure.World.ask`."""
        with self._explained():
            return self._ranks.ask(request, _TURN)

    def rest(self) -> None:
        """Stop the processes until they are asked again, if they are busy meanwhile.

        All must have answered: what one still sends, another waits for.
        """
        if self._busy:
            self.ask(agent.REST)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of a world that is lost why: by the last line of the first that failed."""
        try:
            yield
        except TimeoutError as error:
            raise WorldLost(str(error)) from None
        except RanksFailed:
            if not self._ranks.ended(_FAIL) or self.job.failure is None:
                raise WorldLost("ended too early") from None
            process, code, words = self.job.failure
            host = "" if process.host == "localhost" else f" on {process.host}"
            why = f"{process.name}{host} ended with exit code {code}: {last_words(words)}"
            raise WorldLost(why, code) from None

    def close(self, hurry: bool = False) -> None:
        """End every rank."""
        self._ranks.close(0.0 if hurry else _END, hurry)
        self._unseen.close()


def last_words(output: str) -> str:
    """Return the line that says most: the last exception, or else the last line.

    Example:
        >>> last_words("RuntimeError: no peer\\nmpirun has exited\\n")
        'RuntimeError: no peer'
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (raised or lines or ["it wrote nothing"])[-1]
