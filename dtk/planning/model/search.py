"""The fastest choice: of each layer's split on a grid, and of cuts into stages.

On a grid, dynamic programming over layers in their order finds the choice whose costs add up to
least: a state is how the outputs that are still needed are held, so that residual connections and
branches are exact, too, as long as few outputs are needed at a time. What overlaps adds up to less
than that; so the choice found, and some simple ones, are changed at random and judged by the
simulated timeline, as FlexFlow does by Markov chain Monte Carlo (Jia, Zaharia and Aiken 2018,
section 6). With few combinations all are tried. Equal seeds give equal plans.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtk.planning.model.layer_costs import LayerCosts, Workload
from dtk.planning.model.operators import Layout, Split, consumers
from dtk.planning.model.split_steps import Step, step
from dtk.planning.model.stage_steps import SCHEDULES, StageCosts, Stages, StageStep, cuts
from dtk.planning.model.timeline import simulate
from dtk.planning.model.topology import Grid

# Up to so many combinations are all tried.
ALL_OF = 256
# Proposals of the random search, for each grid.
TRIES = 400
# States that dynamic programming keeps: more are needed only by models of many branches.
_BEAM = 512
# How much slower a proposal may be, as a part of the step, to be taken once in e times.
_TEMPERATURE = 0.02
_SWEEPS = 3
_MICROBATCHES = (1, 2, 4, 8, 16)
_CUTS = 40


class Found(NamedTuple):
    """A choice for one grid, with its simulated step."""

    seconds: float  # of a step
    splits: tuple[Split, ...]  # how each operator is divided
    step: Step  # its tasks and costs


class FoundStages(NamedTuple):
    """A pipeline, with its simulated step."""

    seconds: float  # of a step
    stages: Stages  # its cuts and schedule
    step: StageStep  # its tasks and costs


@dataclass(frozen=True)
class Budget:
    """How long is searched."""

    tries: int = TRIES  # random proposals, for each grid
    all_of: int = ALL_OF  # the number of combinations up to which all are tried
    seed: int = 0  # of the proposals


def best_splits(workload: Workload, grid: Grid, budget: Budget | None = None) -> Found:
    """Return the fastest choice of splits on a grid that fits into memory."""
    return _SplitSearch(workload, grid, budget or Budget()).run()


def same_splits(workload: Workload, grid: Grid, split: Split = "whole") -> Found:
    """Return the step of a grid on which all layers that can be are divided in one way."""
    costs_of = LayerCosts(workload, grid)
    return _judge(costs_of, costs_of.settled(tuple(_uniform(costs_of, split))))


def additive_best(costs_of: LayerCosts) -> tuple[float, tuple[Split, ...]]:
    """Return the choice of splits whose costs, one layer after the other, add up to least."""
    workload = costs_of.workload
    operators = workload.operators
    last = [max(takers, default=-1) for takers in consumers(operators)]
    states: dict[tuple[tuple[int, Layout], ...], tuple[float, tuple[Split, ...]]] = {(): (0.0, ())}
    for position, operator in enumerate(operators):
        reached: dict[tuple[tuple[int, Layout], ...], tuple[float, tuple[Split, ...]]] = {}
        for state, (sum_so_far, chosen) in states.items():
            known = dict(state)
            given = [known[source] for source in operator.sources]
            for split in costs_of.splits_after(position, given):
                layout = costs_of.layout(position, split)
                seconds = sum_so_far + costs_of.additive(costs_of.cost(position, split, given))
                if position in workload.outputs:
                    seconds += costs_of.model.seconds(costs_of.gathered(position, layout))
                held = {**known, position: layout}
                needed = tuple((one, how) for one, how in held.items() if last[one] > position)
                if needed not in reached or seconds < reached[needed][0]:
                    reached[needed] = seconds, (*chosen, split)
        if len(reached) > _BEAM:
            kept = sorted(reached.items(), key=lambda entry: entry[1][0])[:_BEAM]
            reached = dict(kept)
        states = reached
    return min(states.values())


def additive(costs_of: LayerCosts, splits: Sequence[Split]) -> float:
    """Return the seconds of a choice, one layer after the other."""
    layouts: list[Layout] = []
    total = 0.0
    for position, split in enumerate(splits):
        operator = costs_of.workload.operators[position]
        cost = costs_of.cost(position, split, [layouts[one] for one in operator.sources])
        layouts.append(costs_of.layout(position, split))
        total += costs_of.additive(cost)
    for position in costs_of.workload.outputs:
        total += costs_of.model.seconds(costs_of.gathered(position, layouts[position]))
    return total


def _judge(costs_of: LayerCosts, splits: tuple[Split, ...]) -> Found:
    made = step(costs_of, splits)
    return Found(simulate(made.tasks).seconds, splits, made)


def _uniform(costs_of: LayerCosts, split: Split) -> Iterator[Split]:
    for position in range(len(costs_of.workload.operators)):
        yield split if split in costs_of.splits(position) else "whole"


class _SplitSearch:
    """The search on one grid, and all it has judged."""

    def __init__(self, workload: Workload, grid: Grid, budget: Budget) -> None:
        self._costs = LayerCosts(workload, grid)
        self._most = workload.most_memory
        self._budget = budget
        self._judged: dict[tuple[Split, ...], Found] = {}

    def run(self) -> Found:
        options = [self._costs.splits(p) for p in range(len(self._costs.workload.operators))]
        free = [position for position, found in enumerate(options) if len(found) > 1]
        many = math.prod(len(options[position]) for position in free)
        if not free or many <= self._budget.all_of:
            return min(map(self._found, itertools.product(*options)), key=self._rank)
        ways: tuple[Split, ...] = ("whole", "output", "input", "rows", "columns")
        begin = [tuple(_uniform(self._costs, way)) for way in ways]
        begin.append(additive_best(self._costs)[1])
        best = min(map(self._found, begin), key=self._rank)
        best = min(best, self._walk(best, options, free), key=self._rank)
        return self._descend(best, options, free)

    def _found(self, splits: tuple[Split, ...]) -> Found:
        settled = self._costs.settled(splits)
        if settled not in self._judged:
            self._judged[settled] = _judge(self._costs, settled)
        return self._judged[settled]

    def _rank(self, found: Found) -> tuple[float, float, int]:
        """Order by memory that is missing, then by time, then by how many layers are divided."""
        divided = sum(split != "whole" for split in found.splits)
        return max(0.0, found.step.memory - self._most), found.seconds, divided

    def _walk(
        self, begin: Found, options: Sequence[tuple[Split, ...]], free: Sequence[int]
    ) -> Found:
        """Propose changes of one layer, or of layers side by side, at random."""
        chance = random.Random(self._budget.seed)
        best = now = begin
        for _ in range(self._budget.tries):
            first = chance.randrange(len(free))
            run = free[first : first + chance.choice((1, 1, 2, 4))]
            wanted = chance.choice(options[run[0]])
            splits = list(now.splits)
            for position in run:
                if wanted in options[position]:
                    splits[position] = wanted
            proposed = self._found(tuple(splits))
            worse = self._rank(proposed)[0] - self._rank(now)[0]
            slower = (proposed.seconds - now.seconds) / now.seconds
            accepted = chance.random() < math.exp(min(0.0, -slower / _TEMPERATURE))
            if worse < 0 or (not worse and accepted):
                now = proposed
            best = min(best, now, key=self._rank)
        return best

    def _descend(
        self, best: Found, options: Sequence[tuple[Split, ...]], free: Sequence[int]
    ) -> Found:
        """Change one layer at a time, each to what is fastest, in a few sweeps over all."""
        for _ in range(_SWEEPS):
            before = best
            for position in free:
                changes = (
                    (*best.splits[:position], split, *best.splits[position + 1 :])
                    for split in options[position]
                )
                best = min(map(self._found, changes), key=self._rank)
            if best.splits == before.splits:
                break
        return best


def best_stages(workload: Workload, grid: Grid, budget: Budget | None = None) -> FoundStages | None:
    """Return the fastest pipeline that fits into memory, with one stage per rank."""
    costs_of, budget = StageCosts(workload, grid), budget or Budget()
    places = cuts(workload)
    rows = costs_of.rows(1)
    found: list[FoundStages] = []

    def judge(begins: tuple[int, ...], microbatches: int, schedule: str) -> FoundStages:
        stages = Stages(begins, microbatches, schedule)
        made = costs_of.step(stages)
        return FoundStages(simulate(made.tasks).seconds, stages, made)

    def rank(one: FoundStages) -> tuple[float, float]:
        return max(0.0, one.step.memory - workload.most_memory), one.seconds

    for microbatches in _MICROBATCHES:
        if microbatches > rows:
            break
        candidates = _cut_candidates(costs_of, places, microbatches, budget)
        for schedule in SCHEDULES if microbatches > 1 else SCHEDULES[:1]:
            found += (judge(begins, microbatches, schedule) for begins in candidates)
    return min(found, key=rank) if found else None


def _cut_candidates(
    costs_of: StageCosts, places: Sequence[int], microbatches: int, budget: Budget
) -> list[tuple[int, ...]]:
    """Return the cuts to judge: all if they are few, else the most even ones and those beside."""
    stages = costs_of.grid.model
    if math.comb(len(places), stages - 1) <= min(_CUTS, budget.all_of):
        every: Iterable[tuple[int, ...]] = itertools.combinations(places, stages - 1)
    else:
        even = _even_cuts(costs_of, places, microbatches)
        every = [even, *_beside(even, places)] if even else []
    return [(0, *one) for one in every if _all_trained(costs_of, one)]


def _all_trained(costs_of: StageCosts, borders: Sequence[int]) -> bool:
    count = len(costs_of.workload.operators)
    bounds = itertools.pairwise([0, *borders, count])
    return all(costs_of.weights(begin, end) for begin, end in bounds)


def _even_cuts(
    costs_of: StageCosts, places: Sequence[int], microbatches: int
) -> tuple[int, ...] | None:
    """Return the cuts whose slowest stage is fastest, by dynamic programming."""
    ends = [*places, len(costs_of.workload.operators)]
    # By end: the slowest stage so far, and the borders.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(costs_of.grid.model):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (slowest, borders) in best.items():
            for end in ends[bisect.bisect_right(ends, begin) :]:
                if not costs_of.weights(begin, end):
                    continue
                seconds = costs_of.seconds(begin, end, microbatches).both
                last = end == ends[-1]
                if last is not (stage == costs_of.grid.model - 1):
                    continue
                if not last:
                    seconds += costs_of.send_seconds(costs_of.sending(end, microbatches))
                one = max(slowest, seconds), borders if last else (*borders, end)
                if end not in reached or one < reached[end]:
                    reached[end] = one
        best = reached
    return best[ends[-1]][1] if ends[-1] in best else None


def _beside(borders: tuple[int, ...], places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield borders of which one is moved by one place."""
    for number, border in enumerate(borders):
        at = bisect.bisect_left(places, border)
        for other in (at - 1, at + 1):
            if 0 <= other < len(places):
                moved = (*borders[:number], places[other], *borders[number + 1 :])
                if list(moved) == sorted(set(moved)):
                    yield moved
