"""Taking turns: what every process of a world does. The standard library alone.

    asked                            answered, a line of JSON each
                                     {"rank": 0, "host": ..., "versions": {"PyTorch": ...}}
    {"build": "mlp"}                 {"parameters": 10512394, "contenders": ["ddp"], "absent": {}}
    {"turn": "ddp"}                  {"seconds": 0.02, "fit": 0.5, "sent": ..., ...}
    end of input                     the process ends

Between turns it waits for a line, which takes no time of any core.
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
from typing import Any, Protocol, TextIO

Tick = Callable[[], None]
# Trains for one more step than is measured, calls its argument after each, and may say more of the
# reading.
Turn = Callable[[Tick], "dict[str, Any] | None"]


class Member(Protocol):
    """One process of a world, made from the setting (a dict).

    Attributes:
        rank: Its index in the world.
        versions: Of the libraries that are measured, by name.
    """

    rank: int
    versions: dict[str, str]

    def build(self, task: str) -> tuple[int, dict[str, Turn | str]]:
        """Make ready to measure a task, and forget the one before.

        Args:
            task: The name of a model, or "allreduce BYTES".

        Returns:
            Parameters of the model (0 without one), and by name what can be measured; or, as text,
            why that cannot be.
        """


def serve(member: Member, requests: Iterable[str], answers: TextIO) -> None:
    """Answer every line until there are no more."""
    turns: dict[str, Turn] = {}
    _say(answers, _hello(member))
    for line in requests:
        request = json.loads(line)
        if "build" in request:
            turns.clear()
            parameters, found = member.build(request["build"])
            turns = {name: turn for name, turn in found.items() if not isinstance(turn, str)}
            absent = {name: why for name, why in found.items() if isinstance(why, str)}
            answer = {"parameters": parameters, "contenders": [*turns], "absent": absent}
        else:
            answer = clock(turns[request["turn"]])
        _say(answers, answer)


def clock(turn: Turn) -> dict[str, Any]:
    """Let a turn be taken, and say what it took.

    The first step is left out: what it waits for is not a step's.

    Returns:
        `seconds` of a step, mean of the others, which `steps` holds; `fit`, of everything; `sent`
        and `communicating`, None unless the turn says.

    Example:
        >>> def turn(tick):
        ...     for _ in range(3):
        ...         time.sleep(0.01)
        ...         tick()
        >>> clock(turn)["seconds"] >= 0.01
        True
    """
    ticks: list[float] = []
    began = time.perf_counter()
    more = turn(lambda: ticks.append(time.perf_counter())) or {}
    return {
        "seconds": (ticks[-1] - ticks[0]) / (len(ticks) - 1),
        "sent": None,
        "communicating": None,
        "fit": time.perf_counter() - began,
        "steps": [end - begin for begin, end in itertools.pairwise(ticks)],
        **more,
    }


def _hello(member: Member) -> dict[str, Any]:
    return {
        "rank": member.rank,
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        # The launcher gives every rank its share of the cores, unless the user has said otherwise.
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "versions": member.versions,
    }


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Serve the module named first, with the setting named second."""
    module, setting = sys.argv[1:]
    # What libraries print goes to standard error; standard output is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    member = importlib.import_module(module).Member(json.loads(setting))
    serve(member, iter(sys.stdin.readline, ""), answers)


if __name__ == "__main__":
    main()
