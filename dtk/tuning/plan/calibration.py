"""From what `dtk bench` measured to what a plan needs: every number has a physical meaning.

    limit, of the slowest worker   step     computing, with nothing sent
    all-reduces of few, many bytes message  seconds of a message;  byte  seconds a byte costs
    none - limit - sending         step     what a strategy adds to a step
    1bit - limit - sending - step  coding   per parameter

`sending` is the formula's, with the message and byte just found. If the benchmark ran on one host,
they are software's, and the network is the user's to describe; between hosts they hold it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dtk.tuning.bench.report import LIMIT, means
from dtk.tuning.bench.results import Reading, Results
from dtk.tuning.plan.methods import METHODS
from dtk.tuning.plan.quantity import PlanError
from dtk.tuning.plan.setting import Cluster, Job, Link, Software
from dtk.tuning.plan.traffic import ring_allreduce

Turns = Sequence[list[Reading]]

_DENSE = "dense"
# Less than this part of 4 bytes a parameter, and gradients were rows of tables.
_WHOLE = 0.9


@dataclass(frozen=True)
class Calibration:
    """What a benchmark says.

    Attributes:
        job: What was trained.
        software: What was measured on top of links, or, between hosts, with them.
        per_host: Workers of a host.
        hosts: That took part.
    """

    job: Job
    software: Software
    per_host: int
    hosts: int


def calibrated(results: Results, model: str | None = None) -> Calibration:
    """Read a benchmark.

    Args:
        results: What `dtk bench` measured.
        model: Its name; None if there is one.

    Raises:
        PlanError: It lacks what a plan needs, or there is no such model.
    """
    model = _chosen(results, model)
    turns = dict(results.turns[model])
    limit = turns.pop(LIMIT)
    seconds, sent = _medians(turns, "seconds"), _medians(turns, "sent")
    _check(model, sent, results.parameters[model])
    slowest = statistics.median(max(reading.seconds for reading in turn) for turn in limit)
    job = Job(slowest, results.parameters[model], results.setting["batch_size"], sent=sent)
    workers = results.setting["workers"]
    software = _residuals(job, _software(results.allreduces, workers), seconds, workers)
    places = [rank["host"] for rank in results.setting["ranks"]]
    return Calibration(job, software, max(map(places.count, places)), len(set(places)))


def _medians(turns: Mapping[str, Turns], what: str) -> dict[str, float]:
    return {
        _DENSE if name == "none" else name: statistics.median(means(of, what))
        for name, of in turns.items()
    }


def _check(model: str, sent: Mapping[str, float], parameters: int) -> None:
    if _DENSE not in sent:
        raise PlanError(f"{model} was measured without whole gradients; add `--exchange none`")
    if sent[_DENSE] < _WHOLE * 4 * parameters:
        raise PlanError(
            f"{model} sends {sent[_DENSE]:.0f} bytes of {parameters} parameters: rows of tables, "
            "which nothing here describes; measure it at the number of workers you want"
        )


def line(allreduces: Mapping[int, float], workers: int) -> tuple[float, float]:
    """Seconds of a message and of a byte, from those of two all-reduces round a ring.

    Args:
        allreduces: Seconds, by bytes.
        workers: Round the ring.

    Example:
        >>> line({0: 0.5, 100: 3.5}, workers=2)
        (0.25, 0.03)
    """
    (few, quick), (many, slow) = sorted(allreduces.items())
    least, most = ring_allreduce(workers, few), ring_allreduce(workers, many)
    byte = max(0.0, (slow - quick) / (most.bytes - least.bytes))
    return max(0.0, quick - byte * least.bytes) / least.messages, byte


def _software(allreduces: Mapping[int, Sequence[float]], workers: int) -> Software:
    if not allreduces:
        raise PlanError("this benchmark holds no all-reduces; run `dtk bench --json` anew")
    middle = {size: statistics.median(seconds) for size, seconds in allreduces.items()}
    message, byte = line(middle, workers)
    return Software(message, byte, step=0.0, coding={})


def _residuals(
    job: Job, software: Software, seconds: Mapping[str, float], workers: int
) -> Software:
    """What a strategy and each exchange took beyond computing and sending."""
    # Between hosts, what all-reduces took holds the network: no link comes on top of it.
    cluster = Cluster(Link(), Link(), workers, software=software)
    costs = {method.name: method.cost for method in METHODS}
    rest = {
        name: took - costs[name](job, cluster, workers).seconds
        for name, took in seconds.items()
        if name in costs
    }
    step = max(0.0, rest.pop(_DENSE))
    coding = {name: max(0.0, more - step) / job.parameters for name, more in rest.items()}
    return replace(software, step=step, coding=coding)


def _chosen(results: Results, model: str | None) -> str:
    measured = ", ".join(results.turns)
    if model is None:
        if len(results.turns) == 1:
            return next(iter(results.turns))
        raise PlanError(f"the benchmark holds {measured or 'no model'}; choose one with --model")
    if model not in results.turns:
        raise PlanError(f"--model {model}: not in the benchmark, expected one of {measured}")
    return model
