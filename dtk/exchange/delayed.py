"""Apply gradients one step late: the last gradients are summed while the next are computed.

    step n     compute g(n)  .................  keep g(n)
               sum of g(n-1) over all ranks ..  apply it

The two are independent, so they run at the same time, and a step takes as long as the slower one.
Source: ChainerMN's double buffering.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.contract import BatchPart, Exchange, ExchangeOp, Gradient, Update
from dtk.exchange.dense import Dense
from dtk.exchange.quantized import Quantized


class DelayedOp(ExchangeOp):
    """Keeps gradients for one step."""

    exchange: Delayed

    def prepare(self) -> None:
        """See `ExchangeOp.prepare`."""
        self._inner = self.exchange.exchange.init(self.communicator, self.state, self.trained)

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """Sum the gradients of the last step, and keep the present ones."""
        if any(isinstance(g, tf.IndexedSlices) for g in gradients):
            raise ValueError(
                "Delayed keeps whole gradients, and one of this model's is rows of a table "
                "(tf.IndexedSlices); use exchange=Dense()"
            )
        started = self.state.variable("started", "same", (), tf.bool)
        kept = [
            self.state.variable(f"delayed_{i}", "sum", g.shape, g.dtype)
            for i, g in enumerate(gradients)
        ]
        reduced, _ = self._inner.update([v.read_value() for v in kept])
        applied = started.read_value()
        for variable, gradient in zip(kept, gradients, strict=True):
            variable.assign(gradient)
        started.assign(True)
        return reduced, applied


@dataclass(frozen=True)
class Delayed(Exchange):
    """In each step, apply the sum of the step before, computed in the meantime (double buffering).

    The first step applies nothing, so after n steps the optimizer counts n - 1. The next `fit`
    applies the gradients left at the end of `fit`; checkpoints keep them.

    Args:
        exchange: How gradients are summed: `Dense` or `Quantized`.

    Raises:
        ValueError: The exchange is another one; at the first step, gradients are rows of embedding
            tables (`tf.IndexedSlices`) or are accumulated.

    Example:
        >>> Delayed(Dense("float16"))
        Delayed(exchange=Dense(dtype='float16', factors=True))
    """

    exchange: Exchange = field(default_factory=Dense)
    op = DelayedOp
    remembers = True

    def __post_init__(self) -> None:
        if not isinstance(self.exchange, Dense | Quantized):
            raise ValueError(
                f"Delayed(exchange={self.exchange!r}); expected Dense or Quantized. A warm start "
                "goes around it: WarmStart(Delayed(...), samples=...)"
            )

    def check(self, communicator: Communicator) -> None:
        """See `Exchange.check`."""
        self.exchange.check(communicator)
