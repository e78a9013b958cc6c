"""MPI's server of one machine, seen from who has started it; see `dtk.cluster.pmix`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dtk.cluster import pmix, slurm
from dtk.cluster.report_channel import write_line
from dtk.cluster.variables import JOB_SECRET, MPI_SERVER, is_foreign
from dtk.errors import CommunicatorError

SHARED_MEMORY = "/dev/shm"
START_SECONDS = 30.0
_PORTS = 20  # that a server tries
_END_SECONDS = 2.0


def some_ports() -> list[int]:
    """Return ports at which the first server may await others; which of them are free, it sees."""
    return random.SystemRandom().sample(slurm.PORTS, _PORTS)


class Served(NamedTuple):
    """What a server says once it serves."""

    variables: dict[int, dict[str, str]]  # of each rank of its machine
    ports: list[int]  # where others reach it


class MPIServer:
    """The process, started with an order in its standard input, which is open until the end."""

    def __init__(
        self, command: Sequence[str], order: str, host: str = "", says_itself: bool = False
    ) -> None:
        self._host, self._folder = host, ""
        with contextlib.ExitStack() as held:
            errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self._errors = held.enter_context(errors)
            self._process = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if says_itself else self._errors,
                start_new_session=True,
            )
            held.callback(self._end)
            assert self._process.stdin is not None and self._process.stdout is not None
            self._input, self._output = self._process.stdin, self._process.stdout
            with contextlib.suppress(BrokenPipeError):  # what it wrote says why
                self._input.write(order.encode())
                self._input.flush()
            self._held = held.pop_all()

    def answer(self) -> Served:
        """Wait until it serves; raise if it cannot."""
        rest, deadline, output = b"", time.monotonic() + START_SECONDS, self._output.fileno()
        while multiprocessing.connection.wait([output], max(0.0, deadline - time.monotonic())):
            if not (read := os.read(output, 1 << 16)):
                code = self._process.wait()
                why = self.said() or "without a word"
                raise self._refused(f"it ended with exit code {code}: {why}")
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                before, _, text = line.partition(pmix.ANSWER.encode())
                if text and not before:
                    return self._served(text)
        raise self._refused(f"it did not answer within {START_SECONDS:g} s")

    def _served(self, text: bytes) -> Served:
        answer = json.loads(text)
        if "failed" in answer:
            raise self._refused(answer["failed"])
        self._folder = "" if self._host else answer["folder"]
        ranks = {int(rank): _as_set_by_user(v) for rank, v in answer["variables"].items()}
        return Served(ranks, answer["ports"])

    def _refused(self, why: str) -> CommunicatorError:
        where = f" on {self._host}" if self._host else ""
        return CommunicatorError(
            f"communicator mpi: MPI's server{where} did not start: {why}. Without MPI: "
            "DTK_COMMUNICATOR=collective"
        )

    @property
    def pid(self) -> int:
        """Its process, or that of the remote shell that leads to it."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """How it has ended; None while it runs."""
        return self._process.poll()

    def beat(self) -> None:
        """Tell it that this process is alive."""
        write_line(self._input, "")

    def said(self) -> str:
        """Return what it wrote to standard error, on one line."""
        self._errors.seek(0)
        return " ".join(line.strip() for line in self._errors if line.strip(" -\n"))

    def leave(self) -> None:
        """Let it end, since this process does not need it any more."""
        with contextlib.suppress(OSError):
            self._input.close()

    def kill(self) -> None:
        """End it, though ranks may be there that need it."""
        if self._process.poll() is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its session's: it may be in a shell

    def close(self) -> None:
        """Let it end, and wait for that."""
        self._held.close()

    def _end(self) -> None:
        self.leave()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._output.close()
        if self._folder:  # it may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)


def _as_set_by_user(variables: Mapping[str, str]) -> dict[str, str]:
    """Let settings of Open MPI's that the user has made stand."""
    # In a rank, the server of an outer job has made them.
    by_user = {} if MPI_SERVER in os.environ else os.environ
    return {
        name: by_user.get(name, value) if name.startswith("OMPI_MCA_") else value
        for name, value in variables.items()
    }


def _environment() -> dict[str, str]:
    """Return the variables of a server: none of another job."""
    kept = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    kept.pop("DTK_JOB", None)  # what ends a rank's processes is not to end what others need
    kept.pop(JOB_SECRET, None)
    return kept
