"""Operators of a model: the work, the weights and the possible divisions of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# How the ranks that hold one model share a layer. `dtk.layers.parallelize` takes all but "whole".
Split: TypeAlias = Literal["whole", "output", "input", "rows", "columns"]
# How the ranks of a group hold a tensor: all of it each, or a part each.
Layout: TypeAlias = Literal["whole", "channels", "rows", "columns"]
Shape: TypeAlias = tuple[int, ...]

SPATIAL: tuple[Split, ...] = ("rows", "columns")
FLOAT = 4


@dataclass(frozen=True)
class Operator:
    """One layer of a model, in the order in which layers are computed.

    Example:
        >>> dense = Operator("dense", "Dense", (0,), ((8,),), (4,), weights=36, flops=64.0)
        >>> dense.entries, dense.entries_taken
        (4, 8)
    """

    name: str  # of the layer
    kind: str  # class of the layer
    sources: tuple[int, ...]  # positions of the operators whose outputs it takes
    taken: tuple[Shape, ...]  # shapes of one row of its inputs, without the batch axis
    output: Shape  # shape of one row of its output
    weights: int = 0  # entries of its trainable weights
    sliced: int = 0  # those of them that are divided with the output channels: kernel and bias
    kernel: int = 0  # those of them that are divided with the input channels: the kernel
    fixed: int = 0  # entries of weights that are not trained
    flops: float = 0.0  # floating point operations of the forward pass for one row
    # the largest number of ranks that can share it, by split; "whole" is always possible
    limits: Mapping[Split, int] = field(default_factory=dict)
    # rows (columns) of its input that a rank needs of each of its two neighbours, by split
    halos: Mapping[Split, tuple[int, int]] = field(default_factory=dict)
    padding: int = 0  # rows of padding that halos of columns have, too
    tensors: int = 0  # number of its trainable weights
    # whether it works on each element by itself, and so is divided as its inputs are
    follows: bool = False
    # whether gradients pass to its inputs: something before it is trained
    differentiated: bool = True
    batch_statistics: bool = False  # whether rows of a batch meet in it, as in BatchNormalization
    whole_because: str = ""  # why nothing can divide it; empty if something can

    @property
    def entries(self) -> int:
        """Entries of one row of its output."""
        return math.prod(self.output)

    @property
    def entries_taken(self) -> int:
        """Entries of one row of all its inputs."""
        return sum(map(math.prod, self.taken))

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the model, and computes nothing."""
        return not self.sources

    def splits(self, degree: int) -> tuple[Split, ...]:
        """Return how so many ranks can share it.

        Example:
            >>> Operator("d", "Dense", (0,), ((8,),), (4,), limits={"output": 4}).splits(4)
            ('whole', 'output')
            >>> Operator("d", "Dense", (0,), ((8,),), (4,), limits={"output": 4}).splits(5)
            ('whole',)
        """
        if degree == 1:
            return ("whole",)
        return ("whole", *(split for split, most in self.limits.items() if most >= degree))

    def held(self, split: Split, degree: int) -> int:
        """Return the entries of trainable weights that the rank with most of them holds.

        Example:
            >>> dense = Operator("d", "Dense", (0,), ((8,),), (4,), 36, sliced=36, kernel=32)
            >>> [dense.held(split, 2) for split in ("whole", "output", "input")]
            [36, 18, 20]
        """
        divided = {"output": self.sliced, "input": self.kernel}.get(split, 0)
        return self.weights - divided + math.ceil(divided / degree)


def consumers(operators: Sequence[Operator]) -> list[list[int]]:
    """Return, by operator, the positions of those that take its output.

    Example:
        >>> x = Operator("x", "InputLayer", (), (), (4,))
        >>> y = Operator("y", "Add", (0, 0), ((4,), (4,)), (4,))
        >>> consumers([x, y])
        [[1], []]
    """
    found: list[list[int]] = [[] for _ in operators]
    for position, operator in enumerate(operators):
        for source in dict.fromkeys(operator.sources):
            found[source].append(position)
    return found


def entered(split: Split) -> Layout:
    """Return how an operator divided in this way takes its inputs.

    Example:
        >>> entered("rows"), entered("output"), entered("input")
        ('rows', 'whole', 'channels')
    """
    if split == "rows" or split == "columns":
        return split
    return "channels" if split == "input" else "whole"


def left(split: Split) -> Layout:
    """Return how an operator divided in this way leaves its output.

    Example:
        >>> left("rows"), left("output"), left("input")
        ('rows', 'channels', 'whole')
    """
    if split == "rows" or split == "columns":
        return split
    return "channels" if split == "output" else "whole"
