"""A job whose ranks connect to this process, and are asked in turn: `dtk bench` and tests of ranks.

Ranks ── Job ──────── rank: worker.connect()
  └── Connection ───────┴── says (its rank, anything); then one answer to each request
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import AuthenticationError, connection
from typing import TextIO, TypeAlias, cast

from dtk.bench import worker
from dtk.errors import DtkError
from dtk.launch import Job, JobSpec, Process, ssh
from dtk.launch.job_run import JobRun
from dtk.launch.starter import own_address

_POLL = 1.0
_OTHERS = 1.0  # seconds that others have to answer after one has failed

# Anything can be sent and received.
_Line: TypeAlias = "connection.Connection[object, object]"


class NoAnswer(str):
    """Why a rank has no answer."""


ENDED = NoAnswer("the process ended")


class RanksFailed(DtkError, RuntimeError):
    """Some ranks failed, or ended before they could be asked."""

    def __init__(self, failures: Mapping[int, NoAnswer]):
        self.failures = failures
        told = [f"rank {rank}: {why}" for rank, why in sorted(failures.items())]
        super().__init__("\n".join(told) or "the processes ended before they could be asked")


class Ranks:
    """The ranks of a job, each with a connection by which it is asked."""

    def __init__(
        self,
        processes: Sequence[Process],
        size: int,
        *,
        output: TextIO,
        grace: float = 5.0,
        remote_shell: str = ssh.DEFAULT_REMOTE_SHELL,
    ):
        self._size = size
        self._lines: list[_Line] = []
        self._key = secrets.token_bytes(32)
        address = own_address([process.host for process in processes])
        self._door = socket.create_server((address, 0), backlog=size)
        env = {worker.ADDRESS: "{}:{}".format(*self._door.getsockname())}
        env[worker.KEY] = self._key.hex()
        spec = JobSpec(
            processes=tuple(one.with_env(env) for one in processes),
            remote_shell=remote_shell,
            grace=grace,
            stall_timeout=0.0,
            max_restarts=3,  # of workers behind servers: it is started once
        )
        self._run = JobRun(spec, stdout=output, stderr=output)
        self.hello: list[object] = []  # what each said first, in rank order

    @property
    def job(self) -> Job:
        """What runs, once it is started."""
        return self._run.jobs[-1]

    @property
    def alive(self) -> bool:
        """Whether they can be asked."""
        return bool(self._lines)

    def start(self, timeout: float) -> None:
        """Start the job, and wait until every rank has said hello."""
        self._run.start()
        with self._door:
            deadline = time.monotonic() + timeout
            while len(self._lines) < self._size:
                self._lines.append(self._accept(deadline))
        # Pickled objects have no type: the process that sends them has it.
        said = cast(list[tuple[int, object]], self._hear(timeout))
        ordered = sorted(zip(said, self._lines, strict=True), key=lambda one: one[0][0])
        self.hello = [hello for (_, hello), _ in ordered]
        self._lines = [line for _, line in ordered]

    def _accept(self, deadline: float) -> _Line:
        """Wait for a process that knows the key, as long as the job runs."""
        while time.monotonic() < deadline:
            if not connection.wait([self._door], _POLL):
                if self.ended(0.0):
                    raise RanksFailed({})
                continue
            line: _Line = connection.Connection(self._door.accept()[0].detach())
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection.deliver_challenge(line, self._key)
                connection.answer_challenge(line, self._key)
                return line
        raise TimeoutError(f"only {len(self._lines)} of {self._size} ranks connected in time")

    def ask(
        self, request: object, timeout: float, meanwhile: Callable[[], object] = lambda: None
    ) -> list[object]:
        """Ask all ranks the same, and wait for their answers."""
        for line in self._lines:
            with contextlib.suppress(OSError):  # it has ended, which is found out below
                line.send(request)
        meanwhile()
        return self._hear(timeout)

    def _hear(self, timeout: float) -> list[object]:
        """Wait for a message of every rank."""
        deadline = time.monotonic() + timeout
        heard: dict[int, object] = {}
        failures: dict[int, NoAnswer] = {}
        while missing := {line: n for n, line in enumerate(self._lines) if n not in heard}:
            ready = connection.wait(list(missing), max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                late = sorted(missing.values())
                raise TimeoutError(f"no answer from ranks {late} after {timeout:g} s")
            heard |= {rank: _received(line) for line, rank in missing.items() if line in ready}
            failures = {rank: one for rank, one in heard.items() if isinstance(one, NoAnswer)}
            if failures:
                # The others usually fail too, or wait for ever: hear them out, but briefly.
                deadline = min(deadline, time.monotonic() + _OTHERS)
        if failures:
            raise RanksFailed(failures)
        return [heard[rank] for rank in range(self._size)]

    def ended(self, timeout: float) -> bool:
        """Return whether all processes end in time."""
        with contextlib.suppress(TimeoutError):
            self.job.wait(timeout)
            return True
        return False

    def close(self, patience: float = 0.0, hurry: bool = False) -> None:
        """End every process; safe to call twice."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.send(None)
        if self._lines:
            self.ended(patience)
        self.job.stop(hurry)
        for line in self._lines:
            line.close()
        self._lines = []
        self._door.close()


def _received(line: _Line) -> object:
    try:
        return line.recv()
    except (EOFError, OSError):
        return ENDED
