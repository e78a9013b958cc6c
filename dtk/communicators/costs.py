"""The cost model: the traffic of a collective, and the seconds that a world takes to send it.

`Traffic` is the number of messages of a collective that wait for each other, and its bytes. In
Hockney's model m messages and n bytes take m * message + n * byte seconds. With P ranks and n bytes
on each:

    | collective        | messages, one after the other | bytes through a link             |
    |---|---|---|
    | ring all-reduce   | 2 (P-1)                       | 2 (P-1)/P n                      |
    | one-hop all-reduce | 1                            | (P-1) n                          |
    | ring all-gather   | P-1                           | (P-1)/P n, n being the result    |
    | all-to-all        | P-1                           | (P-1)/P n                        |
    | parameter servers | 2: pull and push              | 2 n a worker; 2 P n / S a server |

By this model dtk chooses the size of buckets, whether an all-reduce goes in one hop or round a
ring, and whether to send a Dense kernel's gradient as its factors (`Costs`); `dtk plan` predicts
steps. The choices decide in which order numbers are added up, so all ranks must choose alike, and
so should a resumed job: see `cost_measurement`.

This file does not import TensorFlow, so that `dtk plan` starts at once.

Sources: Hockney 1994 (the model, and the half-performance length); Thakur, Rabenseifner and Gropp
2005, "Optimization of Collective Communication Operations in MPICH" (costs, and choosing by size);
Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce Algorithms" (no all-reduce sends less than a
ring); Li et al., OSDI'14 (parameter servers).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

# Larger all-reduces never go in one hop: in a ring, ranks add up while others still send.
ONE_HOP_MOST = 1 << 16
# Bytes of a bucket.
BUCKET_LEAST, BUCKET_MOST = 1 << 16, 1 << 24
# Floating point operations a worker does in the time of one byte, if that was not measured: less
# than most machines do. One core with AVX-512 on loopback does 450, eight on 10 Gbit/s 600.
FLOPS_PER_BYTE = 100
# `dtk.communicators.collective` rounds lengths that vary up to three significant bits, in words of
# four bytes.
_WORD = 4
_KEPT_BITS = 3


class Traffic(NamedTuple):
    """Messages and bytes through the link of the busiest host."""

    messages: float = 0.0  # one after the other
    bytes: float = 0.0  # in one direction; as many go in the other direction at the same time

    def and_then(self, other: Traffic) -> Traffic:
        """Return the sum of two traffics, one after the other.

        Example:
            >>> Traffic(1, 10).and_then(Traffic(2, 5))
            Traffic(messages=3, bytes=15)
        """
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def times(self, factor: float) -> Traffic:
        """Return the traffic times a factor.

        Example:
            >>> Traffic(2, 10).times(0.5)
            Traffic(messages=1.0, bytes=5.0)
        """
        return Traffic(self.messages * factor, self.bytes * factor)

    def seconds(self, message: float, byte: float) -> tuple[float, float]:
        """Return the seconds of the messages and the seconds of the bytes, in Hockney's model.

        Example:
            >>> Traffic(2, 10).seconds(message=0.5, byte=0.25)
            (1.0, 2.5)
        """
        return self.messages * message, self.bytes * byte


def ring_allreduce(ranks: int, nbytes: float) -> Traffic:
    """Return the traffic of a reduce-scatter, then an all-gather, round a ring.

    The number of ranks per host does not matter: the ring leaves and enters each host once.

    Source: Patarasuk and Yuan 2009.

    Example:
        >>> ring_allreduce(4, 100)
        Traffic(messages=6, bytes=150.0)
    """
    return Traffic(2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes)


def one_hop_allreduce(ranks: int, nbytes: float) -> Traffic:
    """Return the traffic if every rank sends its n bytes to every other, which adds them up.

    Example:
        >>> one_hop_allreduce(4, 100)
        Traffic(messages=1, bytes=300)
    """
    return Traffic(1, (ranks - 1) * nbytes)


def ring_allgather(ranks: int, nbytes: float) -> Traffic:
    """Return the traffic if every rank's part of n bytes goes round a ring.

    Source: Thakur et al. 2005, section 3.1.

    Example:
        >>> ring_allgather(4, 100)
        Traffic(messages=3, bytes=75.0)
    """
    return Traffic(ranks - 1, (ranks - 1) / ranks * nbytes)


def alltoall(ranks: int, nbytes: float, per_host: int = 1) -> Traffic:
    """Return the traffic if every rank sends every other its part of n bytes.

    Ranks of a host share the host's link.

    Source: Thakur et al. 2005, section 3.3 (pairwise exchange).

    Example:
        >>> [alltoall(4, 100, per_host).bytes for per_host in (1, 2, 4)]
        [75.0, 100.0, 75.0]
    """
    # On one host ranks share no link.
    sharing, away = (per_host, ranks - per_host) if ranks > per_host else (1, ranks - 1)
    return Traffic(ranks - 1, sharing * away / ranks * nbytes)


def pull(workers: int, servers: int, per_host: int, nbytes: float) -> Traffic:
    """Return the traffic if all workers read all weights from parameter servers.

    The link of a server or of a host counts, whichever is busier. A push has the same traffic in
    the other direction.

    Source: Li et al., OSDI'14.

    Example:
        >>> pull(8, 2, 1, 100), pull(8, 16, 1, 100)
        (Traffic(messages=1, bytes=400.0), Traffic(messages=1, bytes=100))
    """
    return Traffic(1, max(workers / servers, min(per_host, workers)) * nbytes)


def padded(nbytes: float) -> int:
    """Return the bytes on the wire of one of several unequal parts, padding included.

    See `dtk.communicators.collective`.

    Example:
        >>> padded(1000), padded(1100), padded(4)
        (1024, 1280, 4)
    """
    words = max(1, -int(-nbytes // _WORD))
    unit = 1 << max(words.bit_length() - _KEPT_BITS, 0)
    return -(-words // unit) * unit * _WORD


def fit_allreduces(
    ranks: int, seconds: Mapping[int, float], least: float = 0.0
) -> tuple[float, float]:
    """Return the seconds of a message and of a byte, fitted to two all-reduces round a ring.

    Example:
        >>> fit_allreduces(2, {100: 1.0, 300: 2.0})
        (0.25, 0.005)
    """
    (few, quick), (many, slow) = sorted(seconds.items())
    small, large = ring_allreduce(ranks, few), ring_allreduce(ranks, many)
    byte = max(0.0, (slow - quick) / (large.bytes - small.bytes))
    return max(least, quick - byte * small.bytes) / small.messages, byte


def half_length(message: float, byte: float) -> float:
    """Return the bytes that take as long as a message: Hockney's n_1/2, to a power of two.

    Rounded like this, most measurements of one world agree.

    Example:
        >>> half_length(0.5e-3, 4e-9)
        131072.0
    """
    return _power_of_two(max(1.0, message / byte)) if byte else math.inf


def bucket(total: float, half_length: float) -> float:
    """Return the bytes of a bucket, for a list of tensors that become ready one by one.

    n bytes in k buckets cost k messages, and 1/k of the bytes are left to send when the last
    gradient is ready; the sum is smallest at n / k = sqrt(n message / byte).

    Example:
        >>> bucket(8 << 20, 1 << 17), bucket(1000, 1 << 17)
        (1048576.0, 65536)
    """
    return max(BUCKET_LEAST, math.sqrt(total * half_length))


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured costs of a world's communicator and processors.

    Example:
        >>> costs = Costs(size=2, message=0.5e-3, byte=4e-9, operation=0.03e-9)
        >>> costs.half_length, costs.bucket(8 << 20), costs.flops_per_byte
        (131072, 1048576, 128.0)
    """

    size: int  # ranks, 2 or more
    message: float  # seconds of an empty message
    byte: float  # seconds of each further byte, to send and to add up
    operation: float  # seconds of a floating point operation in a matrix product

    def __post_init__(self) -> None:
        for name in ("size", "message", "byte", "operation"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"Costs({name}={value!r}); expected a number above 0")

    @property
    def half_length(self) -> int:
        """Bytes that take as long as a message, to the next power of two."""
        return int(half_length(self.message, self.byte))

    @property
    def flops_per_byte(self) -> float:
        """Operations that take as long as a byte, to the next power of two."""
        return _power_of_two(self.byte / self.operation)

    def bucket(self, total: int) -> int:
        """Return the bytes of a bucket, for a list of tensors that become ready one by one."""
        return int(bucket(total, self.half_length))

    def allreduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce round a ring.

        Example:
            >>> round(Costs(4, 0.5e-3, 1e-8, 1e-11).allreduce(4e6), 6)
            0.063
        """
        return sum(ring_allreduce(self.size, nbytes).seconds(self.message, self.byte))

    def allgather(self, nbytes: float) -> float:
        """Return the seconds of an all-gather round a ring.

        Example:
            >>> round(Costs(4, 0.5e-3, 1e-8, 1e-11).allgather(1e6), 6)
            0.0315
        """
        gathered = ring_allgather(self.size, self.size * nbytes)
        return sum(gathered.seconds(self.message, self.byte))

    @property
    def one_hop(self) -> int:
        """Bytes up to which an all-reduce goes in one hop, not round a ring.

        One hop needs fewer messages and, with more than two ranks, more bytes.

        Example:
            >>> [Costs(size, 1e-4, 1e-8, 1e-11).one_hop for size in (2, 4, 64)]
            [65536, 27306, 16778]
        """
        hop, ring = one_hop_allreduce(self.size, 1), ring_allreduce(self.size, 1)
        more, fewer = hop.bytes - ring.bytes, ring.messages - hop.messages
        return min(ONE_HOP_MOST, int(fewer / more * self.half_length)) if more else ONE_HOP_MOST

    def __str__(self) -> str:
        """Return the measured costs and what dtk does because of them."""
        return (
            f"{self.size} ranks: a message takes {1e3 * self.message:.2f} ms, a megabyte "
            f"{1e9 * self.byte:.1f} ms, a product of 1 GFlop {1e12 * self.operation:.0f} ms\n"
            f"so a list of 1 MB leaves in buckets of {self.bucket(10**6) / 1e6:.2f} MB, one of 100 "
            f"MB in those of {self.bucket(10**8) / 1e6:.1f} MB; up to {self.one_hop / 1e3:.0f} kB "
            "are summed in one hop\n"
            f"and a Dense kernel's gradient goes as its factors where {self.flops_per_byte:.0f} "
            "operations are saved for a byte less"
        )


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))
