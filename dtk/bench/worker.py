"""The loop of every process of a world: it measures when it is asked. Standard library alone.

    asked                            answered, a line of JSON each
                                     {"rank": 0, "host": ..., "versions": {"PyTorch": ...}}
    {"build": "mlp"}                 {"parameters": 10512394, "variants": ["ddp"], "absent": {}}
    {"measure": "ddp"}               {"seconds": 0.02, "fit": 0.5, "sent": ..., ...}
    end of input                     the process ends

Between measurements it waits for a line, which takes no time of any core.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO, TypedDict


class Counts(TypedDict, total=False):
    """What is known of a reading better than by the clock; see `dtk.bench.results.Reading`."""

    seconds: float
    sent: float
    communicating: float


class Hello(TypedDict):
    """What a process says first."""

    rank: int  # its index in the world
    host: str  # its name
    cores: list[int]  # those it may use
    threads: int  # that it computes with
    versions: dict[str, str]  # of the libraries that are measured, by name


class Answer(TypedDict, total=False):
    """What a process answers: the first three to "build", the others to "measure"."""

    parameters: int  # of the model; 0 without one
    variants: list[str]  # what can be measured
    absent: dict[str, str]  # what cannot, and why
    seconds: float  # as of a `dtk.bench.results.Reading`, and so all that follow
    sent: float | None
    communicating: float | None
    fit: float
    steps: list[float]


Tick = Callable[[], None]
# Trains for one more step than is measured, calls its argument after each, and may say more of the
# reading.
Measure = Callable[[Tick], "Counts | None"]


class Worker(Protocol):
    """One process of a world, made from the setting (a dict)."""

    rank: int  # its index in the world
    versions: dict[str, str]  # of the libraries that are measured, by name

    def build(self, task: str) -> tuple[int, dict[str, Measure | str]]:
        """Make ready to measure a task, and forget the one before."""


def serve(worker: Worker, requests: Iterable[str], answers: TextIO) -> None:
    """Answer every line until there are no more."""
    variants: dict[str, Measure] = {}
    _say(answers, _hello(worker))
    for line in requests:
        request = json.loads(line)
        if "build" in request:
            variants.clear()
            parameters, found = worker.build(request["build"])
            variants = {name: one for name, one in found.items() if not isinstance(one, str)}
            absent = {name: why for name, why in found.items() if isinstance(why, str)}
            _say(answers, Answer(parameters=parameters, variants=[*variants], absent=absent))
        else:
            _say(answers, clock(variants[request["measure"]]))


def clock(measure: Measure) -> Answer:
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
        "steps": [end - begin for begin, end in itertools.pairwise(ticks)],
        **more,
    }


def _hello(worker: Worker) -> Hello:
    return {
        "rank": worker.rank,
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        # The launcher gives every rank its share of the cores, unless the user has said otherwise.
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "versions": worker.versions,
    }


def _say(answers: TextIO, answer: Hello | Answer) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve the module or file named first, with the setting named second."""
    module, setting = sys.argv[1:]
    folder, name = os.path.split(module)
    if folder:  # of a baseline's file, which may import what is beside it
        sys.path.insert(0, folder)
    # What libraries print goes to standard error; standard output is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = importlib.import_module(name.removesuffix(".py")).Worker(json.loads(setting))
    serve(worker, iter(sys.stdin.readline, ""), answers)


if __name__ == "__main__":
    main()
