"""Whole gradients first: exact steps until the loss has left its steepest part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.auto import Auto
from dtk.exchange.base import Exchange, Exchanger, Gradient, Portion, Trained
from dtk.exchange.dense import Dense
from dtk.exchange.state import ExchangeState


@dataclass(frozen=True)
class WarmStart(Exchange):
    """Exchange whole gradients until `samples` rows have been trained on, then as `exchange` does.

    CNTK's `distributed_after`. There every worker trained on the same whole minibatch until then;
    here the minibatch is split and whole gradients are summed, which gives the same weights with
    1/K of the computation.

    Args:
        exchange: What follows.
        samples: Rows of global batches, counted from one `fit` to the next and kept in checkpoints.
            The step that reaches them is the last one to exchange whole gradients.

    Raises:
        ValueError: An argument is out of range; at the first step of a loop of the script's own,
            where rows are not counted.

    Example:
        >>> from dtk.exchange import Quantized
        >>> WarmStart(Quantized(bits=1), samples=60_000)
        WarmStart(exchange=Quantized(bits=1), samples=60000)
    """

    exchange: Exchange
    samples: int

    def __post_init__(self) -> None:
        if not isinstance(self.exchange, Exchange) or isinstance(self.exchange, WarmStart | Auto):
            raise ValueError(
                f"WarmStart(exchange={self.exchange!r}); expected another exchange, such as "
                "Quantized(bits=1)"
            )
        if not isinstance(self.samples, int) or isinstance(self.samples, bool) or self.samples < 1:
            raise ValueError(
                f"WarmStart(samples={self.samples!r}); expected a number of rows, 1 or more"
            )

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

    def exchanger(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> Exchanger:
        """See `Exchange.exchanger`."""
        first = Dense().exchanger(communicator, state, trained)
        return WarmExchanger(
            first, self.exchange.exchanger(communicator, state, trained), self.samples
        )


class WarmExchanger(Exchanger):
    """One exchanger at first, then another.

    Args:
        first: Until then.
        later: From then on.
        samples: Rows until then.
    """

    def __init__(self, first: Exchanger, later: Exchanger, samples: int):
        super().__init__(first.communicator, first.state)
        self._first, self._later, self._samples = first, later, samples

    def reduce(self, gradients: list[Gradient], portion: Portion | None = None) -> list[Gradient]:
        """See `Exchanger.reduce`."""
        return tf.cond(
            self._warm(),
            lambda: self._first.reduce(gradients, portion),
            lambda: self._later.reduce(gradients, portion),
        )

    def apply(
        self,
        gradients: list[Gradient],
        apply: Callable[[list[Gradient]], object],
        portion: Portion | None = None,
    ) -> object:
        """See `Exchanger.apply`."""
        if type(self._later).apply is Exchanger.apply:
            return super().apply(gradients, apply, portion)

        def applied_by(exchanger: Exchanger) -> tf.Tensor:
            exchanger.apply(gradients, apply, portion)
            return tf.constant(True)

        return tf.cond(
            self._warm(), lambda: applied_by(self._first), lambda: applied_by(self._later)
        )

    def count(self, portion: Portion | None) -> None:
        """See `Exchanger.count`."""
        if portion is None:
            raise ValueError(
                "WarmStart counts the rows of global batches, which only fit and train_on_batch "
                "know; in a loop of your own use the exchange without it"
            )

        def counted(count: Callable[[Portion], None]) -> bool:
            count(portion)
            return True

        tf.cond(
            self._warm(),
            lambda: counted(self._later.count_exact),
            lambda: counted(self._later.count),
        )
        self._seen().assign_add(portion.rows)

    def together(self) -> tf.Tensor | None:
        """See `Exchanger.together`."""
        return self._later.together()

    def share(self) -> tf.Tensor | None:
        """See `Exchanger.share`."""
        return self._later.share()

    def close(self) -> None:
        """See `Exchanger.close`."""
        self._later.close()

    def _seen(self) -> tf.Variable:
        return self.state.variable("samples_seen", "same", (), tf.int64)

    def _warm(self) -> tf.Tensor:
        return self._seen().read_value() < self._samples
