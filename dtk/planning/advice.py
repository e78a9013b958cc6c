"""Advice on which method to use, on how many workers, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtk.planning.inputs import Cluster, Job
from dtk.planning.methods import Prediction, predict

TARGET = 0.7
# How much faster a method must be to be preferred if it changes training more.
GAIN = 1.1
LOSSY = (
    "All but dense, hierarchical and synchronous servers change training, fp16 least and block "
    "momentum most: see docs/exchanges.md."
)


@dataclass(frozen=True)
class Advice:
    """The method to use, and why."""

    chosen: Prediction
    reasons: tuple[str, ...]  # sentences


def advise(
    predictions: Sequence[Sequence[Prediction]], job: Job, cluster: Cluster, target: float = TARGET
) -> Advice:
    """Choose the most workers that keep the target efficiency, and the least changing method.

    A method that changes training more is chosen only if it trains on a tenth more rows per second.
    """
    best = [_furthest(of, target) for of in predictions if of[0].method.use]
    kept = [one for one in best if one.efficiency >= target]
    chosen = _least_change(kept or best)
    reasons = [_what(chosen, job, cluster)]
    if not kept:
        reasons.append(f"Nothing keeps {target:.2f} on {chosen.workers} workers or more.")
    reasons += _why_not_dense(predictions[0], chosen, job, cluster, target)
    return Advice(chosen, tuple(reasons))


def _furthest(of: Sequence[Prediction], target: float) -> Prediction:
    """Return a method's fastest prediction at or above the target, else the most efficient one."""
    kept = [one for one in of if one.efficiency >= target]
    if kept:
        return max(kept, key=lambda one: one.rows)
    return max(of, key=lambda one: one.efficiency)


def _least_change(candidates: Sequence[Prediction]) -> Prediction:
    chosen = candidates[0]
    for one in candidates[1:]:
        if one.rows > GAIN * chosen.rows:
            chosen = one
    return chosen


def _what(chosen: Prediction, job: Job, cluster: Cluster) -> str:
    many = f"{chosen.workers} worker{'s' * (chosen.workers > 1)}"
    use = chosen.method.use.format(job.block_steps * job.batch(chosen.workers))
    with_ = f" with {cluster.servers} servers" if chosen.method.served else ""
    if chosen.workers == 1:
        return f"Use 1 worker: {chosen.rows:.0f} rows per second."
    return (
        f"Use {many}{with_} and {use}: {1000 * chosen.seconds:.3g} ms per step, "
        f"{chosen.rows:.0f} rows per second, {chosen.efficiency:.2f} of what as many workers could "
        "do without each other."
    )


def _why_not_dense(
    dense: Sequence[Prediction], chosen: Prediction, job: Job, cluster: Cluster, target: float
) -> list[str]:
    below = [one for one in dense if one.efficiency < target]
    if not below:
        return [f"Whole gradients (dense) keep {target:.2f} on all of them."]
    first, exact = below[0], _furthest(dense, target)
    reasons = [
        f"Whole gradients (dense) fall below {target:.2f} from {first.workers} workers on "
        f"({first.efficiency:.2f}), for {bound(first, job, cluster)}."
    ]
    if not chosen.method.exact and exact.efficiency >= target:
        reasons.append(
            f"To leave training as it is, use dense on {exact.workers}: {exact.efficiency:.2f}, "
            f"{exact.rows:.0f} rows per second."
        )
    return reasons


def bound(one: Prediction, job: Job, cluster: Cluster) -> str:
    """Return what takes most of a step's time besides computing.

    Example:
        >>> from dtk.planning.methods import METHODS
        >>> from dtk.planning.inputs import Link
        >>> job, slow = Job(0.1, 10_000_000), Cluster(Link(0.0, 1e6))
        >>> bound(predict(METHODS[0], job, slow, 4), job, slow)
        'bytes wait for the link'
    """
    if one.cost.coding > one.cost.sending:
        return "what a worker does by itself takes as long as sending"
    messages = predict(one.method, job, _without_limit(cluster), one.workers).cost.sending
    if messages > one.cost.sending / 2:
        return "messages wait for each other"
    return "bytes wait for the link"


def _without_limit(cluster: Cluster) -> Cluster:
    """Return the same cluster with bytes that take no time."""
    return replace(
        cluster,
        network=replace(cluster.network, bandwidth=math.inf),
        host=replace(cluster.host, bandwidth=math.inf),
        software=replace(cluster.software, byte=0.0),
    )
