"""Links between workers, from the options of `dtk plan`."""

from __future__ import annotations

import math

from dtk.planning import quantity
from dtk.planning.inputs import Link
from dtk.planning.quantity import PlanError


def network(
    measured: int,
    per_host: int,
    counts: tuple[int, ...],
    bandwidth: str | None,
    latency: str,
) -> Link:
    """Return the links between hosts."""
    if measured > 1:
        if bandwidth is not None:
            raise PlanError(
                f"--bandwidth {bandwidth}: the benchmark was run between {measured} hosts and "
                "holds their network; leave it out, or give one that was run on a single host"
            )
        return Link()
    if bandwidth is None and counts[-1] > per_host:
        raise PlanError(
            f"{counts[-1]} workers are more than a host's {per_host}: say what joins hosts, e.g. "
            "`--bandwidth 1Gbit/s --latency 50us`"
        )
    return link("--bandwidth", bandwidth, "--latency", latency)


def link(speed: str, bandwidth: str | None, delay: str, latency: str) -> Link:
    limit = math.inf if bandwidth is None else quantity.bandwidth(speed, bandwidth)
    return Link(quantity.seconds(delay, latency), limit)
