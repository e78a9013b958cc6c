"""Bodies of test_measuring_once.py; they run on every rank at once."""

from __future__ import annotations

import contextlib
import dataclasses
import os

from dtk.communicators import cost_cache
from dtk.errors import DtkError
from dtk.strategies import AllReduceStrategy
from dtk.strategies.start import processor

import world


@contextlib.contextmanager
def environment(**variables):
    """While inside, these are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def calibrated(way, cache, cpu=None, **variables):
    """The costs this rank was told, with every processor called `cpu`."""
    communicator = world.communicator()
    names = [cpu or processor()] * communicator.size
    with environment(DTK_CALIBRATE=way, XDG_CACHE_HOME=cache, **variables):
        costs = cost_cache.calibrate(communicator, "CPU:0", names)
    return None if costs is None else dataclasses.asdict(costs)


def calibrated_in(cache, variables):
    return calibrated("", cache, **variables)


def raised(way, cache):
    try:
        calibrated(way, cache)
    except DtkError as error:
        return str(error)
    return None


def of_strategy(cache):
    """What a strategy has, and what a collective after that sums."""
    with environment(DTK_CALIBRATE="1", XDG_CACHE_HOME=cache):
        strategy = AllReduceStrategy(communicator=os.environ["DTK_TEST_COMMUNICATOR"])
    communicator = strategy.communicator
    total = communicator.allreduce([float(strategy.rank + 1)])[0]
    costs, communicator.costs = communicator.costs, None  # other tests' are not measured
    return dataclasses.asdict(costs), float(total)


def of_null(cache):
    """A strategy that sends nothing has nothing to measure."""
    with environment(DTK_CALIBRATE="1", XDG_CACHE_HOME=cache):
        return AllReduceStrategy(communicator="null").communicator.costs
