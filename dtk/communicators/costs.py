"""Costs of a message, a byte and an operation in a world, and what dtk does because of them.

    bucket       n bytes in k buckets cost k messages, and 1/k of the bytes are left to send when
                 the last gradient is there: least at n / k = sqrt(n message / byte)
    one hop      whether all tell all, or go round a ring: fewer messages, or fewer bytes
    factors      whether to send a product, or its factors and let each rank multiply

What is chosen decides in which order numbers are added up, so ranks must choose alike, and so
should the job that goes on tomorrow: see `calibration`.

Sources: Hockney 1994 (the model, and the half-performance length); Thakur, Rabenseifner and Gropp
2005, "Optimization of Collective Communication Operations in MPICH" (choosing by size).
"""

from __future__ import annotations

import dataclasses
import math

# No all-reduce of more goes in one hop: in a ring ranks add up while others still send.
ONE_HOP_MOST = 1 << 16
_BUCKET_LEAST = 1 << 16


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that a world's communicator and processors take.

    Attributes:
        size: Ranks, 2 or more.
        message: Seconds of a message of no length.
        byte: Seconds of a byte more, in a message or in what is added up of it.
        operation: Seconds of a floating point operation in a product of matrices.

    Raises:
        ValueError: One is no number above 0.

    Example:
        >>> costs = Costs(size=2, message=0.5e-3, byte=4e-9, operation=0.03e-9)
        >>> costs.half_length, costs.bucket(8 << 20), costs.flops_per_byte
        (131072, 1048576, 128.0)
    """

    size: int
    message: float
    byte: float
    operation: float

    def __post_init__(self) -> None:
        for name in ("size", "message", "byte", "operation"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"Costs({name}={value!r}); expected a number above 0")

    @property
    def half_length(self) -> int:
        """Bytes that take as long as a message: Hockney's n_1/2, to the next power of two.

        So close, most measurements of one world agree.
        """
        return int(_power_of_two(max(1.0, self.message / self.byte)))

    @property
    def flops_per_byte(self) -> float:
        """Operations that take as long as a byte, to the next power of two."""
        return _power_of_two(self.byte / self.operation)

    def bucket(self, total: int) -> int:
        """Return the bytes of a bucket of a list of tensors that become ready one by one.

        Args:
            total: Bytes of the list.
        """
        return max(_BUCKET_LEAST, math.isqrt(total * self.half_length))

    def allreduce(self, length: float) -> float:
        """Return the seconds of an all-reduce round a ring: 2 (P-1) messages of a P-th.

        Args:
            length: Bytes that each rank contributes.

        Example:
            >>> round(Costs(4, 0.5e-3, 1e-8, 1e-11).allreduce(4e6), 6)
            0.063
        """
        return 2 * (self.size - 1) * (self.message + self.byte * length / self.size)

    def allgather(self, length: float) -> float:
        """Return the seconds of an all-gather: P-1 messages.

        Args:
            length: Bytes from each rank.

        Example:
            >>> round(Costs(4, 0.5e-3, 1e-8, 1e-11).allgather(1e6), 6)
            0.0315
        """
        return (self.size - 1) * (self.message + self.byte * length)

    @property
    def one_hop(self) -> int:
        """Bytes up to which an all-reduce goes to everyone at once, and not round a ring.

        With P ranks, P - 1 times n bytes and a message, against 2 (P-1)/P n bytes and 2 (P-1)
        messages.

        Example:
            >>> [Costs(size, 1e-4, 1e-8, 1e-11).one_hop for size in (2, 4, 64)]
            [65536, 27306, 16778]
        """
        ranks = self.size
        more = (ranks - 1) * (1 - 2 / ranks)
        fewer = 2 * (ranks - 1) - 1
        return min(ONE_HOP_MOST, int(fewer / more * self.half_length)) if more else ONE_HOP_MOST

    def __str__(self) -> str:
        """What was found, and what dtk does because of it."""
        return (
            f"{self.size} ranks: a message takes {1e3 * self.message:.2f} ms, a megabyte "
            f"{1e9 * self.byte:.1f} ms, a product of 1 GFlop {1e12 * self.operation:.0f} ms\n"
            f"so a list of 1 MB leaves in buckets of {self.bucket(10**6) / 1e6:.2f} MB, one of 100 "
            f"MB in those of {self.bucket(10**8) / 1e6:.1f} MB; up to {self.one_hop / 1e3:.0f} kB "
            "are summed in one hop\n"
            f"and a Dense kernel's gradient goes as its factors where {self.flops_per_byte:.0f} "
            "operations are saved for a byte less"
        )


def line(size: int, seconds: dict[int, float]) -> tuple[float, float]:
    """Return the seconds of a message and of a byte, from two all-reduces round a ring.

    A ring sends 2 (P-1) messages of n/P bytes.

    Args:
        size: Number of ranks, P.
        seconds: Of each all-reduce, by its bytes n; more bytes take longer.

    Returns:
        Seconds of a message of no length, and of a byte more.

    Example:
        >>> line(2, {100: 1.0, 300: 2.0})
        (0.25, 0.005)
    """
    (few, quick), (many, slow) = sorted(seconds.items())
    messages = 2 * (size - 1)
    per_byte = (slow - quick) / (many - few)
    message = max(quick - per_byte * few, 1e-6) / messages
    return message, per_byte * size / messages


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))
