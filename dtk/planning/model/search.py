"""The fastest plan on every grid of so many ranks: by splits of layers, or by cuts into stages.

On a grid, dynamic programming over the layers in order finds the splits with the lowest total cost.
A state is how the outputs that later layers need are held, so that residual connections and
branches are exact, too. For pipelines, all cuts are tried if there are few.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dtk.communicators.costs import Traffic
from dtk.planning.inputs import PlanError
from dtk.planning.model.layer_costs import (
    FLOAT,
    LayerCost,
    LayerCosts,
    RankGrid,
    Split,
    Workload,
    left,
)
from dtk.planning.model.plans import ModelPlan
from dtk.planning.tables import GAIN

# States that dynamic programming keeps, and choices per state: only models with many branches, or
# limited memory, would need more.
_WAYS, _KEPT = 512, 512
_CUTS = 1000  # up to this number, all choices of cuts are tried
_MICROBATCHES = (1, 2, 4, 8, 16)
_BACKWARD = 2 / 3  # the part of computing that is the backward pass
_MEGA = 1e6


@dataclass(frozen=True)
class Candidate:
    """One way to divide a model on a grid, by `splits` of layers or into stages, with its costs."""

    grid: RankGrid
    plan: ModelPlan
    gradients: float  # seconds in which replicas add up their gradients
    splits: tuple[Split, ...] = ()  # split of each operator
    layers: tuple[LayerCost, ...] = ()  # cost of each operator
    begins: tuple[int, ...] = ()  # position of the first operator of each stage; 0 first
    computing: tuple[float, ...] = ()  # seconds of each stage, for all its microbatches
    exact: bool = True  # whether training equals that of one process

    @property
    def divides(self) -> bool:
        """Whether each rank has a part of the batch, of a layer, or of the model."""
        return self.grid.model == 1 or bool(self.begins or {*self.splits} - {"whole"})

    @property
    def how(self) -> str:
        """What the ranks of one model share, for tables."""
        if self.begins:
            many = self.plan.microbatches
            changed = "" if self.exact else ", inexact"
            return (
                f"{len(self.begins)} stages, {many} microbatch{'es' * (many > 1)}, "
                f"{self.plan.schedule}{changed}"
            )
        counts = collections.Counter(split for split in self.splits if split != "whole")
        if not counts:
            return "rows of the batch" if self.grid.model == 1 else "nothing: all layers whole"
        return "layers: " + ", ".join(f"{many} {split}" for split, many in counts.items())


def judge(costs_of: LayerCosts, wanted: Sequence[Split]) -> Candidate:
    """Return the candidate with the wanted splits; layers that cannot be divided so stay whole."""
    workload, operators = costs_of.workload, costs_of.workload.operators
    splits: list[Split] = []
    layers: list[LayerCost] = []
    for position, split in enumerate(wanted):
        given = tuple(left(splits[one]) for one in operators[position].sources)
        possible = costs_of.splits(position, given)
        splits.append(split if split in possible else possible[0])
        layers.append(costs_of.cost(position, splits[-1], given))
    sums = costs_of.sums_of(sum(one.held for one in layers))
    named = zip(operators, splits, strict=True)
    plan = ModelPlan(
        *costs_of.grid,
        workload.batch,
        {one.name: split for one, split in named if split != "whole" and not one.follows},
        seconds=sum(one.seconds for one in layers) + sums.messages * costs_of.data.message,
        memory=sum(one.memory for one in layers),
        sent=sum(one.traffic.bytes for one in layers) + sums.bytes,
    )
    gradients = costs_of.data.seconds(sums)
    return Candidate(costs_of.grid, plan, gradients, tuple(splits), tuple(layers))


def same_splits(workload: Workload, grid: RankGrid, split: Split = "whole") -> Candidate:
    """Return the candidate with the same split of every layer that can be divided so."""
    return judge(LayerCosts(workload, grid), [split] * len(workload.operators))


# Operators with outputs that later operators need, and how the outputs are held.
_Held: TypeAlias = tuple[tuple[int, Split], ...]
# Seconds, bytes and splits so far.
_Chosen: TypeAlias = tuple[float, float, tuple[Split, ...]]


def best_splits(workload: Workload, grid: RankGrid) -> Candidate:
    """Return the fastest splits that fit into memory; if none do, those that need least memory."""
    costs_of, last = LayerCosts(workload, grid), workload.last
    states: dict[_Held, list[_Chosen]] = {(): [(0.0, 0.0, ())]}
    for position, operator in enumerate(workload.operators):
        reached: dict[_Held, list[_Chosen]] = collections.defaultdict(list)
        for state, found in states.items():
            known = dict(state)
            given = tuple(known[source] for source in operator.sources)
            for split in costs_of.splits(position, given):
                cost = costs_of.cost(position, split, given)
                held = [*state, (position, left(split))]
                needed = tuple((one, how) for one, how in held if last.get(one, -1) > position)
                reached[needed] += [
                    (seconds + cost.seconds, memory + cost.memory, (*chosen, split))
                    for seconds, memory, chosen in found
                ]
        fronts = [(needed, _front(found, workload)) for needed, found in reached.items()]
        states = dict(sorted(fronts, key=lambda one: one[1][0][0])[:_WAYS])
    (found,) = states.values()
    judged = [judge(costs_of, splits) for _, _, splits in found]
    return min(judged, key=functools.partial(_rank, workload))


def _front(found: list[_Chosen], workload: Workload) -> list[_Chosen]:
    """Return the fastest choice; if memory is limited, also slower choices that need less."""
    front: list[_Chosen] = []
    for one in sorted(found, key=lambda one: one[:2]):
        if not front or one[1] < front[-1][1]:
            front.append(one)
    if math.isinf(workload.most_memory):
        return front[:1]
    return [*front[: -1 : len(front) // _KEPT + 1], front[-1]]


def _rank(workload: Workload, one: Candidate) -> tuple[float, float]:
    """Order by missing memory, then by time; a tenth is added if training changes."""
    seconds = one.plan.seconds * (1.0 if one.exact else GAIN)
    return max(0.0, one.plan.memory - workload.most_memory), seconds


def best_stages(workload: Workload, grid: RankGrid) -> Candidate | None:
    """Return the fastest pipeline that fits into memory, with one stage per rank of a model.

    All cuts are tried if there are few, else some of them. Every stage must have weights.
    """
    if grid.model == 1:
        return None
    costs_of, count = LayerCosts(workload, grid), len(workload.operators)
    whole, places = costs_of.whole(costs_of.rows), list(workload.cuts)
    while math.comb(len(places), grid.model - 1) > _CUTS:
        # Drop the cut with the least computing since the cut before it.
        between = [sum(whole[begin:end]) for begin, end in itertools.pairwise([0, *places])]
        places.pop(between.index(min(between)))
    trained = [0, *itertools.accumulate(one.weights for one in workload.operators)]
    found = [
        pipeline(costs_of, (0, *borders), many, schedule)
        for borders in itertools.combinations(places, grid.model - 1)
        if all(trained[a] < trained[b] for a, b in itertools.pairwise([0, *borders, count]))
        for many in _MICROBATCHES
        if many <= costs_of.rows
        for schedule in ("gpipe", "1f1b")[: 1 + (many > 1)]
    ]
    return min(found, key=functools.partial(_rank, workload), default=None)


def pipeline(
    costs_of: LayerCosts, begins: tuple[int, ...], many: int, schedule: str = "gpipe"
) -> Candidate:
    """Return the candidate with stages that begin at `begins`, and `many` microbatches.

    All microbatches but one wait for the slowest stage or link:

        seconds = stages + links + outputs to all ranks + (many - 1) slowest, there and back

    When a stage has ended, it adds up its gradients with other replicas. 1F1B (Narayanan et al.
    2021) is idle as long as GPipe (Huang et al. 2019), and keeps the outputs of fewer microbatches;
    but it waits for more messages, which are not counted here. So GPipe is planned if its memory
    suffices.
    """
    workload, grid, rows = costs_of.workload, costs_of.grid, -(-costs_of.rows // many)
    bounds = [slice(*ends) for ends in itertools.pairwise([*begins, None])]
    one = [sum(costs_of.whole(rows)[part]) for part in bounds]
    crossing = [workload.operators[workload.cuts[begin]] for begin in begins[1:]]
    sizes = [FLOAT * rows * operator.entries for operator in crossing]
    links = [costs_of.model.seconds(Traffic(1, size)) for size in sizes]
    entries = workload.operators[-1].entries
    outputs = Traffic(1, (grid.model - 1) * FLOAT * entries * costs_of.rows)
    last = sum(one) + 2 * sum(links) + costs_of.model.seconds(outputs)
    for part in (1 - _BACKWARD, _BACKWARD):
        last += (many - 1) * max(part * max(one), *links, 0.0)
    ends, memory, sent, gradients = [], [], [], []
    for number, bound in enumerate(bounds):
        stage = workload.operators[bound]
        weights = sum(operator.weights for operator in stage)
        sums = costs_of.data.allreduce(FLOAT * weights)
        gradients.append(costs_of.data.seconds(sums))
        before = _BACKWARD * sum(one[:number]) + sum(links[:number])
        ends.append(last - before + gradients[-1] + weights * workload.computing.update)
        sent.append(sums.bytes + many * sum(sizes[max(0, number - 1) : number + 1]))
        under_way = min(many, len(bounds) - number) if schedule == "1f1b" else many
        kept = min(under_way * rows, costs_of.rows)
        memory.append(sum(costs_of.memory(o, o.weights, kept) for o in stage))
    sent[-1] += outputs.bytes
    plan = ModelPlan(
        *grid,
        workload.batch,
        borders=tuple(operator.name for operator in crossing),
        microbatches=many,
        schedule=schedule,
        seconds=max(ends),
        memory=max(memory),
        sent=max(sent),
    )
    computing = tuple(many * seconds for seconds in one)
    exact = many == 1 or not any(o.batch_statistics for o in workload.operators)
    return Candidate(grid, plan, max(gradients), (), (), begins, computing, exact)


@dataclass(frozen=True)
class PlanChoice:
    """The plans that `dtk plan --model` has found."""

    # best first; plans that do not fit into memory come last, and plans that change training count
    # as a tenth slower
    candidates: list[Candidate]
    alone: Candidate  # one worker with the whole batch
    # as many replicas as workers; None if the batch has fewer rows
    data: Candidate | None

    @property
    def best(self) -> Candidate:
        """The fastest plan that fits into memory."""
        return self.candidates[0]


def choose(workload: Workload, workers: int) -> PlanChoice:
    """Find the fastest plan on each grid of `workers` ranks, if every replica has rows."""
    sizes = [n for n in range(min(workers, workload.batch), 0, -1) if workers % n == 0]
    grids = [RankGrid(data, workers // data) for data in sizes]
    every = [find(workload, grid) for grid in grids for find in (best_splits, best_stages)]
    found = [one for one in every if one is not None]
    # Drop plans in which all ranks compute the same, unless there is no other.
    found = [one for one in found if one.divides] or found
    found.sort(key=functools.partial(_rank, workload))
    needs = found[0].plan.memory
    if needs > workload.most_memory:
        raise PlanError(
            f"--memory {workload.most_memory / _MEGA:.4g} MB: of {len(found)} plans for {workers} "
            f"workers the one that needs least takes {needs / _MEGA:.4g} MB on a rank "
            f"({found[0].grid}, {found[0].how}); give more memory, more workers (-n), or a smaller "
            "--batch-size"
        )
    replicas = next((one for one in found if one.grid == RankGrid(workers, 1)), None)
    return PlanChoice(found, same_splits(workload, RankGrid(1, 1)), replicas)
