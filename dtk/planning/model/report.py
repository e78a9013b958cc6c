"""What `dtk plan --model` says: the plans in a table, why the best one is, and what to write."""

from __future__ import annotations

from collections.abc import Iterator

from dtk.bench.page import Table
from dtk.planning.model.candidates import Candidate, Choice
from dtk.planning.model.layer_costs import LayerCosts, Work, Workload
from dtk.planning.model.search import Found, FoundStages
from dtk.planning.model.split_steps import BUCKETS, step
from dtk.planning.model.timeline import Resource, simulate

# How far times of divided layers were off as multiples of data parallelism's, on busy cores: see
# benchmarks/results/plan_model.md.
ERROR = 0.5
# Layers that are named, of those whose choice matters.
_NAMED = 8
# Layers that are left whole are named from this part of one worker's computing on.
_LONG = 0.01
_MEGA, _MS = 1e6, 1e3


def table(choice: Choice, most: int = 8) -> Table:
    """Return a header and a row for each of the best plans."""
    header = (
        "grid",
        "divided",
        "ms per step",
        "x one worker",
        "x data parallel",
        "MB on a rank",
        "MB sent by a rank",
    )
    shown = choice.candidates[:most]
    if choice.data is not None and choice.data not in shown:
        shown = [*shown, choice.data]
    return [header, *(_row(choice, one) for one in [*shown, choice.alone])]


def _row(choice: Choice, one: Candidate) -> tuple[str, ...]:
    data = choice.data
    return (
        str(one.grid),
        one.how if one is not choice.alone else "one worker",
        f"{_MS * one.seconds:#.3g}",
        f"{choice.alone.seconds / one.seconds:.2f}",
        "-" if data is None else f"{data.seconds / one.seconds:.2f}",
        f"{one.memory / _MEGA:#.3g}",
        f"{one.sent / _MEGA:#.3g}",
    )


def why(workload: Workload, choice: Choice) -> list[str]:
    """Return the reasons for the best plan."""
    best = choice.best
    lines = [f"Best: {best.grid}, {best.how}: {_MS * best.seconds:#.3g} ms per step."]
    if isinstance(best.found, FoundStages):
        lines += _why_stages(workload, best, best.found)
    elif best.grid.model > 1:
        lines += _why_splits(workload, best, best.found)
    lines += _gradients(workload, best)
    lines += [*_left_whole(workload), *_warnings(workload, choice)]
    return [*lines, "Grid: replicas x ranks that hold one model. Inexact: it changes training."]


def _why_splits(workload: Workload, best: Candidate, found: Found) -> list[str]:
    """Return what each divided layer saves, most first: what the step would take without it."""
    costs_of = LayerCosts(workload, best.grid)
    gains: list[tuple[float, str]] = []
    for position, split in enumerate(found.splits):
        operator, cost = workload.operators[position], found.step.layers[position]
        if split == "whole" or operator.follows:
            continue
        wanted = (*found.splits[:position], "whole", *found.splits[position + 1 :])
        other = simulate(step(costs_of, costs_of.settled(wanted)).tasks).seconds
        whole = costs_of.computing(position, "whole").both
        sends = cost.sends.waited_for.and_then(cost.sends.kernel)
        gains.append(
            (
                other - found.seconds,
                f"{operator.name}: {split} on {best.grid.model} ranks, computes "
                f"{_MS * cost.computing.both:#.3g} ms in place of {_MS * whole:#.3g}, sends "
                f"{sends.bytes / _MEGA:#.3g} MB in {_MS * costs_of.model.seconds(sends):#.3g} ms",
            )
        )
    gains.sort(reverse=True)
    lines = [
        f"  {text}; whole, the step would take {_MS * gain:+#.3g} ms"
        for gain, text in gains[:_NAMED]
    ]
    rest = gains[_NAMED:]
    if rest:
        lines.append(
            f"  and {len(rest)} more, which change it by {_MS * rest[0][0]:#.3g} ms or less"
        )
    return lines


def _why_stages(workload: Workload, best: Candidate, found: FoundStages) -> Iterator[str]:
    begins = [*found.stages.begins, len(workload.operators)]
    for stage, seconds in enumerate(found.step.computing):
        layers = [one.name for one in workload.operators[begins[stage] : begins[stage + 1]]]
        yield (
            f"  stage {stage}: {layers[0]} to {layers[-1]}, computes {_MS * seconds:#.3g} ms and "
            f"is idle for {100 * (1 - seconds / found.seconds):.0f} % of the step"
        )
    moments = [one.name for one in workload.operators if one.batch_statistics]
    if moments and found.stages.microbatches > 1:
        yield (
            f"  {moments[0]} normalizes each microbatch by itself, as do all BatchNormalization "
            "layers of a pipeline: training is not that of one process."
        )


def _gradients(workload: Workload, best: Candidate) -> Iterator[str]:
    if best.grid.data == 1:
        return
    by_link: dict[Resource, float] = {}
    for task in best.found.step.tasks:
        if task.name in BUCKETS:
            by_link[task.resource] = by_link.get(task.resource, 0.0) + task.seconds
    if by_link:
        yield (
            f"  {best.grid.data} replicas add up their gradients in "
            f"{_MS * max(by_link.values()):#.3g} ms"
        )


def _left_whole(workload: Workload) -> Iterator[str]:
    """Yield the layers that nothing divides and that take time, by reason."""
    seconds = {
        operator.name: workload.seconds(operator, Work("whole", 1, workload.batch)).both
        for operator in workload.operators
    }
    reasons: dict[str, list[str]] = {}
    for operator in workload.operators:
        long = seconds.get(operator.name, 0.0) >= _LONG * sum(seconds.values())
        if operator.whole_because and long:
            reasons.setdefault(operator.whole_because, []).append(operator.name)
    for reason, names in reasons.items():
        yield f"  left whole: {', '.join(dict.fromkeys(names))} ({reason})"


def error(workload: Workload) -> float:
    """Return how far a predicted time may be off, as a part of it."""
    return ERROR + workload.computing.spread


def _warnings(workload: Workload, choice: Choice) -> Iterator[str]:
    """Yield what a prediction cannot tell."""
    best, off = choice.best, error(workload)
    simple = choice.data or choice.alone
    name = "data parallelism alone" if choice.data is not None else "one worker"
    fits = simple.memory <= workload.most_memory
    gain = 1 - best.seconds / simple.seconds
    if fits and best.grid != simple.grid and gain < off:
        yield (
            f"Warning: the best plan is predicted {100 * gain:.0f} % faster than {name}, and "
            f"predictions may be off by {100 * off:.0f} %: measure both before you divide layers."
        )
    if best.seconds >= choice.alone.seconds and choice.alone.memory <= workload.most_memory:
        yield "Warning: one worker is predicted to be as fast as all of them."
