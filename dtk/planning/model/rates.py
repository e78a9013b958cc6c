"""Seconds of computing by arithmetic: operations and bytes, at rates that are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtk.planning.model.layer_costs import Seconds, Work
from dtk.planning.model.operators import FLOAT, SPATIAL, Operator

# Backwards, a product is two: by the upstream gradient and the input, and by it and the kernel.
_PRODUCTS = 2.0


@dataclass(frozen=True)
class Rates:
    """What a worker computes in a second.

    Example:
        >>> dense = Operator("dense", "Dense", (0,), ((8,),), (4,), weights=32, flops=64.0)
        >>> Rates(flops=64.0, nbytes=1e12).seconds(dense, Work("whole", 1, rows=2))[0]
        2.000000000096
    """

    flops: float  # floating point operations in products of matrices
    nbytes: float  # bytes read or written
    update: float = 0.0  # seconds that the optimizer takes for a weight's entry
    spread: float = 0.0  # how far such a number is off, as a part of it; not known of arithmetic

    @property
    def told(self) -> str:
        """A sentence on where the numbers are from."""
        return (
            f"Computing: operations at {self.flops / 1e9:.3g} GFlop/s and bytes at "
            f"{self.nbytes / 1e9:.3g} GB/s, as measured on this machine; layers were not."
        )

    def seconds(self, operator: Operator, work: Work) -> Seconds:
        """Return the seconds of the busiest rank."""
        part = share(operator, work)
        moved = FLOAT * (operator.entries + operator.entries_taken) * work.rows * part
        products = operator.flops * work.rows * part / self.flops if operator.weights else 0.0
        copies = moved / self.nbytes
        times = _PRODUCTS if operator.differentiated else 1.0
        if not operator.weights and not operator.differentiated:
            return Seconds(products + copies, 0.0)
        return Seconds(products + copies, times * (products + copies))


def share(operator: Operator, work: Work) -> float:
    """Return the part of an operator's work that the busiest rank has.

    Example:
        >>> conv = Operator("c", "Conv2D", (0,), ((8, 8, 3),), (8, 8, 4), limits={"rows": 8})
        >>> share(conv, Work("rows", 3, 1)), share(conv, Work("whole", 1, 1))
        (0.375, 1.0)
    """
    if work.split == "whole":
        return 1.0
    parts = operator.limits[work.split]
    if work.split in SPATIAL:
        parts = operator.output[SPATIAL.index(work.split)]
    return math.ceil(parts / work.degree) / parts
