"""Predictions of a method with so many workers, against as many that need send nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtk.planning.inputs import Cluster, Job
from dtk.planning.methods import METHODS, Cost, Method

_HOUR = 3600.0
MILLION = 1_000_000


@dataclass(frozen=True)
class Prediction:
    """Time, efficiency and price of one method, with one number of workers."""

    method: Method  # what is done
    workers: int  # how many do it
    cost: Cost  # of a step
    rows: float  # of all workers, per second
    efficiency: float  # `rows` / the rows that so many single workers would train on
    price: float  # of a million rows; of hosts of workers and servers

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.cost.seconds


def predict(method: Method, job: Job, cluster: Cluster, workers: int) -> Prediction:
    """Predict what a method takes.

    Example:
        >>> from dtk.planning.inputs import Link
        >>> job, cluster = Job(0.1, 1000, rows=20), Cluster(Link(0.0, 1e9), price=9.0)
        >>> alone = predict(METHODS[0], job, cluster, 1)
        >>> alone.seconds, alone.rows, alone.efficiency, alone.price
        (0.1, 200.0, 1.0, 12.5)
    """
    cost = method.cost(job, cluster, workers)
    rows = job.batch(workers) / cost.seconds
    hosts = cluster.hosts(workers) + (cluster.servers if method.served else 0)
    price = hosts * cluster.price / _HOUR * MILLION / rows
    return Prediction(method, workers, cost, rows, rows * job.step / job.rows / workers, price)


def sweep(
    job: Job, cluster: Cluster, workers: Sequence[int], methods: Sequence[Method] = METHODS
) -> list[list[Prediction]]:
    """Predict each method with each number of workers."""
    return [[predict(method, job, cluster, count) for count in workers] for method in methods]
