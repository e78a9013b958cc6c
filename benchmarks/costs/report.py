"""Medians and quartiles, ratios within rounds, and whether a target was met; in Markdown."""

import operator
import statistics
from typing import NamedTuple

from dtk.bench.page import markdown_table

MS = 1e3  # from seconds


class Target(NamedTuple):
    """What a median should be: its limit, and on which side of it."""

    limit: float
    sign: str

    def cells(self, value):
        holds = {"≥": operator.ge, "≤": operator.le}[self.sign]
        verdict = "met" if holds(value, self.limit) else "**missed**"
        return [f"{self.sign} {self.limit:.3g}", verdict]


def at_least(limit):
    return Target(limit, "≥")


def at_most(limit):
    return Target(limit, "≤")


def median(values):
    return statistics.median(values)


def spread(values, scale=1.0):
    """Median (and quartiles), to four digits.

    Args:
        values: Samples.
        scale: What they are multiplied by.
    """
    values = [scale * value for value in values]
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:.4g} ({low:.4g} - {high:.4g})"


def compared(one, other, target, scale=MS, speed=False):
    """Cells: both, their ratio within each round, the target for its median, whether it was met.

    Args:
        one: Samples by round.
        other: The same, of the peer.
        target: For the ratio.
        scale: What samples are multiplied by.
        speed: Whether the ratio is other / one; else one / other.
    """
    pairs = zip(other, one, strict=True) if speed else zip(one, other, strict=True)
    ratios = [a / b for a, b in pairs]
    return [
        *(spread(samples, scale) for samples in (one, other)),
        spread(ratios),
        *target.cells(median(ratios)),
    ]


def markdown(header, rows):
    """A table's lines.

    Args:
        header: Names of columns, with bars between.
        rows: Lists of cells.
    """
    return markdown_table([header.split("|"), *rows])
