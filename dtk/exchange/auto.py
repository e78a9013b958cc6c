"""Choosing an exchange by what steps took and what others would take.

    step      [ compute ................. | send .......... ]       measured, with whole gradients
    another   [ compute ................. | code | send . ]         predicted

What it codes and how many bytes that makes is measured, without sending any; what these bytes take
follows from the world's `Costs`. Sending that the backward pass hides cannot be saved, so no more
is than was seen to be spent on it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs
from dtk.communicators.null import NullCommunicator
from dtk.exchange.base import Exchange, ExchangeOp, Trained
from dtk.exchange.dense import Dense
from dtk.exchange.quantized import Quantized
from dtk.exchange.state import ExchangeState

# From what changes gradients least to what sends least.
CANDIDATES = (Dense(), Dense("float16"), Quantized(8), Quantized(1))
# Of a step: less is not worth an approximation.
_WORTH = 0.1
_TURNS = 3
# Of the bytes of all gradients: with less, some went as factors.
_WHOLE = 0.9


@dataclass(frozen=True)
class Auto(Exchange):
    """Whole gradients for an epoch of `fit`; then what is fastest, or nearly, and changes least.

    The first epoch, of five steps or more, is the warm start that few bits need. At its end rank 0
    compares what steps took with what they would take with half precision, 8 bits and 1 bit, takes
    the mildest that is within a tenth of the fastest, and says so. Checkpoints keep the choice.
    Loops without `fit` stay with whole gradients.

    Example:
        >>> import dtk
        >>> dtk.strategies.AllReduceStrategy("local", exchange=Auto()).exchange
        dtk: one worker has nobody to exchange gradients with; Auto() is not used
        Auto()
    """

    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """See `Exchange.init`."""
        return Dense().init(communicator, state, trained)


class Observed(NamedTuple):
    """Means of some steps with whole gradients."""

    step: float  # seconds
    sending: float  # seconds of it in which this rank waited for collectives
    sent: float  # bytes this rank handed over
    gradients: Sequence[tf.TensorSpec] = ()  # shapes and dtypes of those that are summed whole
    factored: Sequence[tf.TensorSpec] = ()  # of those that may go as their factors
    window: int = 1  # steps for which gradients are exchanged once


class Overhead(NamedTuple):
    """Cost of an exchange of gradients without sending."""

    seconds: float  # of one exchange
    sent: float  # bytes of one exchange


class ExchangeChoice(NamedTuple):
    """An exchange, and why."""

    exchange: Exchange  # what was chosen
    observed: Observed  # what that is based on
    predicted: dict[Exchange, float]  # seconds of a step with each

    def __str__(self) -> str:
        """One line for the user."""
        others = ", ".join(
            f"{exchange} {1e3 * seconds:.1f} ms"
            for exchange, seconds in self.predicted.items()
            if exchange != CANDIDATES[0]
        )
        step, sending, sent, *_ = self.observed
        return (
            f"exchange='auto' goes on with {self.exchange}: of a step of {1e3 * step:.1f} ms "
            f"{1e3 * sending:.1f} were spent sending {sent / 1e6:.2f} MB; expected: {others}"
        )


def choose(
    observed: Observed, overheads: Mapping[Exchange, Overhead], costs: Costs
) -> ExchangeChoice:
    """Return the mildest exchange that makes a step nearly as fast as any does."""
    exact, *others = CANDIDATES
    now = _sending(exact, observed, overheads, costs)
    predicted: dict[Exchange, float] = {exact: observed.step}
    for exchange in others:
        saved = now - _sending(exchange, observed, overheads, costs)
        coding = overheads[exchange].seconds - overheads[exact].seconds
        predicted[exchange] = (
            observed.step - min(observed.sending, saved) + coding / observed.window
        )
    fastest = min(predicted.values())
    limit = fastest + _WORTH * abs(fastest)
    chosen = next(exchange for exchange, seconds in predicted.items() if seconds <= limit)
    return ExchangeChoice(chosen, observed, predicted)


def _sending(
    exchange: Exchange, observed: Observed, overheads: Mapping[Exchange, Overhead], costs: Costs
) -> float:
    """Return the seconds a step sends, by the model, if nothing else goes on."""
    factors, exact = _bytes_as_factors(observed), CANDIDATES[0]
    summed = observed.sent - factors
    if exchange == exact:
        return costs.allreduce(summed) + costs.allgather(factors)
    if factors and isinstance(exchange, Dense):  # factors go as they are
        halved = _bytes(observed.gradients) / 2 / observed.window
        return costs.allreduce(summed - halved) + costs.allgather(factors)
    replaced = _bytes(observed.gradients) if factors else overheads[exact].sent
    summed += (overheads[exchange].sent - replaced) / observed.window
    # Codes go to owners and from owners: as a ring does, and vectors go beside.
    return costs.allreduce(summed) + (0.0 if isinstance(exchange, Dense) else costs.message)


def _bytes(specs: Sequence[tf.TensorSpec]) -> int:
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)


def _bytes_as_factors(observed: Observed) -> float:
    """Return the bytes of a step that went as factors; 0 where gradients went whole after all."""
    others = _bytes(observed.gradients) / observed.window
    whole = others + _bytes(observed.factored) / observed.window
    return max(0.0, observed.sent - others) if observed.sent < _WHOLE * whole else 0.0


def overheads_of(
    observed: Observed, communicator: Communicator, device: str
) -> dict[Exchange, Overhead]:
    """Measure what each candidate computes and hands over; nothing is sent."""
    silent = NullCommunicator(communicator.rank, communicator.size)
    with tf.device(device):
        specs = [*observed.gradients, *observed.factored]
        zeros = [tf.zeros(spec.shape, spec.dtype) for spec in specs]
        return {exchange: _overhead(exchange, zeros, silent, device) for exchange in CANDIDATES}


def _overhead(
    exchange: Exchange, gradients: list[tf.Tensor], silent: NullCommunicator, device: str
) -> Overhead:
    op = exchange.init(silent, ExchangeState(silent, device), Trained())

    @tf.function(autograph=False, jit_compile=False)
    def reduce() -> list[tf.Tensor]:
        return [tf.reduce_sum(tf.cast(g, tf.float32)) for g in op.reduce(gradients)]

    def exchanged() -> None:
        for total in reduce():
            total.numpy()  # over only when it can be read

    exchanged()  # traces
    before, seconds = silent.bytes_sent, []
    for _ in range(_TURNS):
        began = time.perf_counter()
        exchanged()
        seconds.append(time.perf_counter() - began)
    return Overhead(statistics.median(seconds), (silent.bytes_sent - before) / _TURNS)
