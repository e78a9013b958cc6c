"""Variants to measure: each trains a model, or reduces, some steps at a time."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping

import keras
import tensorflow as tf

from dtk.bench.models import Problem
from dtk.bench.report import BOUND
from dtk.bench.setting import Setting, block_of
from dtk.bench.worker import Counts, Tick
from dtk.communicators import Communicator
from dtk.compat import fused_kernels
from dtk.exchange import BlockMomentum, Exchange, parse
from dtk.nests import Logs
from dtk.strategies import AllReduceStrategy


class Variant(abc.ABC):
    """Trains on every rank at once; all ranks take the same measurements in the same order."""

    name: str  # as in the table

    @abc.abstractmethod
    def measure(self, tick: Tick) -> Counts:
        """Train for one measurement."""


class Fit(Variant):
    """Keras's `fit`, for an epoch a measurement."""

    def __init__(
        self,
        name: str,
        model: keras.Model,
        data: Mapping[str, object],
        steps: int,
        communicator: Communicator,
    ):
        self.name = name
        self.model = model
        self._data, self._steps, self._communicator = data, steps, communicator

    def measure(self, tick: Tick) -> Counts:
        """See `Variant.measure`."""
        watch = Stopwatch(self._communicator, self._steps, tick)
        self.model.fit(**self._data, verbose=0, callbacks=[watch])
        return watch.counts()


class Stopwatch(keras.callbacks.Callback):
    """Reads the clock and a communicator's counts around all steps of an epoch but the first.

    The first follows on what `fit` does once: ranks agree on what they were given, and compare all
    weights after it. That is a cost of an epoch, of any length, and not of a step.
    """

    def __init__(self, communicator: Communicator, steps: int, tick: Tick):
        super().__init__()
        self._communicator, self._steps, self._tick = communicator, steps, tick

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Start before the second step."""
        if batch == 1:
            self._begin = self._read()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Stop after the last step.

        Each is over when this is called: Keras has read its loss.
        """
        self._tick()
        if batch == self._steps:
            self._end = self._read()

    def counts(self) -> Counts:
        """Return, of a step, `seconds`, bytes `sent` and the part spent `communicating`."""
        seconds, sent, communicating = (
            end - begin for begin, end in zip(self._begin, self._end, strict=True)
        )
        return {
            "seconds": seconds / self._steps,
            "sent": sent / self._steps,
            "communicating": communicating / seconds,
        }

    def _read(self) -> tuple[float, int, float]:
        counts = self._communicator.bytes_sent, self._communicator.seconds_communicating
        return time.perf_counter(), *counts


class LocalFit(Fit):
    """The no-communication bound: plain Keras on this rank's own rows, without a strategy."""

    def __init__(self, problem: Problem, setting: Setting, communicator: Communicator, device: str):
        count = (setting.steps + 1) * setting.batch_size
        own = slice(communicator.rank * count, (communicator.rank + 1) * count)
        x, y = problem.data(communicator.size * count)
        self._device = device
        with tf.device(device):
            model = problem.compiled(keras)
        data = {"x": x[own], "y": y[own], "batch_size": setting.batch_size}
        super().__init__(BOUND, model, data, setting.steps, communicator)

    def measure(self, tick: Tick) -> Counts:
        """See `Variant.measure`."""
        with tf.device(self._device), fused_kernels.patch_norms():
            return super().measure(tick)


class DistributedFit(Fit):
    """Keras's `fit` under a strategy of dtk's, with one exchange."""

    def __init__(
        self, problem: Problem, setting: Setting, strategy: AllReduceStrategy, exchange: str
    ):
        strategy.exchange = exchange_of(exchange)
        with strategy.scope():
            model = problem.compiled(keras)
        steps = setting.steps_with(exchange, strategy.size)
        batch = setting.batch_size * strategy.size
        x, y = problem.data((steps + 1) * batch)
        data = {"x": x, "y": y, "batch_size": batch}
        super().__init__(exchange, model, data, steps, strategy.communicator)


def exchange_of(name: str) -> Exchange:
    """Return the exchange that `Setting` gives this name.

    Example:
        >>> exchange_of("1bit"), exchange_of("block:512").block_size
        (Quantized(bits=1), 512)
    """
    rows = block_of(name)
    return BlockMomentum(rows) if rows else parse(None if name == "none" else name)


class AllReduce(Variant):
    """The sum of one tensor over all ranks by dtk, and nothing else."""

    name = "allreduce"

    def __init__(self, size: int, setting: Setting, strategy: AllReduceStrategy):
        (device,) = strategy.extended.worker_devices
        with tf.device(device):
            self._values = tf.ones(size // 4)
        self._step = tf.function(self._sum, jit_compile=False)
        self._steps, self._communicator = setting.steps, strategy.communicator

    def _sum(self) -> tf.Tensor:
        # One element: to read all of them would copy them.
        return self._communicator.allreduce(self._values)[0]

    def measure(self, tick: Tick) -> Counts:
        """See `Variant.measure`."""
        before = self._communicator.bytes_sent
        for _ in range(self._steps + 1):
            self._step().numpy()
            tick()
        return {"sent": (self._communicator.bytes_sent - before) / (self._steps + 1)}
