"""What is measured: something that trains a model, a turn at a time."""

from __future__ import annotations

import abc
import time

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators import Communicator, LocalCommunicator
from dtk.exchange import parse
from dtk.strategies import AllReduceStrategy
from dtk.tuning.bench.models import Problem
from dtk.tuning.bench.report import LIMIT
from dtk.tuning.bench.results import Reading
from dtk.tuning.bench.setting import Setting


class Contender(abc.ABC):
    """Trains on every rank at once; all ranks take the same turns in the same order.

    Attributes:
        name: As in the table.
    """

    name: str

    @abc.abstractmethod
    def turn(self) -> Reading:
        """Train for one turn, and say what it took on this rank."""


class Fit(Contender):
    """Keras's `fit`, for an epoch a turn.

    Args:
        name: As in the table.
        model: Compiled, with a strategy or without.
        data: Rows and labels of all steps of a turn, as this `fit` takes them.
        steps: How many are measured; `data` holds one more.
        communicator: Counts what is sent.
    """

    def __init__(
        self,
        name: str,
        model: keras.Model,
        data: tuple[np.ndarray, np.ndarray],
        steps: int,
        communicator: Communicator,
    ):
        self.name = name
        self.model = model
        self._data, self._steps, self._communicator = data, steps, communicator

    def turn(self) -> Reading:
        """See `Contender.turn`."""
        watch = Stopwatch(self._communicator, self._steps)
        began = time.perf_counter()
        self.model.fit(
            *self._data,
            batch_size=len(self._data[0]) // (self._steps + 1),
            verbose=0,
            callbacks=[watch],
        )
        return watch.reading(time.perf_counter() - began)


class Stopwatch(keras.callbacks.Callback):
    """Reads the clock and a communicator's counts around all steps of an epoch but the first.

    The first follows on what `fit` does once: ranks agree on what they were given, and compare all
    weights after it. That is a cost of an epoch, of any length, and not of a step.
    """

    def __init__(self, communicator: Communicator, steps: int):
        super().__init__()
        self._communicator, self._steps = communicator, steps

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        """Start before the second step."""
        if batch == 1:
            self._begin = self._read()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Stop after the last, which is over: Keras has read its loss."""
        if batch == self._steps:
            self._end = self._read()

    def reading(self, fit: float) -> Reading:
        """What a step took; `fit` is the seconds of the whole epoch."""
        seconds, sent, communicating = (
            end - begin for begin, end in zip(self._begin, self._end, strict=True)
        )
        return Reading(seconds / self._steps, sent / self._steps, communicating / seconds, fit)

    def _read(self) -> tuple[float, int, float]:
        counts = self._communicator.bytes_sent, self._communicator.seconds_communicating
        return time.perf_counter(), *counts


class Alone(Fit):
    """The limit: plain Keras on this rank's own rows, without a strategy; nothing is sent.

    Args:
        problem: What to train.
        setting: What to measure.
        strategy: Of the others, for its ranks and this rank's device.
    """

    def __init__(self, problem: Problem, setting: Setting, strategy: AllReduceStrategy):
        count = (setting.steps + 1) * setting.batch_size
        own = slice(strategy.rank * count, (strategy.rank + 1) * count)
        x, y = problem.data(strategy.size * count)
        (self._device,) = strategy.extended.worker_devices
        with tf.device(self._device):
            model = problem.compiled()
        super().__init__(LIMIT, model, (x[own], y[own]), setting.steps, LocalCommunicator())

    def turn(self) -> Reading:
        """See `Contender.turn`."""
        with tf.device(self._device):
            return super().turn()


class Together(Fit):
    """dtk: `fit` under a strategy, with one exchange.

    Args:
        problem: What to train.
        setting: What to measure.
        strategy: Of all ranks. Its exchange is set.
        exchange: Its short name, or "none".
    """

    def __init__(
        self, problem: Problem, setting: Setting, strategy: AllReduceStrategy, exchange: str
    ):
        strategy.exchange = parse(None if exchange == "none" else exchange)
        with strategy.scope():
            model = problem.compiled()
        data = problem.data((setting.steps + 1) * setting.batch_size * strategy.size)
        super().__init__(exchange, model, data, setting.steps, strategy.communicator)
