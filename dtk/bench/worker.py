"""A rank of a job of `dtk bench`: it measures when it is asked. Standard library alone.

    command line ── Connection ── this process ── Pipe ── its child, which measures
                                       └── stops and continues it

    asked                      answered
                               its rank, and a `RankHost` with versions
    ("build", "mlp")           parameters of the model, what can be measured, what cannot and why
    ("measure", "ddp")         the numbers of a `dtk.bench.results.Reading`
    REST                       REST, and the child is stopped until something else is asked
    None                       both processes end

Some libraries keep a thread busy while nothing is asked of them. Stopped between its measurements
(SIGSTOP) such a process leaves the cores to others, and only its parent can do that on every host.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection
from typing import Protocol, TypeAlias, TypedDict

ADDRESS, KEY = "DTK_BENCH_ADDRESS", "DTK_BENCH_KEY"
# What mpirun starts is bound here: a list of cores for each rank, which may be empty.
CORES = "DTK_BENCH_CORES"
REST = ("rest", "")

Line: TypeAlias = "Connection[object, tuple[str, str] | None]"
Tick = Callable[[], None]
# Trains for one more step than is measured, calls its argument after each, and may say more of the
# reading.
Measure = Callable[[Tick], "Numbers | None"]
# Parameters of the model, 0 without one; and by name what can be measured, or why it cannot.
Built: TypeAlias = "tuple[int, dict[str, Measure | str]]"


class Numbers(TypedDict, total=False):
    """The fields of a `dtk.bench.results.Reading`; a `Measure` may know some of them."""

    seconds: float
    sent: float | None
    communicating: float | None
    fit: float
    steps: tuple[float, ...]


class RankHost(TypedDict):
    """Where a rank runs, and with how many threads."""

    host: str
    cores: Sequence[int]  # those it may use
    threads: int


class BenchWorker(Protocol):
    """What a rank measures, made from the fields of a `dtk.bench.results.Setting`."""

    rank: int
    versions: dict[str, str]  # of the libraries that are measured, by name

    def build(self, task: str) -> Built:
        """Make ready to measure a task, and forget the one before."""


def serve(make: Callable[[dict[str, object]], BenchWorker], setting: str, line: Line) -> None:
    """Make a worker, and answer every request until there are no more."""
    worker = make(literal_eval(setting))
    # The launcher gives every rank its share of the cores, unless the user has said otherwise.
    here: RankHost = {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
    }
    line.send((worker.rank, (here, worker.versions)))
    measures: dict[str, Measure | str] = {}
    while (request := _next(line)) is not None:
        task, name = request
        if task == "build":
            measures.clear()  # frees the model before
            parameters, measures = worker.build(name)
            absent = {key: why for key, why in measures.items() if isinstance(why, str)}
            line.send((parameters, [key for key in measures if key not in absent], absent))
        elif callable(measure := measures[name]):
            line.send(clock(measure))


def clock(measure: Measure) -> Numbers:
    """Take one measurement and return its numbers.

    The first step is left out: what it waits for is not a step's.

    Example:
        >>> def measure(tick):
        ...     for _ in range(3):
        ...         time.sleep(0.01)
        ...         tick()
        >>> clock(measure)["seconds"] >= 0.01
        True
    """
    ticks: list[float] = []
    began = time.perf_counter()
    more = measure(lambda: ticks.append(time.perf_counter())) or {}
    return {
        "seconds": (ticks[-1] - ticks[0]) / (len(ticks) - 1),
        "sent": None,
        "communicating": None,
        "fit": time.perf_counter() - began,
        "steps": tuple(end - begin for begin, end in itertools.pairwise(ticks)),
        **more,
    }


def connect() -> Line:
    """Return the connection to whoever started this process; see `dtk.bench.ranks`."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    return Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(KEY)))


def _next(line: Line) -> tuple[str, str] | None:
    try:
        return line.recv()
    except EOFError:
        return None


def _pass_on(line: Line, own: Connection[object, object], child: int) -> None:
    """Pass requests and answers on, until nothing more is asked or the child has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            line.send(own.recv())
            while (request := _next(line)) == REST:
                os.kill(child, signal.SIGSTOP)
                # It goes on for a moment; and it may have ended, which is found out above.
                os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                line.send(request)
            if request is None:
                return
            os.kill(child, signal.SIGCONT)
            own.send(request)


def main() -> None:
    """Serve with the class named first, as "module:class" or "file:class", and a setting."""
    name, setting = sys.argv[1:]
    if CORES in os.environ:
        part = json.loads(os.environ[CORES])[int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])]
        os.sched_setaffinity(0, part or os.sched_getaffinity(0))
    own, its = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        own.close()
        del os.environ[KEY]
        module, _, kind = name.rpartition(":")
        folder, file = os.path.split(module)
        if folder:  # of a peer's file, which may import what is beside it
            sys.path.insert(0, folder)
        serve(getattr(importlib.import_module(file.removesuffix(".py")), kind), setting, its)
        return
    its.close()
    with connect() as line:
        _pass_on(line, own, child)
        own.close()
        os.kill(child, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(128 - code if code < 0 else code)


if __name__ == "__main__":
    main()
