"""Bodies of test_calibration.py; they run on every rank at once."""

from __future__ import annotations

import dataclasses
import os

from dtk.communicators import calibration
from dtk.errors import DtkError
from dtk.strategies import AllReduceStrategy
from dtk.strategies.start import processors

import world


def set_environment(cache):
    os.environ["XDG_CACHE_HOME"] = cache


def calibrated(way, cpu=None):
    """The costs this rank was told, with every processor called `cpu`."""
    os.environ[calibration.VARIABLE] = way
    communicator = world.communicator()
    names = processors(communicator) if cpu is None else [cpu] * communicator.size
    costs = calibration.calibrate(communicator, "CPU:0", names)
    return None if costs is None else dataclasses.asdict(costs)


def raised(way):
    try:
        calibrated(way)
    except DtkError as error:
        return str(error)
    return None


def of_strategy():
    """What a strategy made by name has, and what a collective after that sums."""
    os.environ[calibration.VARIABLE] = "1"
    strategy = AllReduceStrategy(communicator=os.environ["DTK_TEST_COMMUNICATOR"])
    total = strategy.communicator.allreduce([float(strategy.rank + 1)])[0]
    return dataclasses.asdict(strategy.communicator.costs), float(total)
