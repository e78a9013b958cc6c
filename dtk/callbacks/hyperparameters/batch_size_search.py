"""Search for the next global batch size by trial: the logic of CNTK's automatic scaling.

    lower bound                                        upper bound
    previous / 2, and initial / sqrt(lr_now / lr_0)    2 x previous, and a maximum
        |----- x sqrt 2 -----|----- x sqrt 2 -----| ... |
      base                  good                 loss > base * 1.01: stop, the last good one wins

Source: SGD::AdaptiveMinibatchSizing and SearchForBestMinibatchSize of CNTK 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable


def bounds(initial: int, previous: int, rate_ratio: float, maximum: int) -> tuple[int, int]:
    """Return the smallest and the largest size to try.

    If the rate has fallen, the lower bound rises, by the square root only: the whole factor would
    be too aggressive. The lower bound may rise above the upper bound.

    Example:
        >>> bounds(256, 256, rate_ratio=1.0, maximum=2**20)
        (256, 512)
        >>> bounds(256, 1024, rate_ratio=0.25, maximum=2**20)
        (512, 2048)
    """
    lowest = int(initial / math.sqrt(min(1.0, rate_ratio)))
    return max(lowest, previous // 2), min(maximum, 2 * previous)


def trial_sizes(lower: int, upper: int, multiple: int = 64) -> list[int]:
    """Return sizes to try, each a factor of the square root of two larger, rounded to multiples.

    Example:
        >>> trial_sizes(128, 512)
        [128, 192, 256, 384, 512]
        >>> trial_sizes(4096, 512)
        [512]
    """
    wanted = [float(min(lower, upper))]
    while (larger := wanted[0] * 2.0 ** (len(wanted) / 2)) <= upper:
        wanted.append(larger)
    return list(dict.fromkeys(round_to(size, multiple) for size in wanted))


def round_to(size: float, multiple: int) -> int:
    """Return the nearest multiple, at least the first; halves are rounded up.

    Example:
        >>> round_to(95, 64), round_to(96, 64), round_to(3, 64)
        (64, 128, 64)
    """
    return multiple * max(1, int((size + multiple / 2) // multiple))


def last_good(
    sizes: Iterable[int], criterion: Callable[[int], float], margin: float
) -> tuple[int | None, dict[int, float]]:
    """Try sizes until one is worse than the first; return the last good size and all results.

    CNTK takes a NaN for a good result; here it is a bad one.

    Example:
        >>> last_good([64, 128, 192], {64: 1.0, 128: 1.005, 192: 1.02}.get, 0.01)
        (128, {64: 1.0, 128: 1.005, 192: 1.02})
    """
    best, told = None, {}
    allowed = math.inf
    for size in sizes:
        loss = told[size] = criterion(size)
        if not (math.isfinite(loss) and loss <= allowed):
            break
        if best is None:
            allowed = loss + margin * abs(loss)
        best = size
    return best, told
