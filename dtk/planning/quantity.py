"""Numbers with units, as users write them on a command line."""

from __future__ import annotations

import math
import re

from dtk.errors import DtkError

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_SIZES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}


class PlanError(DtkError, ValueError):
    """The inputs do not make a plan."""


def seconds(option: str, text: str) -> float:
    """Read a duration, 0 or more.

    Example:
        >>> seconds("--step-time", "85ms")
        0.085
    """
    return _parse(option, text, _SECONDS, "85ms")


def count(option: str, text: str) -> int:
    """Read a whole number, 1 or more.

    Example:
        >>> count("--parameters", "270k"), count("--parameters", "1.5B")
        (270000, 1500000000)
    """
    value = _parse(option, text, _COUNTS, "270k")
    if value < 1 or abs(value - round(value)) > 1e-6:
        raise PlanError(f"{option} {text}: expected a whole number, 1 or more, such as 270k")
    return round(value)


def bandwidth(option: str, text: str) -> float:
    """Read a bandwidth, above 0.

    Example:
        >>> bandwidth("--bandwidth", "1Gbit/s"), bandwidth("--bandwidth", "12.5MB/s")
        (125000000.0, 12500000.0)
    """
    units = {unit: scale / 8 for unit, scale in _BITS.items()} | _BYTES
    value = _parse(option, text, units, "1Gbit/s")
    if not value:
        raise PlanError(f"{option} {text}: nothing would ever arrive; expected such as 1Gbit/s")
    return value


def size(option: str, text: str) -> float:
    """Read a number of bytes, above 0.

    Example:
        >>> size("--memory", "1.5GB")
        1500000000.0
    """
    value = _parse(option, text, _SIZES, "8GB")
    if not value:
        raise PlanError(f"{option} {text}: expected bytes above 0, such as 8GB")
    return value


def counts(option: str, text: str) -> tuple[int, ...]:
    """Read several counts: a list with commas, where `...` continues by doubling.

    Example:
        >>> counts("--workers", "1,...,8,12"), counts("--workers", "3,...,20")
        ((1, 2, 4, 8, 12), (3, 6, 12, 20))
    """
    found: list[int] = []
    items = text.split(",")
    for before, item in zip([None, *items], items, strict=False):
        if item.strip() == "...":
            continue
        value = count(option, item)
        if before is not None and before.strip() == "...":
            if not found:
                raise PlanError(f"{option} {text}: `...` has nothing to double; try 1,...,4096")
            while 2 * found[-1] < value:
                found.append(2 * found[-1])
        found.append(value)
    if items[-1].strip() == "...":
        raise PlanError(f"{option} {text}: `...` needs an end; try 1,...,4096")
    return tuple(sorted(set(found)))


def _parse(option: str, text: str, units: dict[str, float], example: str) -> float:
    match = re.fullmatch(r"\s*(-?[0-9.]+(?:e-?[0-9]+)?)\s*([A-Za-z/]*)\s*", text)
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or math.isnan(value):
        raise PlanError(f"{option} {text}: not a number with a unit, expected such as {example}")
    if match[2] not in units:
        listed = ", ".join(filter(None, units))
        raise PlanError(f"{option} {text}: unknown unit {match[2]!r}, expected one of {listed}")
    if value < 0:
        raise PlanError(f"{option} {text}: below 0, expected such as {example}")
    if math.isinf(value):
        raise PlanError(f"{option} {text}: too large, expected such as {example}")
    return value * units[match[2]]
