"""The cost of one layer, divided in one way, for a rank: seconds, bytes and memory. No Keras here.

With M ranks in a model's group, and for all rows of a replica n bytes of a layer's output y and k
bytes of its input x:

    | split      | forward              | backward                       | between replicas |
    |---|---|---|---|
    | whole      | -                    | -                              | all weights      |
    | output     | allgather y: n       | all-reduce dx: k               | 1/M of them      |
    | input      | all-reduce y: n      | allgather dx: k                | 1/M of kernels   |
    | rows       | halos of x           | halos of dx; all-reduce kernel | all weights      |

Between two layers in rows images stay divided, and only halos are sent. Gradients that no trained
weight needs are not sent. A step is the sum of its layers: sending does not overlap with computing.

Sources: Jia, Zaharia and Aiken 2018 (FlexFlow); Shoeybi et al. 2019 (Megatron-LM); Dryden et al.
2019 (images in parts).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from dtk.communicators import costs
from dtk.communicators.costs import ONE_HOP_MOST, Traffic
from dtk.planning.inputs import Cluster

# How the ranks of one model share a layer. `dtk.layers.parallelize` takes all but "whole".
Split: TypeAlias = Literal["whole", "output", "input", "rows", "columns"]
# A split, and the number of ranks that share the layer.
Part: TypeAlias = tuple[Split, int]
Shape: TypeAlias = tuple[int, ...]

SPATIAL: tuple[Split, ...] = ("rows", "columns")
WHOLE: Part = ("whole", 1)
FLOAT = 4


@dataclass(frozen=True)
class Operator:
    """One layer of a model."""

    name: str  # name of the layer
    sources: tuple[int, ...]  # positions of the operators of its inputs
    taken: tuple[Shape, ...]  # shapes of one row of its inputs, without the batch axis
    output: Shape  # shape of one row of its output
    weights: int = 0  # entries of its trainable weights, divided with the output channels
    kernel: int = 0  # entries divided with the input channels: the kernel
    fixed: int = 0  # entries of weights that are not trained
    flops: float = 0.0  # floating point operations of the forward pass for one row
    # the largest number of ranks that can share the layer, by split; "whole" is always possible
    limits: Mapping[Split, int] = field(default_factory=dict)
    # input rows (columns) that a rank needs from each of its two neighbours, by split
    halos: Mapping[Split, tuple[int, int]] = field(default_factory=dict)
    tensors: int = 0  # number of its trainable weights
    # whether the layer works on each element by itself, and so is divided like its inputs
    follows: bool = False
    # whether gradients pass to the inputs, since a layer before is trained
    differentiated: bool = True
    batch_statistics: bool = False  # whether rows depend on each other, as in BatchNormalization
    whole_because: str = ""  # why the layer cannot be divided; empty if it can

    @property
    def entries(self) -> int:
        """Entries of one row of the output."""
        return math.prod(self.output)

    @property
    def entries_taken(self) -> int:
        """Entries of one row of all inputs."""
        return sum(map(math.prod, self.taken))

    def splits(self, degree: int) -> tuple[Split, ...]:
        """Return how so many ranks can share the layer.

        Example:
            >>> Operator("d", (0,), ((8,),), (4,), limits={"output": 4}).splits(4)
            ('whole', 'output')
            >>> Operator("d", (0,), ((8,),), (4,), limits={"output": 4}).splits(5)
            ('whole',)
        """
        return ("whole", *(split for split, most in self.limits.items() if most >= degree > 1))

    def held(self, part: Part) -> int:
        """Return the entries of trainable weights on the rank with the most.

        Example:
            >>> dense = Operator("d", (0,), ((8,),), (4,), 36, kernel=32)
            >>> [dense.held((split, 2)) for split in ("whole", "output", "input")]
            [36, 18, 20]
        """
        split, degree = part
        divided = {"output": self.weights, "input": self.kernel}.get(split, 0)
        return self.weights - divided + math.ceil(divided / degree)

    def share(self, part: Part) -> float:
        """Return the busiest rank's part of the work.

        Example:
            >>> conv = Operator("c", (0,), ((8, 8, 3),), (8, 8, 4), limits={"rows": 8})
            >>> conv.share(("rows", 3)), conv.share(("whole", 3))
            (0.375, 1.0)
        """
        split, degree = part
        parts = self.limits.get(split, 1)
        return math.ceil(parts / degree) / parts


@dataclass
class Rates:
    """Seconds of computing by arithmetic: operations and bytes, at measured rates.

    Example:
        >>> dense = Operator("dense", (0,), ((8,),), (4,), weights=32, flops=64.0)
        >>> Rates(flops=64.0, nbytes=96.0).seconds(dense, rows=2)
        9.0
    """

    flops: float  # floating point operations per second, in matrix products
    nbytes: float  # bytes read or written per second
    update: float = 0.0  # seconds of the optimizer per entry of a weight
    spread: float = 0.0  # relative error of the seconds; 0 if not known

    @property
    def told(self) -> str:
        """A sentence on the origin of the numbers."""
        return (
            f"Computing: operations at {self.flops / 1e9:.3g} GFlop/s and bytes at "
            f"{self.nbytes / 1e9:.3g} GB/s, as measured on this machine; layers were not."
        )

    def seconds(self, operator: Operator, rows: int, part: Part = WHOLE) -> float:
        """Return the seconds of the busiest rank, in the passes that training needs."""
        mine = rows * operator.share(part)
        products = operator.flops * mine / self.flops if operator.weights else 0.0
        copies = FLOAT * (operator.entries + operator.entries_taken) * mine / self.nbytes
        # Backwards each product becomes two: one with the input, one with the kernel.
        times = 3.0 if operator.differentiated else 2.0 if operator.weights else 1.0
        return times * (products + copies)


@dataclass(frozen=True)
class Workload:
    """A model to train, and the cluster."""

    operators: Sequence[Operator]  # operators of the model, in the order of computing
    outputs: tuple[int, ...]  # positions of the operators that return the model's outputs
    batch: int  # rows of all replicas
    computing: Rates  # seconds of the operators
    cluster: Cluster  # links and costs of software
    slots: float = 2.0  # numbers that the optimizer stores for each weight, 2 for Adam
    most_memory: float = math.inf  # bytes that a rank may use

    @property
    def weights(self) -> int:
        """Entries of all trainable weights."""
        return sum(operator.weights for operator in self.operators)

    @functools.cached_property
    def last(self) -> dict[int, int]:
        """The last operator that takes an operator's output; the model's outputs have no entry."""
        return {one: p for p, operator in enumerate(self.operators) for one in operator.sources}

    @functools.cached_property
    def cuts(self) -> dict[int, int]:
        """The positions before which a model can be cut, with the one output that crosses."""
        found = {}
        for begin in range(1, len(self.operators)):
            crossing = [one for one in range(begin) if self.last.get(one, 0) >= begin]
            if len(crossing) == 1 and self.operators[crossing[0]].sources:
                found[begin] = crossing[0]
        return found if self.outputs == (len(self.operators) - 1,) else {}

    def seconds(self, operator: Operator, rows: int, part: Part = WHOLE) -> float:
        """Return the seconds of computing in both passes; an input computes nothing."""
        return self.computing.seconds(operator, rows, part) if operator.sources else 0.0


class RankGroup(NamedTuple):
    """Ranks that share collectives."""

    size: int  # number of ranks
    message: float  # seconds of a message, while other groups send, too
    byte: float  # seconds of a byte

    def seconds(self, traffic: Traffic) -> float:
        return sum(traffic.seconds(self.message, self.byte))

    def allreduce(self, nbytes: float) -> Traffic:
        """Return the traffic of summing so many bytes, in one hop if that is faster.

        Example:
            >>> slow = RankGroup(4, message=1.0, byte=1e-9)
            >>> slow.allreduce(1000), slow.allreduce(1 << 20).messages
            (Traffic(messages=1, bytes=3000), 6)
        """
        if self.size == 1 or not nbytes:
            return Traffic()
        ring = costs.ring_allreduce(self.size, nbytes)
        hop = costs.one_hop_allreduce(self.size, nbytes)
        return ring if nbytes > ONE_HOP_MOST else min(ring, hop, key=self.seconds)


class RankGrid(NamedTuple):
    """Ranks as replicas of one model; neighbouring ranks hold one replica."""

    data: int  # replicas; each trains on its part of the batch
    model: int  # ranks that hold one model

    def groups(self, cluster: Cluster) -> tuple[RankGroup, RankGroup]:
        """Return the ranks of one model, and the ranks with the same part in all replicas.

        The ranks of a model follow each other on the hosts, so that a host's link carries as many
        rings between replicas as the host has ranks of one model.
        """
        size, rings = self.data * self.model, min(self.model, cluster.per_host)
        inside = self.model if cluster.per_host % self.model == 0 else size
        link = replace(cluster.network, bandwidth=cluster.network.bandwidth / rings)
        shared = replace(cluster, network=link)
        own, others = cluster.parts(Traffic(1, 1), inside), shared.parts(Traffic(1, 1), size)
        return RankGroup(self.model, *own), RankGroup(self.data, *others)

    def __str__(self) -> str:
        """Return "replicas x ranks of a model", as in tables."""
        return f"{self.data} x {self.model}"


class LayerCost(NamedTuple):
    """The cost of one operator for a rank in a step."""

    computing: float  # seconds of both passes
    traffic: Traffic  # traffic within the model's group
    seconds: float  # seconds in all, with the sum of gradients over replicas and the update
    held: int  # entries of trainable weights on the rank
    # bytes of weights, gradients, optimizer state, and outputs kept for the backward pass
    memory: float


class LayerCosts:
    """Costs of a workload's operators on one grid."""

    def __init__(self, workload: Workload, grid: RankGrid) -> None:
        self.workload, self.grid = workload, grid
        self.model, self.data = grid.groups(workload.cluster)
        self.rows = -(-workload.batch // grid.data)  # of the replica with the most
        # The sum of all gradients; this choice of one hop or a ring also holds for parts.
        self.sums = self.data.allreduce(FLOAT * workload.weights)
        self.cost = functools.cache(self._cost)
        self.whole = functools.cache(self._whole)

    def sums_of(self, held: float) -> Traffic:
        """Return the traffic of adding up the gradients of so many weights over replicas."""
        part = held / max(1, self.workload.weights)
        return Traffic(self.sums.messages if held else 0.0, self.sums.bytes * part)

    def splits(self, position: int, given: Sequence[Split]) -> tuple[Split, ...]:
        """Return how an operator can be divided if its inputs are held as given.

        An operator on each element is divided like all of its inputs.
        """
        operator = self.workload.operators[position]
        found = operator.splits(self.grid.model)
        if not operator.follows:
            return found
        return tuple(one for one in found[1:] if {*given} == {one}) or found[:1]

    def _cost(self, position: int, split: Split, given: tuple[Split, ...]) -> LayerCost:
        """Return the cost of an operator if its inputs are held as given."""
        operator, part = self.workload.operators[position], (split, self.grid.model)
        computing = self.workload.seconds(operator, self.rows, part)
        traffic = self._traffic(position, split, given) if self.grid.model > 1 else Traffic()
        held = operator.held(part)
        summed = self.sums_of(held).bytes * self.data.byte
        seconds = computing + self.model.seconds(traffic) + summed
        # A rank keeps only its part of an output in rows or columns.
        memory = self.memory(operator, held, self.rows / (part[1] if split in SPATIAL else 1))
        update = held * self.workload.computing.update
        return LayerCost(computing, traffic, seconds + update, held, memory)

    def _whole(self, rows: int) -> list[float]:
        """Return the seconds of computing so many rows of every operator, undivided."""
        return [self.workload.seconds(one, rows) for one in self.workload.operators]

    def memory(self, operator: Operator, held: int, rows: float) -> float:
        """Return the bytes of weights, gradients, optimizer state, and so many rows of output."""
        weights = held * (2 + self.workload.slots) + operator.fixed
        return FLOAT * (weights + rows * operator.entries)

    def _bytes(self, entries: float) -> float:
        return FLOAT * entries * self.rows

    def _traffic(self, position: int, split: Split, given: tuple[Split, ...]) -> Traffic:
        operator, sum_up = self.workload.operators[position], self.model.allreduce
        sent = []
        wanted = "channels" if split == "input" else left(split)
        for source, held in zip(operator.sources, given, strict=True):
            taken = self.workload.operators[source]
            gradient = wanted != "whole" and (taken.weights or taken.differentiated)
            if held != wanted:
                sent += [self._gathered(taken)] * ((held != "whole") + bool(gradient))
        if split == "output":
            sent.append(self._gathered(operator))
            if operator.differentiated:
                sent.append(sum_up(self._bytes(operator.entries_taken)))
        elif split == "input":
            sent.append(sum_up(self._bytes(operator.entries)))
        elif split in SPATIAL:
            sent += [self._halo(operator, split)] * (2 if operator.differentiated else 1)
            if operator.batch_statistics:
                sent += [sum_up(FLOAT * 2 * (operator.output[-1] + 1))] * 2
            summed = sum_up(FLOAT * operator.weights)
            # Each weight is summed by itself, as soon as its gradient is ready.
            sent.append(Traffic(summed.messages * operator.tensors, summed.bytes))
            if position in self.workload.outputs:
                sent.append(self._gathered(operator))
        return functools.reduce(Traffic.and_then, sent, Traffic())

    def _gathered(self, operator: Operator) -> Traffic:
        """Return the traffic of giving all ranks all parts of an output, or of its gradient."""
        return costs.ring_allgather(self.grid.model, self._bytes(operator.entries))

    def _halo(self, operator: Operator, split: Split) -> Traffic:
        """Return the traffic of the rows that an inner rank sends to both neighbours."""
        height, width, channels = operator.taken[0]
        across = width if split == "rows" else height
        halo = operator.halos.get(split, (0, 0))
        rows = max(halo) if self.grid.model == 2 else sum(halo)  # two ranks: one neighbour each
        return Traffic(self.grid.model - 1 if rows else 0, self._bytes(rows * across * channels))


def left(split: Split) -> Split:
    """Return how an operator leaves its output: in rows or columns, or whole.

    Example:
        >>> left("rows"), left("output"), left("input")
        ('rows', 'whole', 'whole')
    """
    return split if split in SPATIAL else "whole"
