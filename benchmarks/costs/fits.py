"""The turns that variants take, and what is seen of functions meanwhile."""

import contextlib
import functools
import statistics
import time
from typing import Any, NamedTuple

from dtk.bench.turns import order
from dtk.bench.worker import clock


def warm(variants):
    """Let each take one turn, in which it is traced; what they say of it, by name."""
    return {one.name: one.measure(lambda: None) for one in variants}


def turns(variants, rounds, communicator):
    """Let variants take turns.

    Args:
        variants: Alike on all ranks.
        rounds: Turns of each.
        communicator: Of all ranks.

    Returns:
        Name -> what `clock` says of each turn on this rank.
    """
    said = {one.name: [] for one in variants}
    for number in range(rounds):
        for one in order(variants, number):
            communicator.barrier()  # where each trained by itself, one rank was faster
            said[one.name].append(clock(one.measure))
    return said


def take(variants, rounds, communicator):
    """Let variants take `turns`; name -> seconds of a step for each round, means over ranks."""
    said = turns(variants, rounds, communicator)
    mine = {name: [turn["seconds"] for turn in of_one] for name, of_one in said.items()}
    return mean_of_ranks(mine, communicator)


def mean_of_ranks(mine, communicator):
    """Name -> list of numbers on each rank; the same of their means."""
    told = communicator.allgather_object(mine)
    columns = {name: zip(*(rank[name] for rank in told), strict=True) for name in mine}
    return {name: list(map(statistics.mean, column)) for name, column in columns.items()}


class Call(NamedTuple):
    """A call of a function that is watched."""

    seconds: float
    args: tuple
    result: Any


@contextlib.contextmanager
def watched(owner, name):
    """While inside, every call of a function of a module or class is noted.

    Yields the list of calls.
    """
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def noted(*args, **kwargs):
        began = time.perf_counter()
        result = function(*args, **kwargs)
        calls.append(Call(time.perf_counter() - began, args, result))
        return result

    setattr(owner, name, noted)
    try:
        yield calls
    finally:
        setattr(owner, name, function)
