"""Inputs of a plan from the measurements of `dtk bench`: every number has a physical meaning.

    limit, in step                 step     computing without sending: all wait for the slowest
    all-reduces of few, many bytes message  seconds of a message;  byte  seconds of a byte
    none - step - sending          step     added to a step by a strategy; with factors, product;
                                            below 0, the hidden part
    1bit - step - sending          coding   per parameter

`sending` is computed by the formulas, with the message and byte just found. If the benchmark ran on
one host, these are costs of software, and the user describes the network; if it ran between hosts,
they include the network.

The bytes sent tell factors, which are whole floats with fp16, too, from the rest:

    none = rows x width + rest          fp16 = rows x width + rest / 2
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtk.bench.report import BOUND, Turns, means
from dtk.bench.results import TELLING, BenchResults, Reading, apart, block_of, in_step, task_of
from dtk.communicators.costs import fit_allreduces
from dtk.planning.inputs import Cluster, Factors, Link, PlanError, Software, Training
from dtk.planning.plan_methods import METHODS

_FLOAT = 4
_DENSE = "dense"
# If less than this part of all floats was sent, some gradients were not sent whole.
_WHOLE = 0.9


@dataclass(frozen=True)
class Calibration:
    """Inputs of a plan from a benchmark."""

    job: Training
    software: Software  # measured costs, including the links if workers were on several hosts
    per_host: int  # workers per host
    hosts: int  # number of hosts


def calibrated(
    results: BenchResults, model: str | None = None, communicator: str | None = None
) -> Calibration:
    """Return the inputs of a plan from a benchmark."""
    models = [name for name, turns in results.turns.items() if BOUND in turns]
    model = _chosen("--model", model, models)
    communicator = _chosen("--communicator", communicator, results.setting["communicators"])
    turns, ranks = results.turns[model], results.setting["ranks"]
    slowest = in_step if apart(ranks) else _slowest
    limit = statistics.median(map(slowest, turns[BOUND]))
    own = _of(turns, communicator)
    seconds, sent = _medians(own, "seconds"), _medians(own, "sent")
    if _DENSE not in sent:
        raise PlanError(f"{model} was measured without whole gradients; add `--exchange none`")
    parameters, rows = results.parameters[model], results.setting["batch_size"]
    kernels = _factors(sent, parameters, rows)
    if kernels is not None:
        sent = {name: size for name, size in sent.items() if name not in (_DENSE, "fp16")}
    job = Training(limit, parameters, rows, sent=sent, factors=kernels)
    workers = results.setting["workers"]
    software = _residuals(job, _software(results, communicator, workers), seconds, workers)
    places = [rank["host"] for rank in ranks]
    return Calibration(job, software, max(map(places.count, places)), len(set(places)))


def _slowest(turn: Sequence[Reading]) -> float:
    return max(reading.seconds for reading in turn)


def _of(turns: Mapping[str, Turns], communicator: str) -> dict[str, Turns]:
    """Return the measurements of a communicator by the rest of their name.

    Block momentum is left out, since a plan computes it.
    """
    named = [(*name.partition(" ")[::2], of) for name, of in turns.items()]
    return {name: of for first, name, of in named if first == communicator and not block_of(name)}


def _medians(turns: Mapping[str, Turns], what: str) -> dict[str, float]:
    return {
        _DENSE if name == "none" else name: statistics.median(means(of, what))
        for name, of in turns.items()
    }


def _factors(sent: Mapping[str, float], parameters: int, rows: int) -> Factors | None:
    """Return the kernels with gradients that went as factors; else None.

    Without a measurement of fp16, assume that all gradients went as factors.

    Example:
        >>> found = _factors({"dense": 9000.0, "fp16": 8500.0}, parameters=10250, rows=8)
        >>> found.entries, found.width
        (10000.0, 250.0)
    """
    if sent[_DENSE] >= _WHOLE * _FLOAT * parameters:
        return None
    rest = 2 * (sent[_DENSE] - sent.get("fp16", sent[_DENSE]))
    factors = Factors(parameters - rest / _FLOAT, (sent[_DENSE] - rest) / (rows * _FLOAT))
    # A square matrix has the most entries of all with m + n = width.
    if factors.entries > (factors.width / 2) ** 2:
        raise PlanError(
            f"{sent[_DENSE]:.0f} bytes are sent of {parameters} parameters: rows of tables, which "
            "nothing here describes; measure the model at the number of workers you want"
        )
    return factors


def _software(results: BenchResults, communicator: str, workers: int) -> Software:
    took = {}
    for size in TELLING:
        turns = _of(results.turns.get(task_of(size), {}), communicator)
        if not turns:
            raise PlanError(
                f"the benchmark holds no {task_of(size)} by {communicator}; measure the model anew "
                "with `dtk bench --json`, which adds it"
            )
        took[size] = _medians(turns, "seconds")["allreduce"]
    message, byte = fit_allreduces(workers, took)
    return Software(message, byte, step=0.0, coding={})


def _residuals(
    job: Training, software: Software, seconds: Mapping[str, float], workers: int
) -> Software:
    """Return the software with the time of each exchange beyond computing and sending."""
    # Between hosts, the measured all-reduces include the network: add no link.
    cluster = Cluster(Link(), Link(), workers, software=software)
    costs = {method.name: method.cost for method in METHODS if method.name in seconds}

    def beyond(name: str, software: Software) -> float:
        there = replace(cluster, software=software)
        return seconds[name] - costs[name](job, there, workers).seconds

    rest = beyond(_DENSE, software)
    kernels = job.factored(workers)
    if kernels is not None:
        others = (workers - 1) * job.rows
        software = replace(software, product=max(0.0, rest) / (kernels.entries * others))
    elif rest >= 0:
        software = replace(software, step=rest)
    else:
        could = beyond(_DENSE, replace(software, hidden=1.0)) - rest
        software = replace(software, hidden=min(1.0, -rest / could) if could else 0.0)
    codes = [name for name in costs if name != _DENSE]
    coding = {name: max(0.0, beyond(name, software)) / job.parameters for name in codes}
    return replace(software, coding=coding)


def _chosen(option: str, name: str | None, measured: Sequence[str]) -> str:
    names = ", ".join(measured)
    chosen = measured[0] if name is None and len(measured) == 1 else name
    if chosen is None:
        raise PlanError(f"the benchmark holds {names or 'no model'}; choose one with {option}")
    if chosen not in measured:
        raise PlanError(f"{option} {chosen}: not in the benchmark, expected one of {names}")
    return chosen
