"""Send whole gradients at first: exact steps while the loss falls most steeply."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.auto import Auto
from dtk.exchange.contract import BatchPart, Exchange, ExchangeOp, Gradient, Update
from dtk.exchange.dense import Dense
from dtk.exchange.local_steps import LocalOp, check_rows


class WarmStartOp(ExchangeOp):
    """Uses one op at first, then another."""

    exchange: WarmStart

    def prepare(self) -> None:
        """See `ExchangeOp.prepare`."""
        made = self.communicator, self.state, self.trained
        self._first, self._later = Dense().init(*made), self.exchange.exchange.init(*made)
        self.block = self._later.block

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`."""
        may_wait = False

        def updated_by(op: ExchangeOp) -> tuple[list[Gradient], tf.Tensor]:
            nonlocal may_wait
            sums, applied = op.update(gradients, part)
            may_wait |= applied is not None
            return sums, tf.constant(True) if applied is None else applied

        sums, applied = tf.cond(
            self._is_warm(), lambda: updated_by(self._first), lambda: updated_by(self._later)
        )
        return sums, applied if may_wait else None

    def count(self, part: BatchPart | None) -> None:
        """See `ExchangeOp.count`."""
        if part is None:
            raise ValueError(
                "WarmStart counts the rows of global batches, which only fit and train_on_batch "
                "know; in a loop of your own use the exchange without it"
            )

        def exact() -> bool:
            if isinstance(self.block, LocalOp):
                self.block.count_exact(part)
            return True

        def later() -> bool:
            self._later.count(part)
            return True

        tf.cond(self._is_warm(), exact, later)
        self._seen().assign_add(part.rows)

    def _seen(self) -> tf.Variable:
        return self.state.variable("samples_seen", "same", (), tf.int64)

    def _is_warm(self) -> tf.Tensor:
        return self._seen().read_value() < self.exchange.samples


@dataclass(frozen=True)
class WarmStart(Exchange):
    """Exchange whole gradients for the first `samples` rows, then use `exchange`.

    This is CNTK's `distributed_after`. In CNTK, every worker first trains on the same whole
    minibatch; here the minibatch is split and whole gradients are summed, which gives the same
    weights with 1/K of the computation.

    Args:
        exchange: The exchange after the warm start.
        samples: Rows of global batches, counted over all calls of `fit` and kept in checkpoints.
            The step that reaches this number is the last to exchange whole gradients.

    Raises:
        ValueError: An argument is out of range; or, at the first step, a script's own loop trains,
            which does not count rows.

    Example:
        >>> from dtk.exchange import Quantized
        >>> WarmStart(Quantized(bits=1), samples=60_000)
        WarmStart(exchange=Quantized(bits=1), samples=60000)
    """

    exchange: Exchange
    samples: int
    op = WarmStartOp

    def __post_init__(self) -> None:
        if not isinstance(self.exchange, Exchange) or isinstance(self.exchange, WarmStart | Auto):
            raise ValueError(
                f"WarmStart(exchange={self.exchange!r}); expected another exchange, such as "
                "Quantized(bits=1)"
            )
        check_rows("WarmStart(samples", self.samples)

    @property
    def local(self) -> bool:  # type: ignore[override]
        """See `Exchange`."""
        return self.exchange.local

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """See `Exchange`."""
        return self.exchange.remembers

    def check(self, communicator: Communicator) -> None:
        """See `Exchange.check`."""
        self.exchange.check(communicator)
