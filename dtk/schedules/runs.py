"""Schedules written as lists of runs, a value and how long it lasts; and what is a number there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Runs = list[tuple[int, float]]


def parse_runs(schedule: object, noun: str, valid: Callable[[object], bool], expected: str) -> Runs:
    """Parse a list of values and `(count, value)` pairs; a value alone has a count of 1.

    Example:
        >>> parse_runs([64, (2, 128)], "batch size", is_count, "an integer of at least 1")
        [(1, 64), (2, 128)]
    """
    if isinstance(schedule, str | bytes) or not isinstance(schedule, Sequence):
        raise ValueError(
            f"a {noun} schedule is a list of values or (count, value), got {schedule!r}"
        )
    runs: Runs = []
    for item in schedule:
        count, value = item if isinstance(item, list | tuple) and len(item) == 2 else (1, item)
        if not is_count(count) or not valid(value):
            raise ValueError(
                f"a {noun} schedule holds values or (count, value), a count an integer of at least "
                f"1 and a value {expected}, got {item!r}"
            )
        runs.append((count, value))
    if not runs:
        raise ValueError(f"a {noun} schedule needs at least one value, got none")
    return runs


def ends_of(runs: Runs) -> list[int]:
    """Return the end of each run.

    Example:
        >>> ends_of([(1, 64), (2, 128)])
        [1, 3]
    """
    return list(itertools.accumulate(count for count, _ in runs))


def value_at(runs: Runs, position: int) -> float:
    """Return the value at a position; the last value persists.

    Example:
        >>> [value_at([(1, 64), (2, 128), (1, 256)], position) for position in range(6)]
        [64, 128, 128, 256, 256, 256]
    """
    for end, (_, value) in zip(ends_of(runs), runs, strict=True):
        if position < end:
            return value
    return runs[-1][1]


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1.

    Example:
        >>> is_count(3), is_count(0), is_count(True), is_count(3.0)
        (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_count(name: str, value: object, none: str | None = None) -> None:
    """Raise unless a value is an integer of at least 1; `none` says what None means, if it may be.

    Example:
        >>> check_count("batch_size", 0, none="fit's")
        Traceback (most recent call last):
        ValueError: batch_size must be an integer of at least 1, or None for fit's, got 0
    """
    if not is_count(value) and (value is not None or none is None):
        may_be_none = "" if none is None else f", or None for {none}"
        raise ValueError(f"{name} must be an integer of at least 1{may_be_none}, got {value!r}")


def is_rate(value: object) -> bool:
    """Return whether a value is a finite number of at least 0.

    Example:
        >>> is_rate(0), is_rate(-0.1), is_rate(True), is_rate(float("inf"))
        (True, False, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
