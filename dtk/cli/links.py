"""Links between the workers of `dtk plan`, from its options."""

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
    """Return the links between hosts.

    Args:
        measured: Hosts of the benchmark that calibrates.
        per_host: Workers of a host.
        counts: Numbers of workers, in rising order.
        bandwidth: Value of --bandwidth.
        latency: Value of --latency.

    Raises:
        PlanError: They were measured and given, or are needed and neither.
    """
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
    """Return a link.

    Args:
        speed: The option that says how fast it is.
        bandwidth: Its value; None for no limit.
        delay: The option that says how late a message arrives.
        latency: Its value.

    Raises:
        PlanError: One cannot be read.
    """
    limit = math.inf if bandwidth is None else quantity.bandwidth(speed, bandwidth)
    return Link(quantity.seconds(delay, latency), limit)
