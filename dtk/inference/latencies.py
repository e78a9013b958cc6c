"""How long a call takes: the median, and the quartiles that say how much it varies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Latency(NamedTuple):
    """Milliseconds of a call.

    Attributes:
        median: Half of the calls took less.
        low: A quarter took less.
        high: A quarter took more.
        calls: How many were measured.
    """

    median: float
    low: float
    high: float
    calls: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ms ({self.low:.2f}-{self.high:.2f})"


def latency(call: Callable[[], object], calls: int = 50, warm_up: int = 5) -> Latency:
    """Measure how long a call takes in this process.

    Args:
        call: What is measured; it must wait for its result, as anything does that returns NumPy
            arrays.
        calls: How many are measured, 2 or more.
        warm_up: How many are made before.

    Returns:
        Median and quartiles.

    Raises:
        ValueError: Fewer than 2 calls.

    Example:
        >>> latency(lambda: sum(range(1000)), calls=10).calls
        10
    """
    if calls < 2:
        raise ValueError(f"calls={calls}, but quartiles take 2 or more")
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        seconds.append(1e3 * (time.perf_counter() - began))
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Latency(median, low, high, calls)
