"""Methods of a step, by strategy and exchange: the time of each part.

    plain        compute ...................... | code | send ..........
    overlap      compute .......[ backward .... ]                         a bucket goes when full
                                        [ send .......... ]
    factors      compute ...................... | send ... | multiply     of few rows
    delayed      compute ........................                         the last step's gradients
                 [ send .................. ]                              go meanwhile
    blocks       compute | compute | compute | compute | send ..........  weights, once a block

dtk's code sends the same traffic, and its tests count it. Whole gradients go round a ring. Factors
go to all ranks (all-gather), beside the gradients without factors. Uncoded gradients go in one hop,
and then codes go to their owners (all-to-all) and from them to all (all-gather). Metrics go beside
all of these, before the gradients are ready.

Sources: as in `dtk.communicators.costs`; Li et al. 2020, "PyTorch Distributed: Experiences on
Accelerating Data Parallel Training" (buckets and what they hide); Xie et al. 2016 (factors); Seide
et al. 2014 (codes); Chen and Huo 2016 (block momentum).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtk.communicators import costs
from dtk.communicators.costs import BUCKET_MOST, Traffic
from dtk.planning.inputs import Cluster, Factors, Training

# The backward pass's part of computing: it does twice the work of the forward pass.
BACKWARD = 2 / 3


class Cost(NamedTuple):
    """Seconds and bytes of a step; for asynchronous workers, of one step per worker."""

    computing: float  # seconds
    # seconds of a worker for codes, products of factors, and what a strategy adds to a step
    coding: float = 0.0
    sending: float = 0.0  # seconds that no computing hides
    bytes: float = 0.0  # bytes that a worker sends

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.computing + self.coding + self.sending


@dataclass(frozen=True)
class Method:
    """A strategy with an exchange."""

    name: str  # name in tables
    use: str  # code for a script
    # returns the cost of a step for a job, a cluster and a number of workers
    cost: Callable[[Training, Cluster, int], Cost]
    exact: bool = False  # whether training equals that of one process
    served: bool = False  # whether it needs parameter servers

    @property
    def label(self) -> str:
        """Its name in tables, marked if it changes training."""
        return self.name if self.exact else f"{self.name} *"


def early(size: float, half_length: float) -> float:
    """Return the part of the bytes that can go before the last gradient is ready.

    These are all buckets but one.

    Example:
        >>> early(8 << 20, 1 << 17), early(1000, 1 << 17)
        (0.875, 0.0)
    """
    return max(0.0, 1 - min(BUCKET_MOST, costs.bucket(size, half_length)) / size) if size else 0.0


def exposed(sending: float, computing: float, part: float) -> float:
    """Return the seconds of sending that the backward pass does not hide.

    Messages are not part of `sending`: the last bucket's messages come after the backward pass.

    Source: Li et al. 2020, section 3.2.3.

    Example:
        >>> exposed(1.0, 3.0, 0.75), exposed(8.0, 3.0, 0.75)
        (0.25, 6.5)
    """
    return sending - min(sending, BACKWARD * computing) * part


def dense(job: Training, cluster: Cluster, workers: int, exchange: str = "dense") -> Cost:
    """Predict whole gradients, or fp16 ones, round a ring; a bucket goes out when it is full.

    With few rows, gradients of some kernels go as factors instead. How much the backward pass hides
    is measured, since sending needs cores, too.

    Example:
        >>> from dtk.planning.inputs import PAYLOAD, Link, Software
        >>> cluster = Cluster(Link(0.0, 1e6 / PAYLOAD), software=Software(0.0, 0.0, 0.0))
        >>> cost = dense(Training(step=1.0, parameters=1_000_000), cluster, 4)
        >>> cost.computing, cost.coding, round(cost.sending, 4), cost.bytes
        (1.0, 0.0, 6.0, 4000000.0)
    """
    kernels = job.factored(workers)
    if kernels is not None:
        return _factors(job, cluster, workers, exchange, kernels)
    size, computing = job.size(exchange), job.computing(workers)
    messages, stream = cluster.parts(costs.ring_allreduce(workers, size), workers)
    waiting = messages + _not_hidden(cluster, workers, computing, stream, size)
    return Cost(computing, _coding(job, cluster, workers, exchange), waiting, size)


def _not_hidden(
    cluster: Cluster, workers: int, computing: float, stream: float, size: float
) -> float:
    """Return `exposed` for gradients of `size` bytes, with the measured hidden part."""
    part = cluster.software.hidden * early(size, cluster.half_length(workers))
    return exposed(stream, computing, part)


def _factors(
    job: Training, cluster: Cluster, workers: int, exchange: str, kernels: Factors
) -> Cost:
    """Predict factors: the rows of all workers go to all, uncoded, and are then multiplied.

    The other gradients go as usual. Messages of both wait at the same time; bytes share a link.
    """
    computing, mine = job.computing(workers), job.rows_of(workers)
    own, rest = kernels.size(mine), job.size(exchange) * (1 - kernels.entries / job.parameters)
    striped = costs.padded(own) * workers
    rows = cluster.parts(costs.ring_allgather(workers, striped), workers)
    others = cluster.parts(costs.ring_allreduce(workers, rest), workers)
    stream = rows[1] + _not_hidden(cluster, workers, computing, others[1], rest)
    product = cluster.software.product * kernels.entries * (job.batch(workers) - mine)
    coding = _coding(job, cluster, workers, exchange) + product
    return Cost(computing, coding, max(rows[0], others[0]) + stream, own + rest)


def coded(bits: int) -> Callable[[Training, Cluster, int], Cost]:
    """Return the cost function of codes: they go to owners and back once all are coded."""
    exchange = f"{bits}bit"

    def cost(job: Training, cluster: Cluster, workers: int) -> Cost:
        size = job.size(exchange)
        sending = cluster.seconds(_codes(size, workers, cluster.per_host), workers)
        coding = _coding(job, cluster, workers, exchange)
        return Cost(job.computing(workers), coding, sending, size)

    return cost


def _codes(size: float, workers: int, per_host: int) -> Traffic:
    """Return the traffic of codes.

    Uncoded vectors, few, go in one hop; then stripes go to owners, and from owners to all.
    """
    striped = costs.padded(size / workers) * workers
    vectors = costs.alltoall(workers, 0)
    to_owners = costs.alltoall(workers, striped, min(per_host, workers))
    return vectors.and_then(to_owners).and_then(costs.ring_allgather(workers, striped))


def delayed(job: Training, cluster: Cluster, workers: int) -> Cost:
    """Predict delayed gradients: those of the last step go round a ring while a step computes."""
    size, computing = job.size("dense"), job.computing(workers)
    sending = cluster.seconds(costs.ring_allreduce(workers, size), workers)
    coding = _coding(job, cluster, workers, "dense")
    return Cost(computing, coding, max(0.0, sending - computing), size)


def block_momentum(job: Training, cluster: Cluster, workers: int) -> Cost:
    """Predict block momentum: weights go round a ring once per block, and nothing in between."""
    block = costs.ring_allreduce(workers, job.size("dense")).times(1 / job.block_steps)
    sending = cluster.seconds(block, workers)
    coding = _coding(job, cluster, workers, "block momentum")
    return Cost(job.computing(workers), coding, sending, job.size("dense") / job.block_steps)


def servers_sync(job: Training, cluster: Cluster, workers: int) -> Cost:
    """Predict synchronous servers: all workers pull, compute and push; then servers apply."""
    size = job.size("dense")
    way = costs.pull(workers, cluster.servers, cluster.per_host, size)
    sending = sum(cluster.over(cluster.network, way.times(2)))
    return Cost(job.computing(workers), cluster.software.step, sending, 2 * size)


def servers_async(job: Training, cluster: Cluster, workers: int) -> Cost:
    """Predict asynchronous servers, for as many steps as there are workers.

    A worker does not wait for other workers, but all wait for the servers. A link carries pulls one
    way and pushes the other way at the same time.
    """
    size = job.size("dense")
    own = costs.pull(1, cluster.servers, 1, size).times(min(cluster.per_host, workers))
    computing = job.computing(workers)
    alone = computing + sum(cluster.over(cluster.network, own.times(2)))
    served = sum(cluster.over(cluster.network, Traffic(0, workers / cluster.servers * size)))
    seconds = max(alone, served)
    return Cost(computing, cluster.software.step, seconds - computing, 2 * size)


def _coding(job: Training, cluster: Cluster, workers: int, exchange: str) -> float:
    """Return the seconds of coding; one worker alone codes nothing."""
    if workers == 1:
        return 0.0
    return cluster.software.step + job.parameters * cluster.software.coding_of(exchange)


# Ordered by how much they change training, exact methods first.
METHODS = (
    Method("dense", "AllReduceStrategy()", dense, exact=True),
    Method(
        "servers, sync", 'ParameterServerStrategy("sync")', servers_sync, exact=True, served=True
    ),
    Method("fp16", 'AllReduceStrategy(exchange="fp16")', functools.partial(dense, exchange="fp16")),
    Method("8bit", 'AllReduceStrategy(exchange="8bit")', coded(8)),
    Method("1bit", 'AllReduceStrategy(exchange="1bit")', coded(1)),
    Method("delayed", "AllReduceStrategy(exchange=Delayed())", delayed),
    Method("servers, async", 'ParameterServerStrategy("async")', servers_async, served=True),
    Method("block momentum", "AllReduceStrategy(exchange=BlockMomentum({}))", block_momentum),
)

_HOUR, _MILLION = 3600.0, 1_000_000


@dataclass(frozen=True)
class Prediction:
    """Time, efficiency and price of one method, with one number of workers."""

    method: Method
    workers: int  # number of workers
    cost: Cost  # cost of a step
    rows: float  # rows per second of all workers
    efficiency: float  # `rows` / the rows of as many single workers
    price: float  # price of a million rows, for the hosts of workers and servers

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.cost.seconds


def predict(method: Method, job: Training, cluster: Cluster, workers: int) -> Prediction:
    """Predict a method with a number of workers.

    Example:
        >>> from dtk.planning.inputs import Link
        >>> job, cluster = Training(0.1, 1000, rows=20), Cluster(Link(0.0, 1e9), price=9.0)
        >>> alone = predict(METHODS[0], job, cluster, 1)
        >>> alone.seconds, alone.rows, alone.efficiency, alone.price
        (0.1, 200.0, 1.0, 12.5)
    """
    cost = method.cost(job, cluster, workers)
    rows = job.batch(workers) / cost.seconds
    hosts = cluster.hosts(workers) + (cluster.servers if method.served else 0)
    price = hosts * cluster.price / _HOUR * _MILLION / rows
    return Prediction(method, workers, cost, rows, rows * job.step / job.rows / workers, price)


def sweep(job: Training, cluster: Cluster, workers: Sequence[int]) -> list[list[Prediction]]:
    """Predict each method with each number of workers."""
    return [[predict(method, job, cluster, count) for count in workers] for method in METHODS]
