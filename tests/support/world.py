"""Worlds of worker processes for tests.

    parent (pytest)  --- function name, args --->  worker 0 .. worker n-1     (worker.py)
                     <--- result or traceback ---

Starting TensorFlow costs seconds, so a world lives on and runs one body after another. It is
started as users start theirs: by dtk's launcher, or by the real `mpirun`. A body is an ordinary
function beside the test that asserts on what it returns; workers import the test's module to run
it, on every rank at once, and `run` returns the results in rank order:

    def collective(scale):
        comm = communicator()
        return comm.allreduce(tf.constant(scale)).numpy()

    def test_it(world):
        assert world("collective", 2).run(collective, 3.0) == [6.0, 6.0]

A body that raises, a worker that dies and a time that runs out all end every process of the world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dtk.bench import bench_jobs
from dtk.bench.ranks import ENDED, Ranks, RanksFailed
from dtk.cluster import mpi_installs
from dtk.cluster.place import THREADS
from dtk.launch import Process, assign

sys.path.append(str(Path(__file__).parents[2] / "tools" / "gpu"))
import one_card  # noqa: E402
import pretend  # noqa: E402

BACKENDS = ("local", "collective", "nccl", "horovod-mpi", "horovod-gloo", "mpi-wheel", "served")
SERVERS = 2
TESTS = Path(__file__).resolve().parents[1]
START_TIMEOUT = 90.0
# Without TensorFlow's graph optimizer a step costs a fifth less. `make test` leaves it out, but in
# the bodies whose names begin so: how collectives, and whole trainings, stand its rewriting.
REWRITTEN = (
    *("communicators.", "layers.test_collectives", "support.graph_bodies"),
    *("support.bodies:train", "trainer.compiled_bodies", "strategies.test_gpus:train"),
    "trainer.test_end_of_data:fit",
)


class WorldError(Exception):
    """A body failed on some rank, or a world could not start or answer in time."""


def missing(backend: str) -> str | None:
    """Why a backend cannot run here, and what to do about it; None if it can."""
    if backend == "nccl":
        return _missing_for_gpus()
    if backend == "spark":
        return _missing_for_spark()
    if backend == "mpi-wheel" and mpi_installs.mpirun() is None:
        return "no mpi4py, or no mpirun beside python: pip install './dtk[mpi]'"
    if not backend.startswith("horovod"):
        return None
    if importlib.util.find_spec("horovod") is None:
        return "Horovod is not installed: run `dtk install-horovod`"
    if backend == "horovod-mpi" and shutil.which("mpirun") is None:
        return (
            "no mpirun: install Debian's openmpi-bin and libopenmpi-dev, then `dtk install-horovod`"
        )
    return None


def _missing_for_spark() -> str | None:
    if any(importlib.util.find_spec(name) is None for name in ("pyspark", "pyarrow")):
        return "pyspark or pyarrow is not installed: pip install './dtk[spark]'"
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        return "Spark needs Java: apt-get install default-jre-headless"
    return None


def _missing_for_gpus() -> str | None:
    import tensorflow as tf

    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        return "this TensorFlow was built without CUDA: install `tensorflow` on x86-64 Linux"
    if shutil.which("g++") is None:
        return "no g++, to build what stands for CUDA: install Debian's g++"
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


def inherited_path() -> str:
    """PYTHONPATH of the processes that tests start: a leaner start, dtk, and modules of tests."""
    folders = [TESTS / "support" / "lean", TESTS.parent, TESTS]
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]).rstrip(":")


def seed(number: int) -> None:
    """Make what is drawn without a seed of its own the same in each run; Keras draws seeds, too."""
    random.seed(number)
    np.random.seed(number)


def choose_rewriting(name: str) -> None:
    """Have TensorFlow rewrite the graphs of a function, "module:qualname", or leave them."""
    tensorflow = sys.modules.get("tensorflow")
    left = os.environ.get("DTK_TEST_REWRITING") == "0" and not name.startswith(REWRITTEN)
    if tensorflow is not None:
        options = {"disable_meta_optimizer": left}
        tensorflow.config.optimizer.set_experimental_options(options)


def communicator() -> Any:
    """The world communicator of this backend; for bodies."""
    from dtk.communicators import create

    # Ranks send from GPU to GPU once a strategy links them.
    if {"PRETENDED_GPUS", "NCCL_HOSTID"} & os.environ.keys():
        from support import bodies

        return bodies.strategy().world
    return create(os.environ["DTK_TEST_COMMUNICATOR"])


class World:
    """A pool of `size` worker processes joined by `backend`.

    Args:
        backend: One of BACKENDS; "local" takes size 1 only. "served" is a chief with `size` workers
            and two parameter servers, and bodies run on the chief alone. "nccl" is "collective" on
            a machine that pretends to have a GPU for each rank, and two for one rank
            (tools/gpu/pretend.py).
        size: Number of ranks.
        env: More variables for the workers.
    """

    def __init__(self, backend: str, size: int, env: dict[str, str] | None = None) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; use one of {', '.join(BACKENDS)}")
        if backend == "local" and size != 1:
            raise ValueError(f"backend 'local' has one rank, got size={size}")
        self.backend, self.size = backend, size
        self._log = tempfile.TemporaryFile(  # noqa: SIM115
            "w+", encoding="utf-8", errors="replace"
        )
        answering = 1 if backend == "served" else size
        processes = _processes(backend, size, env or {})
        self._ranks = Ranks(processes, answering, output=self._log, grace=1.0)
        with self._ended_by_failure(f"{backend} x {size} does not start"):
            self._ranks.start(START_TIMEOUT)

    @property
    def pids(self) -> list[Any]:
        """The processes that run bodies."""
        return self._ranks.hello

    @property
    def alive(self) -> bool:
        """Whether bodies can be run."""
        return self._ranks.alive

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
        with self._ended_by_failure(f"{name} on {self.backend} x {self.size}"):
            return self._ranks.ask((name, args), timeout, meanwhile)

    @contextlib.contextmanager
    def _ended_by_failure(self, what: str) -> Iterator[None]:
        """End the world where what is done inside fails."""
        try:
            yield
        except BaseException as error:
            output = self._output()
            self.close(patience=0)
            if not isinstance(error, RanksFailed | TimeoutError):
                raise
            failures = error.failures.values() if isinstance(error, RanksFailed) else ()
            raised = failures and ENDED not in failures  # and so told by their tracebacks
            raise WorldError(f"{what}\n{error}{'' if raised else output}") from None

    def _output(self) -> str:
        self._log.seek(0)
        tail = self._log.read()[-12000:]
        return f"; output:\n{tail}" if tail.strip() else ""

    def close(self, patience: float = 10.0) -> None:
        """End every process; safe to call twice.

        Args:
            patience: Seconds workers get to leave by themselves.
        """
        self._ranks.close(patience)
        self._log.close()
        left = [pid for pid in self.pids if _running(pid)]
        if left:
            raise WorldError(f"processes {left} of {self.backend} x {self.size} do not end")


def _processes(backend: str, size: int, extra: dict[str, str]) -> list[Process]:
    """What starts the workers of a world."""
    command = [sys.executable, "-m", "support.worker"]
    # `make test-gpus` runs the tests of all collectives so; "real" is a card that all ranks share.
    gpus = os.environ.get("DTK_TEST_GPUS") or ("1" if backend == "nccl" else "")
    real = gpus == "real" and backend in ("collective", "nccl")
    if gpus == "1" and backend in ("collective", "nccl"):
        extra = {**pretend.environment(max(size, 2)), "PYTHONFAULTHANDLER": "1", **extra}
    threads = os.environ.get("DTK_TEST_THREADS", "1")  # of a rank: users' have more
    env = {
        "DTK_TEST_COMMUNICATOR": "collective" if backend == "nccl" else backend.split("-")[0],
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **dict.fromkeys(THREADS, threads),
        # Groups of some of the ranks; worlds of two have none, and run as users' do.
        **({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if size > 2 else {}),
        # What is measured beside other tests is nothing to go by.
        "DTK_CALIBRATE": "0",
        **extra,
    }
    if backend == "horovod-mpi":
        return [bench_jobs.mpirun(command, size, env)]
    if backend == "mpi-wheel":
        started = bench_jobs.mpirun(command, size, env)
        argv = (str(mpi_installs.mpirun()), *started.argv[1:])
        return [dataclasses.replace(started, argv=argv)]
    kind = "horovod" if backend == "horovod-gloo" else "collective"
    servers = SERVERS if backend == "served" else 0
    # Other worlds use the same cores.
    planned = assign(command, workers=size, communicator=kind, ps=servers, bind=False)
    return [
        dataclasses.replace(
            process, env={**process.env, **env, **(one_card.environment(rank) if real else {})}
        )
        for rank, process in enumerate(planned)
    ]


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
