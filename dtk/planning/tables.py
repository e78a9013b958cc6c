"""What is shown of predictions: which method to use and why, tables, notes and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtk.bench.report import size
from dtk.planning.inputs import Cluster, Link, PlanError, Training
from dtk.planning.plan_methods import Prediction, predict
from dtk.version import pip_install

Predictions = Sequence[Sequence[Prediction]]

TARGET = 0.7
# How much faster a method must be to be preferred if it changes training more.
GAIN = 1.1
LOSSY = (
    "* Training is no longer that of one process: fp16 changes it least, block momentum most; see "
    "docs/exchanges.md."
)


@dataclass(frozen=True)
class Advice:
    """The exact method to use, what is faster and changes training, and why."""

    chosen: Prediction
    faster: tuple[Prediction, ...]
    reasons: tuple[str, ...]  # sentences


def advise(predictions: Predictions, job: Training, cluster: Cluster, target: float) -> Advice:
    """Choose the most workers that keep the target efficiency, without a change of training.

    A method further down the list is named only if it trains on a tenth more rows per second.
    """
    best = [_furthest(of, target) for of in predictions]
    kept = [one for one in best if one.efficiency >= target]
    exact = [one for one in kept if one.method.exact] or [one for one in best if one.method.exact]
    chosen = _faster(exact[1:], exact[0])[-1]
    changing = [one for one in kept or best if not one.method.exact]
    faster = _faster(changing, chosen)[1:]
    reasons = [_what(chosen, job, cluster)]
    if not kept:
        reasons.append(f"Nothing keeps {target:.2f} on {chosen.workers} workers or more.")
    reasons += _why_not_dense(predictions[0], job, cluster, target)
    if faster:
        reasons.append("Faster, but training changes; compare the accuracy before you rely on one:")
        reasons += [f"  * {_how(one, job, cluster)}." for one in faster]
    return Advice(chosen, tuple(faster), tuple(reasons))


def _faster(candidates: Sequence[Prediction], than: Prediction) -> list[Prediction]:
    """Return a prediction, and what is faster than it, and than what is before it."""
    faster = [than]
    for one in candidates:
        if one.rows > GAIN * faster[-1].rows:
            faster.append(one)
    return faster


def _furthest(of: Sequence[Prediction], target: float) -> Prediction:
    """Return a method's fastest prediction at or above the target, else the most efficient one."""
    kept = [one for one in of if one.efficiency >= target]
    most = max(of, key=lambda one: one.efficiency)
    return max(kept, key=lambda one: one.rows, default=most)


def _what(chosen: Prediction, job: Training, cluster: Cluster) -> str:
    if chosen.workers == 1:
        return f"Use 1 worker: {chosen.rows:.0f} rows per second."
    return (
        f"Use {_how(chosen, job, cluster)}, {chosen.efficiency:.2f} of what as many workers could "
        "do without each other."
    )


def _how(one: Prediction, job: Training, cluster: Cluster) -> str:
    use = one.method.use.format(job.block_steps * job.batch(one.workers))
    with_ = f" with {cluster.servers} servers" if one.method.served else ""
    return (
        f"{one.workers} workers{with_} and {use}: {1000 * one.seconds:.3g} ms per step, "
        f"{one.rows:.0f} rows per second"
    )


def _why_not_dense(
    dense: Sequence[Prediction], job: Training, cluster: Cluster, target: float
) -> list[str]:
    below = [one for one in dense if one.efficiency < target]
    if not below:
        return [f"Whole gradients (dense) keep {target:.2f} on all of them."]
    first = below[0]
    return [
        f"Whole gradients (dense) fall below {target:.2f} from {first.workers} workers on "
        f"({first.efficiency:.2f}), for {bound(first, job, cluster)}."
    ]


def bound(one: Prediction, job: Training, cluster: Cluster) -> str:
    """Return what takes most of a step's time besides computing.

    Example:
        >>> from dtk.planning.plan_methods import METHODS
        >>> from dtk.planning.inputs import Link
        >>> job, slow = Training(0.1, 10_000_000), Cluster(Link(0.0, 1e6))
        >>> bound(predict(METHODS[0], job, slow, 4), job, slow)
        'bytes wait for the link'
    """
    if one.cost.coding > one.cost.sending:
        return "what a worker does by itself takes as long as sending"
    # The same cluster, with bytes that take no time.
    network, host = (Link(link.latency) for link in (cluster.network, cluster.host))
    software = replace(cluster.software, byte=0.0)
    endless = replace(cluster, network=network, host=host, software=software)
    messages = predict(one.method, job, endless, one.workers).cost.sending
    if messages > one.cost.sending / 2:
        return "messages wait for each other"
    return "bytes wait for the link"


_FORMAT = 1


def by_title(predictions: Predictions) -> dict[str, list[tuple[str, ...]]]:
    """Return tables of a header and a row for each method."""
    tables = {
        "ms per step": _table(predictions, lambda one: _short(1000 * one.seconds)),
        "efficiency": _table(predictions, lambda one: f"{one.efficiency:.2f}"),
    }
    if any(one.price for of in predictions for one in of):
        tables["price of a million rows"] = _table(predictions, lambda one: _short(one.price))
    return tables


def _table(predictions: Predictions, cell: Callable[[Prediction], str]) -> list[tuple[str, ...]]:
    header = ("workers", *(str(one.workers) for one in predictions[0]))
    return [header, *((of[0].method.label, *map(cell, of)) for of in predictions)]


def _short(value: float) -> str:
    """Write three digits, or all digits before the point.

    Example:
        >>> _short(0.01234), _short(85.04), _short(12345.6), _short(0.0)
        ('0.0123', '85.0', '12346', '0')
    """
    return f"{value:.0f}" if value >= 100 or not value else f"{value:#.3g}"


def notes(job: Training, cluster: Cluster, advice: Advice) -> list[str]:
    """Return the recommendation, then the assumptions."""
    return [
        *advice.reasons,
        "",
        f"Assumed: {assumptions(job, cluster)}.",
        "Efficiency: rows per second / those of so many workers that send nothing; 1 is perfect. "
        "A step of asynchronous servers is as many steps as there are workers.",
        LOSSY,
    ]


def assumptions(job: Training, cluster: Cluster) -> str:
    """Return the inputs of the predictions, in a sentence.

    Example:
        >>> from dtk.planning.inputs import Link
        >>> print(assumptions(Training(0.085, 270_000), Cluster(Link(5e-5, 1.25e8), per_host=4)))
        a step of 85 ms for 32 rows on a worker, 1.08 MB of gradients (1bit: 38.0 kB); workers on \
a host: 4; between hosts 50 us and 1 Gbit/s; software adds 770 us to a message and 3 ns to a \
byte; blocks of 16 steps; 1 parameter server
    """
    batch = f" of a global batch of {job.global_batch}" if job.global_batch else ""
    servers = f"{cluster.servers} parameter server{'s' * (cluster.servers > 1)}"
    return (
        f"a step of {1000 * job.step:.3g} ms for {job.rows} rows{batch} on a worker, "
        f"{size(job.size('dense'))} of gradients ({_factors(job)}1bit: {size(job.size('1bit'))}); "
        f"{links(cluster)}; blocks of {job.block_steps} steps; {servers}"
    )


def links(cluster: Cluster) -> str:
    """Return what joins workers, for a sentence."""
    network, software = cluster.network, cluster.software
    return (
        f"workers on a host: {cluster.per_host}; between hosts {1e6 * network.latency:.3g} us and "
        f"{_speed(network.bandwidth)}; software adds {1e6 * software.message:.3g} us to a message "
        f"and {1e9 * software.byte:.2g} ns to a byte"
    )


def _factors(job: Training) -> str:
    """Write when gradients go as factors, and their size.

    Example:
        >>> from dtk.planning.inputs import Factors
        >>> _factors(Training(0.1, 2048 * 2048, factors=Factors(2048 * 2048, 4096)))
        'as factors with a batch of up to 334 rows, more with few workers: 524.3 kB; '
        >>> _factors(Training(0.1, 1000))
        ''
    """
    if job.factors is None:
        return ""
    most = math.ceil(job.factors.most_rows(math.inf)) - 1
    sent = size(job.factors.size(job.rows))
    return f"as factors with a batch of up to {most} rows, more with few workers: {sent}; "


def _speed(bandwidth: float) -> str:
    """Write bytes per second as networks are sold.

    Example:
        >>> _speed(1.25e8), _speed(6.25e6), _speed(math.inf)
        ('1 Gbit/s', '50 Mbit/s', 'what was measured')
    """
    if math.isinf(bandwidth):
        return "what was measured"
    bits = 8 * bandwidth
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def dumps(predictions: Predictions, job: Training, cluster: Cluster, advice: Advice) -> str:
    """Return everything, as JSON: seconds, bytes, rows per second."""
    fields = {
        "dtk plan": _FORMAT,
        "job": asdict(job),
        "cluster": asdict(cluster),
        "recommended": {**_record(advice.chosen), "reasons": advice.reasons},
        "faster": [_record(one) for one in advice.faster],
        "predictions": [_record(one) for of in predictions for one in of],
    }
    # JSON has no infinities: a link without limit is null.
    finite = json.loads(json.dumps(fields), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1, allow_nan=False) + "\n"


def _record(one: Prediction) -> dict[str, object]:
    return {
        "method": one.method.name,
        "workers": one.workers,
        "seconds": one.seconds,
        **one.cost._asdict(),
        "rows_per_second": one.rows,
        "efficiency": one.efficiency,
        "price_of_a_million_rows": one.price,
    }


def draw(predictions: Predictions, path: str) -> None:
    """Write a figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlanError(f"--plot needs matplotlib; run `{pip_install('bench')}`") from None
    figure = Figure(figsize=(9, 4), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    workers = [one.workers for one in predictions[0]]
    for of in predictions:
        speed.plot(workers, [one.rows for one in of], label=of[0].method.name)
        efficiency.plot(workers, [one.efficiency for one in of])
    perfect = [one.rows / one.efficiency for one in predictions[0]]
    speed.plot(workers, perfect, "k--", lw=0.8, label="perfect")
    speed.set(xlabel="workers", ylabel="rows per second", xscale="log", yscale="log")
    efficiency.set(xlabel="workers", ylabel="efficiency", xscale="log", ylim=(0, 1.05))
    speed.legend(fontsize=7)
    kind = Path(path).suffix.lstrip(".")
    if kind not in figure.canvas.get_supported_filetypes():
        raise PlanError(f"--plot {path}: unknown kind of file, expected such as curve.svg")
    figure.savefig(path)
