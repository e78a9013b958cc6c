"""Traffic of a collective on a link: messages that wait for each other, and bytes.

With P workers and n bytes on each, in Hockney's model, where a message of m bytes takes
latency + m / bandwidth:

    | collective        | messages, one after the other | bytes through a link             |
    |---|---|---|
    | ring all-reduce   | 2 (P-1)                       | 2 (P-1)/P n                      |
    | ring all-gather   | P-1                           | (P-1)/P n, n being the result    |
    | all-to-all        | P-1                           | (P-1)/P n                        |
    | hierarchical, between H hosts | 2 (H-1)           | 2 (H-1)/H n                      |
    | ... within a host of w        | 2 (w-1)           | 2 (w-1)/w n                      |
    | parameter servers | 2: pull and push              | 2 n a worker; 2 P n / S a server |

Sources: Hockney 1994; Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH" (costs); Patarasuk and Yuan 2009, "Bandwidth Optimal All-reduce
Algorithms" (no all-reduce sends less than a ring); Li et al., OSDI'14 (parameter servers).
"""

from __future__ import annotations

from typing import NamedTuple

# dtk's collectives over TensorFlow's round up what varies in length to three significant bits, in
# words of four bytes (`dtk.communicators.collective`).
_WORD = 4
_KEPT_BITS = 3


class Traffic(NamedTuple):
    """Messages and bytes that go through the link of the busiest host.

    Attributes:
        messages: One after the other.
        bytes: In one direction; as many go in the other at the same time.
    """

    messages: float = 0.0
    bytes: float = 0.0

    def and_then(self, other: Traffic) -> Traffic:
        """Return both, one after the other.

        Args:
            other: What comes next.

        Example:
            >>> Traffic(1, 10).and_then(Traffic(2, 5))
            Traffic(messages=3, bytes=15)
        """
        return Traffic(self.messages + other.messages, self.bytes + other.bytes)

    def times(self, factor: float) -> Traffic:
        """Return a multiple of it.

        Args:
            factor: How much of it.

        Example:
            >>> Traffic(2, 10).times(0.5)
            Traffic(messages=1.0, bytes=5.0)
        """
        return Traffic(self.messages * factor, self.bytes * factor)


def ring_allreduce(workers: int, size: float) -> Traffic:
    """Return a reduce-scatter, then an all-gather, round a ring.

    It does not matter how many workers share a host: one neighbor of each host is on another.

    Args:
        workers: P.
        size: n, bytes.

    Example:
        >>> ring_allreduce(4, 100)
        Traffic(messages=6, bytes=150.0)

    Source: Patarasuk and Yuan 2009.
    """
    return Traffic(2 * (workers - 1), 2 * (workers - 1) / workers * size)


def ring_allgather(workers: int, size: float) -> Traffic:
    """Return every worker's part of n bytes going round a ring.

    Args:
        workers: P.
        size: n, bytes of all parts.

    Example:
        >>> ring_allgather(4, 100)
        Traffic(messages=3, bytes=75.0)

    Source: Thakur et al. 2005, section 3.1.
    """
    return Traffic(workers - 1, (workers - 1) / workers * size)


def alltoall(workers: int, size: float, per_host: int = 1) -> Traffic:
    """Return every worker sending every other its part of n bytes.

    Workers of a host share its link.

    Args:
        workers: P.
        size: n, bytes of a worker's parts, its own included.
        per_host: Workers of a host.

    Example:
        >>> [alltoall(4, 100, per_host).bytes for per_host in (1, 2, 4)]
        [75.0, 100.0, 75.0]

    Source: Thakur et al. 2005, section 3.3 (pairwise exchange).
    """
    away = workers - per_host
    if not away:  # one host: nobody's bytes share a link with another's
        return Traffic(workers - 1, (workers - 1) / workers * size)
    return Traffic(workers - 1, per_host * away / workers * size)


def hierarchical_allreduce(hosts: int, per_host: int, size: float) -> tuple[Traffic, Traffic]:
    """Return a reduction within each host, an all-reduce between hosts, a broadcast back.

    Args:
        hosts: H.
        per_host: w, workers of a host.
        size: n, bytes.

    Returns:
        What is between hosts, and what is within one.

    Example:
        >>> between, within = hierarchical_allreduce(2, 4, 100)
        >>> between, within
        (Traffic(messages=2, bytes=100.0), Traffic(messages=6, bytes=150.0))

    Source: Jia et al. 2018, "Highly Scalable Deep Learning Training System with Mixed-Precision".
    """
    return ring_allreduce(hosts, size), ring_allreduce(per_host, size)


def pull(workers: int, servers: int, per_host: int, size: float) -> Traffic:
    """Return all workers reading all weights; the busier of a server's and a host's link counts.

    A push is the same in the other direction.

    Args:
        workers: P.
        servers: S, each on a host of its own.
        per_host: Workers of a host.
        size: n, bytes of the weights.

    Example:
        >>> pull(8, 2, 1, 100), pull(8, 16, 1, 100)
        (Traffic(messages=1, bytes=400.0), Traffic(messages=1, bytes=100))

    Source: Li et al., OSDI'14.
    """
    return Traffic(1, max(workers / servers, min(per_host, workers)) * size)


def padded(size: float) -> int:
    """Return the bytes that a part of unequal parts takes on the wire.

    See `dtk.communicators.collective`.

    Args:
        size: Bytes of the part.

    Example:
        >>> padded(1000), padded(1100), padded(4)
        (1024, 1280, 4)
    """
    words = max(1, -int(-size // _WORD))
    unit = 1 << max(words.bit_length() - _KEPT_BITS, 0)
    return -(-words // unit) * unit * _WORD
