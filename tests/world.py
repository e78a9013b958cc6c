"""Worlds of worker processes for tests.

    parent (pytest)  --- function name, args --->  worker 0 .. worker n-1     (tests/worker.py)
                     <--- result or traceback ---

Starting TensorFlow costs seconds, so a world lives on and runs one body after another. It is
started as users start theirs: by dtk's launcher, or by the real `mpirun`. A body is an ordinary
function in a module beside the test; it runs on every rank at once, and `run` returns the results
in rank order:

    def body(scale):                                  # tests/strategies/bodies.py
        comm = world.communicator()
        return comm.allreduce(tf.constant(scale)).numpy()

    def test_it(world):                               # tests/strategies/test_it.py
        assert world("collective", 2).run("strategies.bodies:body", 3.0) == [6.0, 6.0]

A body that raises, a worker that dies and a time that runs out all end every process of the world.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil

BACKENDS = ("local", "collective", "horovod-mpi", "horovod-gloo", "served")
SERVERS = 2
TESTS = Path(__file__).resolve().parent
START_TIMEOUT = 90.0


class WorldError(Exception):
    """A body failed on some rank, or a world could not start or answer in time."""


def missing(backend: str) -> str | None:
    """Why a backend cannot run here, and what to do about it; None if it can."""
    if not backend.startswith("horovod"):
        return None
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed: run `dtk install-horovod`"
    if backend == "horovod-mpi" and shutil.which("mpirun") is None:
        return (
            "no mpirun: install Debian's openmpi-bin and libopenmpi-dev, then `dtk install-horovod`"
        )
    return None


def wanted(item: Any) -> tuple[str, int]:
    """The world a pytest item wants by its parameters; ("", 0) for none."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    backend, size = params.get("pool") or (params.get("backend", ""), params.get("size", 0))
    if backend == "mirrored":  # several devices in a world of one
        return "local", 1
    return (backend, size) if isinstance(backend, str) and isinstance(size, int) else ("", 0)


def named_in(test: str) -> str | None:
    """The world a test runs in by its id, such as "served-2"; None if it names none.

    What is "mirrored" runs in a world of one.
    """
    found = re.search(rf"\[(?:.*-)?({'|'.join(BACKENDS)}|mirrored)-(\d)[-\]]", test)
    if found is None:
        return None
    return "local-1" if found[1] == "mirrored" else f"{found[1]}-{found[2]}"


def communicator() -> Any:
    """The world communicator of this backend; for bodies."""
    from dtk.communicators import create

    return create(os.environ["DTK_TEST_COMMUNICATOR"])


class World:
    """A pool of `size` worker processes joined by `backend`.

    Args:
        backend: One of BACKENDS; "local" takes size 1 only. "served" is a chief with `size` workers
            and two parameter servers, and bodies run on the chief alone.
        size: Number of ranks.
        env: More variables for the workers.
    """

    def __init__(self, backend: str, size: int, env: dict[str, str] | None = None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
        if backend == "local" and size != 1:
            raise ValueError(f"backend 'local' has one rank, got size={size}")
        self.backend, self.size = backend, size
        self.answering = 1 if backend == "served" else size
        self.pids: list[int] = []
        self._connections: list[connection.Connection] = []
        self._stop: Callable[[], None] = lambda: None
        self._log = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        try:
            self._start(env or {})
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether bodies can be run."""
        return bool(self._connections)

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float = 60,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> list[Any]:
        """Run a function on every rank.

        Args:
            function: A module-level function in a file below tests/, or "module:qualname" as
                importable from there.
            args: Its arguments, pickled.
            timeout: Seconds until the world is ended and WorldError raised.
            meanwhile: Called here once the ranks have begun, such as to compute what they are
                compared with.

        Returns:
            What it returned, in rank order.

        Raises:
            WorldError: With the rank and its traceback. The world is ended.
        """
        if not self.alive:
            raise WorldError(f"the world {self.backend} x {self.size} has ended")
        name = function if isinstance(function, str) else _name(function)
        deadline = time.monotonic() + timeout
        try:
            for line in self._connections:
                line.send((name, args))
            meanwhile()
            return self._collect(name, deadline, timeout)
        except BaseException:
            self.close(patience=0)
            raise

    def _collect(self, name: str, deadline: float, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.answering:
            waiting = {
                line: rank
                for rank, line in enumerate(self._connections)
                if rank not in results and rank not in failures
            }
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise WorldError(
                    f"{name}: no answer from ranks {sorted(waiting.values())} after {timeout:g} s"
                    f"{self._output()}"
                )
            for line in ready:
                rank = waiting[line]
                try:
                    ok, value = line.recv()
                except (EOFError, OSError):
                    ok, value = False, f"the process ended{self._output()}"
                (results if ok else failures)[rank] = value
            if failures:
                # The others usually fail too, or wait for ever: hear them out, but briefly.
                deadline = min(deadline, time.monotonic() + 1.0)
        if failures:
            told = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            raise WorldError(f"{name} on {self.backend} x {self.size}\n{told}")
        return [results[rank] for rank in range(self.answering)]

    def _output(self) -> str:
        self._log.seek(0)
        tail = self._log.read()[-4000:]
        return f"; output:\n{tail}" if tail.strip() else ""

    def _start(self, extra: dict[str, str]) -> None:
        key = secrets.token_bytes(32)
        with connection.Listener(("127.0.0.1", 0), authkey=key) as listener:
            env = {
                "DTK_TEST_ADDRESS": f"{listener.address[0]}:{listener.address[1]}",
                "DTK_TEST_KEY": key.hex(),
                "DTK_TEST_COMMUNICATOR": self.backend.split("-")[0],
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "OMP_NUM_THREADS": "1",
                "TF_NUM_INTRAOP_THREADS": "1",
                "TF_NUM_INTEROP_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
                # Groups of some of the ranks; worlds of two have none, and run as users' do.
                **({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if self.size > 2 else {}),
                # What is measured beside other tests is nothing to go by.
                "DTK_CALIBRATE": "0",
                **extra,
            }
            command = [sys.executable, str(TESTS / "worker.py")]
            if self.backend == "horovod-mpi":
                self._stop = self._start_mpirun(command, env)
            else:
                self._stop = self._start_job(command, env)
            self._accept(listener)

    def _start_job(self, command: list[str], env: dict[str, str]) -> Callable[[], None]:
        import dataclasses

        from dtk.launch import Job, plan

        kind = "horovod" if self.backend == "horovod-gloo" else "collective"
        servers = SERVERS if self.backend == "served" else 0
        # Other worlds use the same cores.
        planned = plan(command, workers=self.size, communicator=kind, ps=servers, bind=False)
        processes = [
            dataclasses.replace(process, env={**process.env, **env}) for process in planned
        ]
        job = Job(processes, stdout=self._log, stderr=self._log, grace=1.0)
        job.start()
        return job.stop

    def _start_mpirun(self, command: list[str], env: dict[str, str]) -> Callable[[], None]:
        argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        # More ranks than cores: one that waits must not keep the others from computing.
        argv += ["--mca", "mpi_yield_when_idle", "1"]
        process = subprocess.Popen(
            [*argv, "-np", str(self.size), *command],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def stop() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(5)

        return stop

    def _accept(self, listener: connection.Listener) -> None:
        # Listener has no timeout of its own; its socket does.
        lines: dict[int, connection.Connection] = {}
        deadline = time.monotonic() + START_TIMEOUT
        listener._listener._socket.settimeout(1.0)
        while len(lines) < self.answering:
            try:
                line = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise WorldError(
                        f"{self.backend} x {self.size}: only ranks {sorted(lines)} started "
                        f"within {START_TIMEOUT:g} s{self._output()}"
                    ) from None
                continue
            rank, pid = line.recv()
            lines[rank] = line
            self.pids.append(pid)
        self._connections = [lines[rank] for rank in range(self.answering)]

    def close(self, patience: float = 10.0) -> None:
        """End every process; safe to call twice.

        Args:
            patience: Seconds workers get to leave by themselves.
        """
        lines, self._connections = self._connections, []
        for line in lines:
            with contextlib.suppress(OSError):
                if patience:
                    line.send(None)
                line.close()
        alive = [psutil.Process(pid) for pid in self.pids if psutil.pid_exists(pid)]
        if patience:
            _, alive = psutil.wait_procs(alive, patience)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        stop, self._stop = self._stop, lambda: None
        stop()
        psutil.wait_procs(alive, 10)
        self._log.close()
        left = [pid for pid in self.pids if _running(pid)]
        if left:
            raise WorldError(f"processes {left} of {self.backend} x {self.size} do not end")


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _name(function: Callable[..., Any]) -> str:
    path = Path(inspect.getsourcefile(function) or "").resolve()
    module = ".".join(path.relative_to(TESTS).with_suffix("").parts)
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not at the top level of its module")
    return f"{module}:{function.__qualname__}"
