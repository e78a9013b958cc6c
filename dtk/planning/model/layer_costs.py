"""Costs of one layer divided in one way: computing, traffic in both directions, memory.

With M ranks in a model's group, n bytes of a layer's output y and k of its input x, of all rows of
a replica:

    | split      | forward              | backward                       | between replicas |
    |---|---|---|---|
    | whole      | -                    | -                              | all weights      |
    | output     | allgather y: n       | all-reduce dx: k               | 1/M of them      |
    | input      | all-reduce y: n      | allgather dx: k                | 1/M of kernels   |
    | rows       | halos of x           | halos of dx; all-reduce kernel | all weights      |

Rows followed by rows leaves images divided, and only halos are sent. Output followed by input could
leave channels divided (`Workload.keeps_channels`). Gradients of what is not trained are not sent.

Sources: Jia, Zaharia and Aiken 2018 (FlexFlow); Shoeybi et al. 2019 (Megatron-LM, output followed
by input); Dryden et al. 2019 (images in parts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dtk.communicators.costs import Traffic, ring_allreduce
from dtk.planning.inputs import Cluster
from dtk.planning.model.operators import (
    FLOAT,
    SPATIAL,
    Layout,
    Operator,
    Split,
    consumers,
    entered,
    left,
)
from dtk.planning.model.topology import Grid, Group, group


class Seconds(NamedTuple):
    """Seconds of computing."""

    forward: float  # of the forward pass
    backward: float  # of the backward pass

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


class Work(NamedTuple):
    """What one rank computes of an operator."""

    split: Split  # how the operator is divided
    degree: int  # among how many ranks
    rows: int  # of the batch


class Computing(Protocol):
    """Where seconds of computing come from: the clock, or arithmetic."""

    @property
    def update(self) -> float:
        """Seconds that the optimizer takes for a weight's entry."""

    @property
    def spread(self) -> float:
        """How far such a number is off, as a part of it: half the distance of its quartiles."""

    @property
    def told(self) -> str:
        """A sentence on where the numbers are from."""

    def seconds(self, operator: Operator, work: Work) -> Seconds:
        """Return the seconds of the busiest rank."""


@dataclass(frozen=True)
class Workload:
    """A model to train, and where."""

    operators: Sequence[Operator]  # of the model, in the order in which they are computed
    outputs: tuple[int, ...]  # positions of those whose outputs the loss is of
    batch: int  # rows of all replicas
    computing: Computing  # seconds of the operators
    cluster: Cluster  # links, and what software adds
    slots: float = 2.0  # numbers that the optimizer remembers for each weight, 2 for Adam
    most_memory: float = math.inf  # bytes of a rank
    # whether a layer divided by output channels leaves them divided for one that is divided by
    # input channels, as `gather_output=False` of `dtk.layers` has it; `dtk.layers.parallelize`
    # gathers them
    keeps_channels: bool = False

    @property
    def weights(self) -> int:
        """Entries of all trainable weights."""
        return sum(operator.weights for operator in self.operators)

    def seconds(self, operator: Operator, work: Work) -> Seconds:
        """Return the seconds of computing; no backward pass is where nothing is trained so far."""
        if operator.is_input:
            return Seconds(0.0, 0.0)
        found = self.computing.seconds(operator, work)
        trained = operator.weights or operator.differentiated
        return found if trained else Seconds(found.forward, 0.0)


class Sends(NamedTuple):
    """What the ranks of a model send for one operator."""

    before: Traffic = Traffic()  # before it computes
    after: Traffic = Traffic()  # after it has computed
    back_before: Traffic = Traffic()  # before its backward pass
    back_after: Traffic = Traffic()  # after its backward pass, before those of its sources
    kernel: Traffic = Traffic()  # for its weights; nothing waits for it but their update

    @property
    def waited_for(self) -> Traffic:
        """All that a rank waits for before it computes on."""
        first = self.before.and_then(self.after)
        return first.and_then(self.back_before).and_then(self.back_after)


class LayerCost(NamedTuple):
    """What one operator costs a rank in a step."""

    computing: Seconds
    sends: Sends  # within the model's group
    held: int  # entries of trainable weights: whose gradients replicas add up
    # bytes, of weights, what is remembered of them, and outputs kept for the backward pass
    memory: float


class LayerCosts:
    """Costs of a workload's operators on one grid."""

    def __init__(self, workload: Workload, grid: Grid) -> None:
        self.workload, self.grid = workload, grid
        self.model: Group = group(grid.models(), workload.cluster)
        self.data: Group = group(grid.replicas(), workload.cluster)
        self._rows = grid.rows(workload.batch)
        self._consumers = consumers(workload.operators)
        self._computing: dict[tuple[int, Split], Seconds] = {}

    def splits(self, position: int) -> tuple[Split, ...]:
        """Return how an operator can be divided, if that is to choose."""
        operator = self.workload.operators[position]
        return ("whole",) if operator.follows else operator.splits(self.grid.model)

    def splits_after(self, position: int, given: Sequence[Layout]) -> tuple[Split, ...]:
        """Return how an operator can be divided where its sources have left their outputs.

        What works on each element is divided as all of its inputs are.
        """
        operator = self.workload.operators[position]
        if not operator.follows:
            return operator.splits(self.grid.model)
        for split in SPATIAL:
            if split in operator.splits(self.grid.model) and set(given) == {split}:
                return (split,)
        return ("whole",)

    def settled(self, wanted: Sequence[Split]) -> tuple[Split, ...]:
        """Return a choice in which all that follows its inputs does so."""
        found: list[Split] = []
        layouts: list[Layout] = []
        for position, split in enumerate(wanted):
            operator = self.workload.operators[position]
            if operator.follows:
                given = [layouts[source] for source in operator.sources]
                split = self.splits_after(position, given)[0]
            found.append(split)
            layouts.append(self.layout(position, split))
        return tuple(found)

    def layout(self, position: int, split: Split) -> Layout:
        """Return how an operator leaves its output to those that take it.

        Channels stay divided only for a single operator that can take them so.
        """
        found = left(split)
        if found != "channels" or not self.workload.keeps_channels:
            return "whole" if found == "channels" else found
        takers = self._consumers[position]
        kept = len(takers) == 1 and position not in self.workload.outputs
        if kept and "input" in self.splits(takers[0]):
            return found
        return "whole"

    def cost(self, position: int, split: Split, given: Sequence[Layout]) -> LayerCost:
        """Return what an operator costs."""
        operator = self.workload.operators[position]
        return LayerCost(
            self.computing(position, split),
            self._sends(position, operator, split, given),
            operator.held(split, self.grid.model),
            self._memory(position, operator, split),
        )

    def computing(self, position: int, split: Split) -> Seconds:
        """Return the seconds that an operator takes to compute."""
        if (position, split) not in self._computing:
            operator = self.workload.operators[position]
            work = Work(split, self.grid.model if split != "whole" else 1, self._rows)
            self._computing[position, split] = self.workload.seconds(operator, work)
        return self._computing[position, split]

    def additive(self, cost: LayerCost) -> float:
        """Return the seconds of a layer if it begins when the layer before it has ended.

        Their sum is the step's, but for what sending hides and for messages between replicas.
        """
        shown = 1.0 - self.workload.cluster.software.hidden
        summed = ring_allreduce(self.grid.data, FLOAT * cost.held).bytes * self.data.byte
        return (
            cost.computing.both
            + self.model.seconds(cost.sends.waited_for)
            + shown * (self.model.seconds(cost.sends.kernel) + summed)
            + cost.held * self.workload.computing.update
        )

    def gathered(self, position: int, layout: Layout) -> Traffic:
        """Return the traffic of giving all ranks the whole of an output that they hold in parts."""
        if layout == "whole":
            return Traffic()
        return self.model.allgather(self._bytes(self.workload.operators[position].entries))

    def _bytes(self, entries: float) -> float:
        return FLOAT * entries * self._rows

    def _sends(
        self, position: int, operator: Operator, split: Split, given: Sequence[Layout]
    ) -> Sends:
        if self.grid.model == 1 or operator.is_input:
            return Sends()
        before, back_after = Traffic(), Traffic()
        for source, layout in zip(operator.sources, given, strict=True):
            wanted = entered(split)
            if layout == wanted:
                continue
            before = before.and_then(self.gathered(source, layout))
            taken = self.workload.operators[source]
            if wanted != "whole" and (taken.weights or taken.differentiated):
                whole = self.model.allgather(self._bytes(taken.entries))
                back_after = back_after.and_then(whole)
        after, back_before, kernel = Traffic(), Traffic(), Traffic()
        if split == "output":
            if self.layout(position, split) == "whole":
                after = self.gathered(position, "channels")
            if operator.differentiated:
                partial = self.model.allreduce(self._bytes(operator.entries_taken))
                back_after = partial.and_then(back_after)
        elif split == "input":
            after = self.model.allreduce(self._bytes(operator.entries))
        elif split in SPATIAL:
            halo = self._halo(operator, split)
            before = before.and_then(halo)
            if operator.differentiated:
                back_after = halo.and_then(back_after)
            if operator.batch_statistics:
                moments = self.model.allreduce(FLOAT * 2 * (operator.output[-1] + 1))
                before, back_before = before.and_then(moments), moments
            summed = self.model.allreduce(FLOAT * operator.weights)
            # Each weight by itself, as soon as its gradient is there.
            kernel = Traffic(summed.messages * operator.tensors, summed.bytes)
        return Sends(before, after, back_before, back_after, kernel)

    def _halo(self, operator: Operator, split: Split) -> Traffic:
        """Return the traffic of the rows that an inner rank sends to both neighbours."""
        height, width, channels = operator.taken[0]
        across = width if split == "rows" else height + operator.padding
        rows = sum(operator.halos.get(split, (0, 0)))
        if self.grid.model == 2:  # each has one neighbour
            rows = max(operator.halos.get(split, (0, 0)))
        return self.model.halos(self._bytes(rows * across * channels))

    def _memory(self, position: int, operator: Operator, split: Split) -> float:
        parts = 1 if self.layout(position, split) == "whole" else self.grid.model
        kept = self._bytes(math.ceil(operator.entries / parts))
        weights = operator.held(split, self.grid.model) * (2 + self.workload.slots)
        return FLOAT * (weights + operator.fixed) + kept
