"""The choice of `exchange="auto"`, made at the end of an epoch from the time of its steps."""

from __future__ import annotations

import time

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.communicators import determinism
from dtk.communicators.cost_measurement import measure
from dtk.communicators.costs import Costs
from dtk.communicators.root import on_root
from dtk.exchange.auto import CANDIDATES, ExchangeChoice, Observed, choose, overheads_of
from dtk.exchange.contract import Exchange
from dtk.nests import Array, Logs
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.gradients.gradient_exchange import GradientExchange

# Calls of the train function to leave out, since they trace or follow on what `fit` does once; and
# the number of calls needed after them.
_FIRST, _LEAST = 2, 3
# How checkpoints name each candidate: by its bits per entry. 0: none chosen yet.
_BITS = dict(zip(CANDIDATES, (32, 16, 8, 1), strict=True))


class ExchangeSelection:
    """Selection of an exchange for `exchange="auto"`, from the measured steps of one `fit`."""

    def __init__(self, trainer: DistributedTrainer):
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._undecided: list[GradientExchange] = []
        self._calls: list[Array] = []
        self._steps = self._count = 0

    def begin(self) -> None:
        """Use the exchange that a checkpoint has recorded; without one, measure the steps."""
        bound = shared_optimizer.gradient_exchanges_of(self._trainer.model)
        selected = [one for one in bound if one.chooses]
        kept = {int(_kept(one)) for one in selected}
        if kept <= {0}:
            # The choice depends on measured times, which may differ in the next run.
            self._undecided = [] if determinism.is_asked_for() else selected
            return
        (chosen,) = (candidate for candidate, bits in _BITS.items() if bits == max(kept))
        if any(one.exchange != chosen for one in selected):
            self._use(chosen, selected)

    def begin_step(self, first: int) -> None:
        """Read the clocks before the train function is called."""
        if self._undecided:
            self._first, self._began = first, self._read()

    def end_step(self, last: int, logs: Logs | None) -> None:
        """Read the clocks again; reading the logs first waits for the end of the steps."""
        if not self._undecided:
            return
        for value in (logs or {}).values():
            np.asarray(value)
        self._count += 1
        if self._count > _FIRST:
            ended = self._read()
            self._calls.append(ended - self._began)
            self._steps += last - self._first + 1

    def end_epoch(self) -> None:
        """Choose the same exchange on all ranks, once enough steps have been measured."""
        window = max((one.window for one in self._undecided), default=1)
        if not self._undecided or len(self._calls) < _LEAST or self._steps < window:
            return
        communicator = self._strategy.communicator
        device = placement.computing(self._strategy)
        costs = communicator.costs or measure(communicator, device)
        choice = on_root(communicator, lambda: self._choose(costs, window, device))
        if self._strategy.is_chief:
            print(f"dtk: {choice}", flush=True)
        self._use(choice.exchange, self._undecided)

    def _choose(self, costs: Costs, window: int, device: str) -> ExchangeChoice:
        step, sending, sent = np.sum(self._calls, 0) / self._steps
        gradients = [spec for one in self._undecided for spec in one.whole_specs]
        factored = [spec for one in self._undecided for spec in one.factored_specs]
        observed = Observed(step, sending, sent, gradients, factored, window)
        overheads = overheads_of(observed, self._strategy.communicator, device)
        return choose(observed, overheads, costs)

    def _use(self, chosen: Exchange, gradient_exchanges: list[GradientExchange]) -> None:
        for gradient_exchange in gradient_exchanges:
            _kept(gradient_exchange).assign(_BITS[chosen])
            gradient_exchange.use(chosen)
        self._undecided = []
        self._trainer.make_train_function(force=True)

    def _read(self) -> Array:
        """Read seconds on the clock, seconds of communication, and bytes sent so far."""
        one = self._strategy.communicator
        return np.array([time.perf_counter(), one.seconds_communicating, one.bytes_sent])


def _kept(gradient_exchange: GradientExchange) -> tf.Variable:
    return gradient_exchange.state.variable("chosen_bits", "same", (), tf.int64)
