"""The output of `dtk plan --model`: a table of plans, the reasons for the best, and warnings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dtk.bench.page import Table
from dtk.planning.model.layer_costs import LayerCosts, Workload
from dtk.planning.model.search import Candidate, PlanChoice, judge

# Error of predicted times of divided layers, as multiples of data parallelism's time, on busy
# cores: see benchmarks/results/plan_model.md.
ERROR = 0.5
# Number of divided layers that the report names.
_NAMED = 8
# Layers left whole are named if they take at least this part of one worker's computing.
_LONG = 0.01
_MEGA, _MS = 1e6, 1e3


def table(choice: PlanChoice, most: int = 8) -> Table:
    """Return a header and a row for each of the best plans."""
    shown, data = choice.candidates[:most], choice.data
    if data is not None and data not in shown:
        shown = [*shown, data]

    rows = [
        {
            "grid": str(one.grid),
            "divided": one.how if one is not choice.alone else "one worker",
            "ms per step": f"{_MS * one.plan.seconds:#.3g}",
            "x one worker": f"{choice.alone.plan.seconds / one.plan.seconds:.2f}",
            "x data parallel": f"{data.plan.seconds / one.plan.seconds:.2f}" if data else "-",
            "MB on a rank": f"{one.plan.memory / _MEGA:#.3g}",
            "MB sent by a rank": f"{one.plan.sent / _MEGA:#.3g}",
        }
        for one in [*shown, choice.alone]
    ]
    return [tuple(rows[0]), *(tuple(one.values()) for one in rows)]


def why(workload: Workload, choice: PlanChoice) -> list[str]:
    """Return the reasons for the best plan."""
    best = choice.best
    sums = f"  {best.grid.data} replicas add up their gradients in {_MS * best.gradients:#.3g} ms"
    return [
        f"Best: {best.grid}, {best.how}: {_MS * best.plan.seconds:#.3g} ms per step.",
        *(_why_stages if best.begins else _why_splits)(workload, best),
        *([sums] if best.gradients else []),
        *_left_whole(workload),
        *_warnings(workload, choice),
        "Grid: replicas x ranks that hold one model. Inexact: it changes training.",
    ]


def _why_splits(workload: Workload, best: Candidate) -> Iterator[str]:
    """Yield a line for each divided layer, with the time it saves, largest first."""
    costs_of = LayerCosts(workload, best.grid)
    gains: list[tuple[float, str]] = []
    for position, split in enumerate(best.splits):
        operator, cost = workload.operators[position], best.layers[position]
        if split == "whole" or operator.follows:
            continue
        other = judge(costs_of, (*best.splits[:position], "whole", *best.splits[position + 1 :]))
        sends = _MS * costs_of.model.seconds(cost.traffic)
        text = (
            f"  {operator.name}: {split} on {best.grid.model} ranks, computes "
            f"{_MS * cost.computing:#.3g} ms in place of "
            f"{_MS * other.layers[position].computing:#.3g}, sends "
            f"{cost.traffic.bytes / _MEGA:#.3g} MB in {sends:#.3g} ms; whole, the step would take "
        )
        gains.append((_MS * (other.plan.seconds - best.plan.seconds), text))
    gains.sort(reverse=True)
    yield from (f"{text}{gain:+#.3g} ms" for gain, text in gains[:_NAMED])
    if rest := gains[_NAMED:]:
        yield f"  and {len(rest)} more, which change it by {rest[0][0]:#.3g} ms or less"


def _why_stages(workload: Workload, best: Candidate) -> Iterator[str]:
    ends = itertools.pairwise([*best.begins, len(workload.operators)])
    for stage, ((begin, end), seconds) in enumerate(zip(ends, best.computing, strict=True)):
        first, last = workload.operators[begin].name, workload.operators[end - 1].name
        yield (
            f"  stage {stage}: {first} to {last}, computes {_MS * seconds:#.3g} ms and "
            f"is idle for {100 * (1 - seconds / best.plan.seconds):.0f} % of the step"
        )
    if not best.exact:
        name = next(one.name for one in workload.operators if one.batch_statistics)
        yield (
            f"  {name} normalizes each microbatch by itself, as do all BatchNormalization "
            "layers of a pipeline: training is not that of one process."
        )


def _left_whole(workload: Workload) -> Iterator[str]:
    """Yield the slow layers that cannot be divided, by reason."""
    seconds = {one.name: workload.seconds(one, workload.batch) for one in workload.operators}
    reasons: dict[str, dict[str, None]] = {}
    for one in workload.operators:
        if one.whole_because and seconds[one.name] >= _LONG * sum(seconds.values()):
            reasons.setdefault(one.whole_because, {})[one.name] = None
    for reason, names in reasons.items():
        yield f"  left whole: {', '.join(names)} ({reason})"


def _warnings(workload: Workload, choice: PlanChoice) -> Iterator[str]:
    """Yield warnings about small gains."""
    best, off = choice.best, ERROR + workload.computing.spread
    simple, most = choice.data or choice.alone, workload.most_memory
    name = "data parallelism alone" if choice.data else "one worker"
    gain = 1 - best.plan.seconds / simple.plan.seconds
    if simple.plan.memory <= most and best.grid != simple.grid and gain < off:
        yield (
            f"Warning: the best plan is predicted {100 * gain:.0f} % faster than {name}, and "
            f"predictions may be off by {100 * off:.0f} %: measure both before you divide layers."
        )
    alone = choice.alone.plan
    if best.plan.seconds >= alone.seconds and alone.memory <= most:
        yield "Warning: one worker is predicted to be as fast as all of them."
