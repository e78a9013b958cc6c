"""All grids of so many ranks, each with the fastest plan that was found on it."""

from __future__ import annotations

from dataclasses import dataclass

from dtk.planning.advice import GAIN
from dtk.planning.model.layer_costs import Workload
from dtk.planning.model.operators import consumers
from dtk.planning.model.plans import ModelPlan
from dtk.planning.model.search import (
    Budget,
    Found,
    FoundStages,
    best_splits,
    best_stages,
    same_splits,
)
from dtk.planning.model.topology import Grid, grids
from dtk.planning.quantity import PlanError

_MEGA = 1e6


@dataclass(frozen=True)
class Candidate:
    """A grid, and what was found on it."""

    grid: Grid  # the ranks
    found: Found | FoundStages  # splits of layers, or stages
    exact: bool = True  # whether training is that of one process

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.found.seconds

    @property
    def memory(self) -> float:
        """Bytes of a rank."""
        return self.found.step.memory

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        return self.found.step.sent

    @property
    def divides(self) -> bool:
        """Whether each rank has a part: of the batch, of a layer, or of the model."""
        if isinstance(self.found, FoundStages) or self.grid.model == 1:
            return True
        return any(split != "whole" for split in self.found.splits)

    @property
    def how(self) -> str:
        """What ranks of one model share."""
        if isinstance(self.found, FoundStages):
            stages = self.found.stages
            many = f"{stages.microbatches} microbatch{'es' * (stages.microbatches > 1)}"
            changed = "" if self.exact else ", inexact"
            return f"{len(stages.begins)} stages, {many}, {stages.schedule}{changed}"
        divided = [split for split in self.found.splits if split != "whole"]
        if not divided:
            return "rows of the batch" if self.grid.model == 1 else "nothing: all layers whole"
        counts = {split: divided.count(split) for split in dict.fromkeys(divided)}
        return "layers: " + ", ".join(f"{many} {split}" for split, many in counts.items())

    def plan(self, workload: Workload) -> ModelPlan:
        """Return what is written to a file."""
        layers: dict[str, str] = {}
        borders: tuple[str, ...] = ()
        microbatches, schedule = 1, "gpipe"
        operators = workload.operators
        if isinstance(self.found, Found):
            layers = {
                operator.name: split
                for operator, split in zip(operators, self.found.splits, strict=True)
                if split != "whole" and not operator.follows
            }
        else:
            stages = self.found.stages
            microbatches, schedule = stages.microbatches, stages.schedule
            takers = consumers(operators)
            borders = tuple(
                next(
                    operators[one].name
                    for one in range(begin)
                    if takers[one] and takers[one][-1] >= begin
                )
                for begin in stages.begins[1:]
            )
        return ModelPlan(
            self.grid.data,
            self.grid.model,
            workload.batch,
            layers,
            borders,
            microbatches,
            schedule,
            self.seconds,
            self.memory,
            self.sent,
        )


@dataclass(frozen=True)
class Choice:
    """What `dtk plan --model` has found."""

    # from the best; those that do not fit into memory come last, and one that changes training
    # counts as a tenth slower
    candidates: list[Candidate]
    alone: Candidate  # one worker, with the whole batch
    # as many replicas as there are workers; None if the batch has fewer rows
    data: Candidate | None

    @property
    def best(self) -> Candidate:
        """The fastest that fits into memory."""
        return self.candidates[0]


def choose(workload: Workload, workers: int, budget: Budget | None = None) -> Choice:
    """Find the fastest plan on each grid of so many ranks."""
    alone = Candidate(Grid(1, 1), same_splits(workload, Grid(1, 1)))
    found: list[Candidate] = []
    for grid in grids(workers, workload.batch):
        found.append(Candidate(grid, best_splits(workload, grid, budget)))
        stages = best_stages(workload, grid, budget) if grid.model > 1 else None
        if stages is not None:
            normalized = any(one.batch_statistics for one in workload.operators)
            exact = stages.stages.microbatches == 1 or not normalized
            found.append(Candidate(grid, stages, exact))

    def rank(one: Candidate) -> tuple[float, float]:
        missing = max(0.0, one.memory - workload.most_memory)
        return missing, one.seconds * (1.0 if one.exact else GAIN)

    # Ranks that all compute the same are no plan, unless the batch is too small for another.
    found = [one for one in found if one.divides] or found
    found.sort(key=rank)
    if found[0].memory > workload.most_memory:
        raise PlanError(
            f"--memory {workload.most_memory / _MEGA:.4g} MB: of {len(found)} plans for {workers} "
            f"workers the one that needs least takes {found[0].memory / _MEGA:.4g} MB on a rank "
            f"({found[0].grid}, {found[0].how}); give more memory, more workers (-n), or a smaller "
            "--batch-size"
        )
    data = next((one for one in found if one.grid == Grid(workers, 1)), None)
    return Choice(found, alone, data)
