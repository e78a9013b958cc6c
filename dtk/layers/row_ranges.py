"""The rows of an image that a rank needs to compute its rows of a window's output.

Convolutions and pooling slide a window over an axis. With kernel k, stride s, dilation d and p rows
of padding in front, outputs [a, b) need inputs

    [a s - p,  (b - 1) s - p + (k - 1) d + 1)

where rows outside [0, length) are padding. With TensorFlow's "same" padding an axis of length n has
ceil(n / s) outputs, and p is half the number of rows that they need beyond n, rounded down.

The same holds for columns. This file computes with integers only, not with tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Range(NamedTuple):
    """Rows from `start` up to, but not including, `stop`; empty if `stop <= start`."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return max(0, self.stop - self.start)

    def within(self, other: Range) -> Range:
        """Return the rows in both ranges; if there are none, an empty range at the nearer end."""
        start = min(max(self.start, other.start), other.stop)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclasses.dataclass(frozen=True)
class Window:
    """A window that slides over an axis.

    Example:
        >>> window = Window(3, stride=2, padding="same")
        >>> window.outputs(6), window.front(6), window.needs(Range(0, 3), 6)
        (3, 0, Range(start=0, stop=7))
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: str = "valid"

    @property
    def extent(self) -> int:
        """Rows from the first tap to the last, both included."""
        return (self.kernel - 1) * self.dilation + 1

    def outputs(self, length: int) -> int:
        """Return the number of outputs of an axis."""
        if self.padding == "same":
            return -(-length // self.stride)
        return max(0, (length - self.extent) // self.stride + 1)

    def front(self, length: int) -> int:
        """Return the number of padding rows in front."""
        if self.padding != "same":
            return 0
        return max(0, (self.outputs(length) - 1) * self.stride + self.extent - length) // 2

    def needs(self, outputs: Range, length: int) -> Range:
        """Return the inputs that some outputs need, padding included."""
        start = outputs.start * self.stride - self.front(length)
        return Range(start, start + (outputs.length - 1) * self.stride + self.extent)

    def taps(self, output: int, length: int) -> int:
        """Return how many taps of an output are on rows, not on padding."""
        start = output * self.stride - self.front(length)
        return sum(0 <= start + tap * self.dilation < length for tap in range(self.kernel))


def ranges_of(sizes: Sequence[int]) -> list[Range]:
    """Return the rows of every rank: consecutive ranges of these sizes."""
    ends = [0, *itertools.accumulate(sizes)]
    return [Range(a, b) for a, b in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Halo:
    """The rows that ranks send each other, so that each has the rows it needs.

    Example:
        >>> halo = Halo((2, 2), (Range(-1, 3), Range(1, 5)))
        >>> halo.matrix, halo.padding(0)
        ([[0, 1], [1, 0]], (1, 0))
    """

    sizes: tuple[int, ...]
    needs: tuple[Range, ...]

    def sent(self, source: int, dest: int) -> Range:
        """Return which of its rows a rank sends to another, counted from its own first row."""
        own = ranges_of(self.sizes)[source]
        found = self.needs[dest].within(own)
        return Range(found.start - own.start, found.stop - own.start)

    @property
    def matrix(self) -> list[list[int]]:
        """Number of rows that rank i sends to rank j; 0 to itself."""
        ranks = range(len(self.sizes))
        return [[self.sent(i, j).length if i != j else 0 for j in ranks] for i in ranks]

    def padding(self, rank: int) -> tuple[int, int]:
        """Return the numbers of padding rows that a rank adds before and behind."""
        inside = self.needs[rank].within(Range(0, sum(self.sizes)))
        before = min(self.needs[rank].length, max(0, -self.needs[rank].start))
        return before, self.needs[rank].length - before - inside.length
