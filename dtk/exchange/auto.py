"""Choose an exchange from the measured time of steps and the predicted time of the others.

    step      [ compute ................. | send .......... ]       measured, with whole gradients
    another   [ compute ................. | code | send . ]         predicted

The time to code and the number of bytes are measured without sending; the time to send these bytes
follows from the world's `Costs`. The prediction saves at most the measured sending time: sending
that the backward pass hides cannot be saved.
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
from dtk.communicators.local import NullCommunicator
from dtk.exchange.contract import Exchange, ExchangeOp, ExchangeState, Trained
from dtk.exchange.dense import Dense
from dtk.exchange.quantized import Quantized

# From the exchange that changes gradients least to the one that sends least.
CANDIDATES = (Dense(), Dense("float16"), Quantized(8), Quantized(1))
# Part of a step's time: a smaller gain is not worth an approximation.
_WORTH = 0.1
_TURNS = 3
# Part of the bytes of all gradients: if fewer were sent, some gradients went as factors.
_WHOLE = 0.9


@dataclass(frozen=True)
class Auto(Exchange):
    """Whole gradients for an epoch of `fit`; then the mildest exchange that is nearly the fastest.

    The first epoch, of five steps or more, is also the warm start that few bits need. At its end
    rank 0 compares the measured time of a step with the predicted times for half precision, 8 bits
    and 1 bit, takes the mildest exchange within a tenth of the fastest, and prints the choice.
    Checkpoints keep it. Loops without `fit` keep sending whole gradients.

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
    """Means over some steps with whole gradients."""

    step: float  # seconds of a step
    sending: float  # seconds of a step in which this rank waited for collectives
    sent: float  # bytes this rank sent
    gradients: Sequence[tf.TensorSpec] = ()  # specs of gradients that are summed whole
    factored: Sequence[tf.TensorSpec] = ()  # specs of gradients that may go as factors
    window: int = 1  # steps per exchange


class Overhead(NamedTuple):
    """Cost of one exchange without the time to send."""

    seconds: float
    sent: float  # bytes


class ExchangeChoice(NamedTuple):
    """The chosen exchange, and the reasons."""

    exchange: Exchange
    observed: Observed
    predicted: dict[Exchange, float]  # seconds of a step with each candidate

    def __str__(self) -> str:
        """Return one line for the user."""
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
    """Choose the mildest exchange whose step is nearly as fast as the fastest."""
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
    """Return the predicted seconds of sending in a step, without other traffic."""
    factors, exact = _bytes_as_factors(observed), CANDIDATES[0]
    summed = observed.sent - factors
    if exchange == exact:
        return costs.allreduce(summed) + costs.allgather(factors)
    if factors and isinstance(exchange, Dense):  # factors keep their dtype
        halved = _bytes(observed.gradients) / 2 / observed.window
        return costs.allreduce(summed - halved) + costs.allgather(factors)
    replaced = _bytes(observed.gradients) if factors else overheads[exact].sent
    summed += (overheads[exchange].sent - replaced) / observed.window
    # Codes go to owners and back, as in a ring all-reduce; vectors take one message more.
    return costs.allreduce(summed) + (0.0 if isinstance(exchange, Dense) else costs.message)


def _bytes(specs: Sequence[tf.TensorSpec]) -> int:
    return sum(spec.shape.num_elements() * spec.dtype.size for spec in specs)


def _bytes_as_factors(observed: Observed) -> float:
    """Return the bytes of a step that went as factors; 0 if all gradients went whole."""
    others = _bytes(observed.gradients) / observed.window
    whole = others + _bytes(observed.factored) / observed.window
    return max(0.0, observed.sent - others) if observed.sent < _WHOLE * whole else 0.0


def overheads_of(
    observed: Observed, communicator: Communicator, device: str
) -> dict[Exchange, Overhead]:
    """Measure each candidate's time to code and its bytes; nothing is sent."""
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
        return [tf.reduce_sum(tf.cast(g, tf.float32)) for g in op.update(gradients)[0]]

    def exchanged() -> None:
        for total in reduce():
            total.numpy()  # waits for the end

    exchanged()  # traces
    before, seconds = silent.bytes_sent, []
    for _ in range(_TURNS):
        began = time.perf_counter()
        exchanged()
        seconds.append(time.perf_counter() - began)
    return Overhead(statistics.median(seconds), (silent.bytes_sent - before) / _TURNS)
