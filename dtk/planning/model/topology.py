"""Which ranks of a grid talk to each other, and over which link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtk.communicators import costs
from dtk.communicators.costs import ONE_HOP_MOST, Traffic
from dtk.planning.inputs import PAYLOAD, Cluster


@dataclass(frozen=True)
class Group:
    """Ranks that share collectives, and what their links take.

    Example:
        >>> Group(2, message=0.5, byte=0.25).seconds(Traffic(2, 10))
        3.5
    """

    size: int  # how many ranks
    message: float  # seconds of a message of no length
    byte: float  # seconds of a byte more, of the busiest link, with what groups beside it send

    def seconds(self, traffic: Traffic) -> float:
        return sum(traffic.seconds(self.message, self.byte))

    def allreduce(self, nbytes: float) -> Traffic:
        """Return the traffic of summing so many bytes: in one hop where that is faster.

        Example:
            >>> slow = Group(4, message=1.0, byte=1e-9)
            >>> slow.allreduce(1000), slow.allreduce(1 << 20).messages
            (Traffic(messages=1, bytes=3000), 6)
        """
        if self.size == 1 or not nbytes:
            return Traffic()
        ring = costs.ring_allreduce(self.size, nbytes)
        if nbytes > ONE_HOP_MOST:
            return ring
        return min(ring, costs.one_hop_allreduce(self.size, nbytes), key=self.seconds)

    def allgather(self, nbytes: float) -> Traffic:
        """Return the traffic of giving all ranks all parts of so many bytes.

        Example:
            >>> Group(4, 1.0, 1e-9).allgather(1000)
            Traffic(messages=3, bytes=750.0)
        """
        if self.size == 1 or not nbytes:
            return Traffic()
        return costs.ring_allgather(self.size, nbytes)

    def halos(self, nbytes: float) -> Traffic:
        """Return the traffic of border rows going to neighbours, in one exchange among all.

        Example:
            >>> Group(3, 1.0, 1e-9).halos(1000)
            Traffic(messages=2, bytes=1000)
        """
        if self.size == 1 or not nbytes:
            return Traffic()
        return Traffic(self.size - 1, nbytes)


def busiest(groups: Sequence[Sequence[int]], per_host: int) -> int:
    """Return how many neighbours in rings of ranks are reached through one host's link.

    Example:
        >>> busiest([[0, 1], [2, 3]], 2), busiest([[0, 2], [1, 3]], 2)
        (0, 2)
        >>> busiest([[0, 1, 2, 3]], 2)
        1
    """
    leaving: dict[int, int] = {}
    for ring in groups:
        for rank, following in zip(ring, [*ring[1:], ring[0]], strict=True):
            if rank // per_host != following // per_host:
                leaving[rank // per_host] = leaving.get(rank // per_host, 0) + 1
    return max(leaving.values(), default=0)


def group(rings: Sequence[Sequence[int]], cluster: Cluster) -> Group:
    """Return what links take between ranks that talk in rings, all rings at the same time.

    Example:
        >>> from dtk.planning.inputs import PAYLOAD, Link, Software
        >>> software = Software(message=0.25, byte=0.0)
        >>> cluster = Cluster(Link(0.5, 100 / PAYLOAD), per_host=2, software=software)
        >>> group([[0, 1], [2, 3]], cluster), group([[0, 2], [1, 3]], cluster)
        (Group(size=2, message=0.25, byte=0.0), Group(size=2, message=0.75, byte=0.02))
    """
    sharing = busiest(rings, cluster.per_host)
    link = cluster.network if sharing else cluster.host
    message, _ = cluster.over(link, Traffic(1, 0))
    # Software copies for each rank by itself; a link carries what all of its ranks send.
    byte = max(cluster.software.byte, max(1, sharing) / (link.bandwidth * PAYLOAD))
    return Group(len(rings[0]), message, byte)


@dataclass(frozen=True)
class Grid:
    """Ranks as replicas of one model (`data`), each held by neighbours (`model`).

    Example:
        >>> Grid(2, 2).models(), Grid(2, 2).replicas()
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """

    data: int  # replicas, each of which trains on its part of the batch
    model: int  # ranks that hold one model

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.model

    def models(self) -> list[list[int]]:
        """Return the ranks that hold parts of one model, for each replica."""
        return [list(range(start, start + self.model)) for start in range(0, self.size, self.model)]

    def replicas(self) -> list[list[int]]:
        """Return the ranks that hold the same part, for each part."""
        return [list(range(part, self.size, self.model)) for part in range(self.model)]

    def rows(self, batch: int) -> int:
        """Return the rows of the replica that has most.

        Example:
            >>> Grid(3, 1).rows(32)
            11
        """
        return -(-batch // self.data)

    def __str__(self) -> str:
        """How it is written in tables: replicas x ranks of a model."""
        return f"{self.data} x {self.model}"


def grids(workers: int, batch: int) -> list[Grid]:
    """Return all grids of so many ranks in which every replica has rows.

    Example:
        >>> [str(grid) for grid in grids(4, 2)]
        ['2 x 2', '1 x 4']
    """
    return [
        Grid(data, workers // data)
        for data in range(workers, 0, -1)
        if workers % data == 0 and data <= batch
    ]
