"""When `exchange="auto"` chooses: at the end of an epoch of `fit`, by what its steps took."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dtk.communicators.measuring import measure
from dtk.exchange.auto import CANDIDATES, Observed, choose
from dtk.strategies import optimizing
from dtk.strategies.exchanging import Exchanging

# Steps that are left out, being traced or following on what `fit` does once; and how many tell.
_FIRST, _LEAST = 2, 3
# The variable that keeps the choice in checkpoints; 0 is none yet.
_CHOICE = "choice"


class _Reading(NamedTuple):
    """Clocks and counts."""

    seconds: float
    sending: float
    sent: float


class Choosing:
    """Watches the steps of one `fit`, if there is something to choose.

    Args:
        adoption: The model's adoption.
    """

    def __init__(self, adoption: Any):
        self._adoption = adoption
        self._strategy = adoption.strategy
        self._exchangings: list[Exchanging] = []
        self._steps: list[list[float]] = []
        self._count = 0

    def begin(self) -> None:
        """Go on with what a checkpoint says was chosen; else watch."""
        bound = optimizing.exchangings_of(self._adoption.model)
        self._exchangings = [exchanging for exchanging in bound if exchanging.chooses]
        if self._exchangings:
            chosen = int(_kept(self._exchangings[0]))
            if chosen:
                self._go_on_with(chosen - 1)

    def begin_step(self) -> None:
        """Read the clocks."""
        if self._exchangings:
            self._began = self._read()

    def end_step(self, logs: dict | None) -> None:
        """Read them again, once the step is over: then its logs can be read."""
        if not self._exchangings:
            return
        for value in (logs or {}).values():
            np.asarray(value)
        self._count += 1
        if self._count > _FIRST:
            ended = self._read()
            self._steps.append([b - a for a, b in zip(self._began, ended, strict=True)])

    def end_epoch(self) -> None:
        """Choose, on all ranks alike."""
        if not self._exchangings or len(self._steps) < _LEAST:
            return
        communicator = self._strategy.communicator
        (device,) = self._strategy.extended.worker_devices
        costs = communicator.costs or measure(communicator, device)
        choice = choose(self._observed(), communicator, costs)
        chosen = communicator.broadcast_object(CANDIDATES.index(choice.exchange))
        if self._strategy.is_chief:
            print(f"dtk: {choice}", flush=True)
        self._go_on_with(chosen)

    def _observed(self) -> Observed:
        step, sending, sent = np.mean(self._steps, 0)
        seen = [spec for exchanging in self._exchangings for spec in exchanging.seen]
        factors = any(exchanging.factors for exchanging in self._exchangings)
        return Observed(step, sending, sent, seen, factors)

    def _go_on_with(self, chosen: int) -> None:
        for exchanging in self._exchangings:
            _kept(exchanging).assign(chosen + 1)
            exchanging.go_on_with(CANDIDATES[chosen])
        self._exchangings = []
        if chosen:
            self._adoption.make_train_function(force=True)

    def _read(self) -> _Reading:
        communicator = self._strategy.communicator
        sent = communicator.bytes_sent
        return _Reading(time.perf_counter(), communicator.seconds_communicating, sent)


def _kept(exchanging: Exchanging) -> tf.Variable:
    return exchanging.memory.variable(_CHOICE, "same", (), tf.int64)
