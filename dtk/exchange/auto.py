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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs
from dtk.communicators.null import NullCommunicator
from dtk.exchange.base import Exchange, Exchanger, Trained
from dtk.exchange.dense import Dense
from dtk.exchange.memory import Memory
from dtk.exchange.quantized import Quantized

# From what changes gradients least to what sends least.
CANDIDATES = (Dense(), Dense("float16"), Quantized(8), Quantized(1))
# Of a step: less is not worth an approximation.
_WORTH = 0.1
_TURNS = 3


@dataclass(frozen=True)
class Auto(Exchange):
    """Whole gradients for an epoch of `fit`; then what is fastest, or nearly, and changes least.

    The first epoch is the warm start that few bits need. At its end rank 0 compares what steps took
    with what they would take with half precision, 8 bits and 1 bit, takes the mildest that is
    within a tenth of the fastest, and says so. Checkpoints keep the choice. Loops without `fit`
    stay with whole gradients.

    Example:
        >>> import dtk
        >>> dtk.strategies.AllReduceStrategy("local", exchange=Auto()).exchange
        dtk: one worker has nobody to exchange gradients with; Auto() is not used
        Auto()
    """

    def exchanger(self, communicator: Communicator, memory: Memory, trained: Trained) -> Exchanger:
        """See `Exchange.exchanger`."""
        return Dense().exchanger(communicator, memory, trained)


class Observed(NamedTuple):
    """What steps with whole gradients took, the mean of some.

    Attributes:
        step: Seconds.
        sending: Seconds of it in which this rank waited for collectives.
        sent: Bytes this rank handed over.
        gradients: Shapes and dtypes of those that were tensors.
        factors: Whether some of these went as their factors.
    """

    step: float
    sending: float
    sent: float
    gradients: Sequence[tf.TensorSpec]
    factors: bool = False


class Choice(NamedTuple):
    """An exchange, and why.

    Attributes:
        exchange: What was chosen.
        observed: What that is based on.
        predicted: Seconds of a step with each.
    """

    exchange: Exchange
    observed: Observed
    predicted: dict[Exchange, float]

    def __str__(self) -> str:
        """One line for the user."""
        step, sending, sent, *_ = self.observed
        others = ", ".join(f"{e} {1e3 * s:.1f} ms" for e, s in self.predicted.items() if s != step)
        return (
            f"exchange='auto' goes on with {self.exchange}: of a step of {1e3 * step:.1f} ms "
            f"{1e3 * sending:.1f} were spent sending {sent / 1e6:.2f} MB; expected: {others}"
        )


def choose(observed: Observed, communicator: Communicator, costs: Costs) -> Choice:
    """The mildest exchange that makes a step nearly as fast as any does.

    Args:
        observed: Of this rank.
        communicator: Between the workers. Nothing is sent.
        costs: Of its world.
    """
    exact, *others = CANDIDATES
    predicted: dict[Exchange, float] = {exact: observed.step}
    whole = _overhead(exact, observed, communicator)
    now = costs.allgather(observed.sent) if observed.factors else costs.allreduce(observed.sent)
    for exchange in others:
        coded = _overhead(exchange, observed, communicator)
        # What is no gradient, such as metrics, is sent in any case.
        rest = 0 if observed.factors else max(0.0, observed.sent - whole.sent)
        then = _sending(exchange, coded.sent + rest, costs)
        saved = min(observed.sending, now - then)
        predicted[exchange] = observed.step - saved + coded.seconds - whole.seconds
    fastest = min(predicted.values())
    chosen = next(e for e, seconds in predicted.items() if seconds <= (1 + _WORTH) * fastest)
    return Choice(chosen, observed, predicted)


def _sending(exchange: Exchange, length: float, costs: Costs) -> float:
    if isinstance(exchange, Dense):
        return costs.allreduce(length)
    # To owners, and from owners: each sends P-1 times a P-th, twice.
    return costs.allreduce(length) + costs.message


class _Overhead(NamedTuple):
    seconds: float
    sent: float


def _overhead(exchange: Exchange, observed: Observed, communicator: Communicator) -> _Overhead:
    """What an exchange computes, and how many bytes it then has to send."""
    nobody = NullCommunicator(communicator.rank, communicator.size)
    exchanger = exchange.exchanger(nobody, Memory(nobody, "CPU:0"), Trained())
    zeros = [tf.zeros(spec.shape, spec.dtype) for spec in observed.gradients]
    reduce = tf.function(lambda: exchanger.reduce(zeros), autograph=False, jit_compile=False)
    reduce()  # traces
    before, seconds = nobody.bytes_sent, []
    for _ in range(_TURNS):
        began = time.perf_counter()
        reduce()
        seconds.append(time.perf_counter() - began)
    return _Overhead(statistics.median(seconds), (nobody.bytes_sent - before) / _TURNS)
