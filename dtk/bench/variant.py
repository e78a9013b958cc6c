"""What dtk's own ranks measure: variants that train a model, or reduce, some steps at a time.

LimitWorker       plain Keras on every rank, by itself; nothing joins these processes
StrategyWorker    `fit` under an AllReduceStrategy, over what joins its ranks
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Mapping

import keras
import tensorflow as tf

from dtk import quiet
from dtk.bench.models import PROBLEMS, Problem
from dtk.bench.report import BOUND
from dtk.bench.results import Setting, block_of, bytes_of
from dtk.bench.worker import Built, Measure, Numbers, Tick
from dtk.cluster import detect
from dtk.communicators import Communicator
from dtk.communicators.local import NullCommunicator
from dtk.exchange import BlockMomentum, Exchange, parse
from dtk.kernels import fused_layers, optimizer_updates
from dtk.nests import Logs
from dtk.strategies import AllReduceStrategy, devices
from dtk.trainer import undistributed_jobs
from dtk.version import __version__

_VERSIONS = {"TensorFlow": tf.__version__, "Keras": keras.__version__}


class Fit:
    """Keras's `fit`, for an epoch a measurement, named as in the table."""

    def __init__(
        self,
        name: str,
        model: keras.Model,
        data: Mapping[str, object],
        steps: int,
        communicator: Communicator,
    ):
        self.name, self.model = name, model
        self._data, self._steps, self._communicator = data, steps, communicator

    def measure(self, tick: Tick) -> Numbers:
        """Train for one measurement, on every rank at once."""
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

    def counts(self) -> Numbers:
        """Return, of a step, `seconds`, bytes `sent` and the part spent `communicating`."""
        seconds, sent, communicating = map(operator.sub, self._end, self._begin)
        return {
            "seconds": seconds / self._steps,
            "sent": sent / self._steps,
            "communicating": communicating / seconds,
        }

    def _read(self) -> tuple[float, int, float]:
        counts = self._communicator.bytes_sent, self._communicator.seconds_communicating
        return time.perf_counter(), *counts


class LocalFit(Fit):
    """The no-communication bound: plain Keras on a rank's own rows, with dtk's fused operations."""

    def __init__(self, problem: Problem, setting: Setting, communicator: Communicator, device: str):
        count = (setting.steps + 1) * setting.batch_size
        own = slice(communicator.rank * count, (communicator.rank + 1) * count)
        x, y = problem.data(communicator.size * count)
        self._device, self._replicas = device, communicator.size
        with tf.device(device):
            model = problem.compiled(keras, setting.shard_optimizer)
        if setting.shard_optimizer:
            optimizer_updates.fuse_updates(model.optimizer, communicator.size)
        data = {"x": x[own], "y": y[own], "batch_size": setting.batch_size}
        super().__init__(BOUND, model, data, setting.steps, communicator)

    def measure(self, tick: Tick) -> Numbers:
        """See `Fit.measure`."""
        with tf.device(self._device), fused_layers.patch_layers(self._replicas):
            return super().measure(tick)


def distributed_fit(
    problem: Problem, setting: Setting, strategy: AllReduceStrategy, exchange: str
) -> Fit:
    """Return Keras's `fit` under a strategy of dtk's, with one exchange, maybe sharded."""
    strategy.exchange = exchange_of(exchange)
    with strategy.scope():
        model = problem.compiled(keras, setting.shard_optimizer)
    steps = setting.steps_with(exchange, strategy.size)
    batch = setting.batch_size * strategy.size
    x, y = problem.data((steps + 1) * batch)
    data = {"x": x, "y": y, "batch_size": batch}
    name = f"{exchange} sharded" if strategy.shard_optimizer else exchange
    return Fit(name, model, data, steps, strategy.communicator)


def exchange_of(name: str) -> Exchange:
    """Return the exchange that `Setting` gives this name.

    Example:
        >>> exchange_of("1bit"), exchange_of("block:512").block_size
        (Quantized(bits=1), 512)
    """
    rows = block_of(name)
    return BlockMomentum(rows) if rows else parse(None if name == "none" else name)


def allreduce(size: int, setting: Setting, strategy: AllReduceStrategy) -> Measure:
    """Return what measures the sum of one tensor over all ranks by dtk, and nothing else."""
    (device,), communicator = strategy.extended.worker_devices, strategy.communicator
    with tf.device(device):
        values = tf.ones(size // 4)
    # One element: to read all of them would copy them.
    step = tf.function(lambda: communicator.allreduce(values)[0], jit_compile=False)

    def measure(tick: Tick) -> Numbers:
        before, steps = communicator.bytes_sent, setting.steps + 1
        for _ in range(steps):
            step().numpy()
            tick()
        return {"sent": (communicator.bytes_sent - before) / steps}

    return measure


class LimitWorker:
    """Measures the no-communication bound; see `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, object]):
        self._setting = Setting(**(dataclasses.asdict(Setting()) | setting))
        place = detect()
        # Tells the rank, for its rows and its device, and sends nothing.
        self._communicator = NullCommunicator(place.rank, place.size)
        self._communicator.set_hosts(place.hosts)
        undistributed_jobs.made_strategy()  # here it is meant to make none
        with quiet.device_start():
            self._device = devices.pin(self._communicator)
        self.rank = self._communicator.rank
        self.versions = _VERSIONS

    def build(self, task: str) -> Built:
        keras.utils.clear_session()
        if task not in PROBLEMS:
            return 0, {}
        limit = LocalFit(PROBLEMS[task], self._setting, self._communicator, self._device)
        return limit.model.count_params(), {BOUND: limit.measure}


class StrategyWorker:
    """Measures dtk over one communicator; see `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, object]):
        self._setting = Setting(**(dataclasses.asdict(Setting()) | setting))
        self._strategy = AllReduceStrategy()
        if self._setting.shard_optimizer:
            self._sharded = AllReduceStrategy(self._strategy.communicator, shard_optimizer=True)
        self.rank = self._strategy.rank
        self.versions = {**_VERSIONS, "dtk": __version__}

    def build(self, task: str) -> Built:
        keras.utils.clear_session()
        if size := bytes_of(task):
            return 0, {"allreduce": allreduce(size, self._setting, self._strategy)}
        variants = [
            distributed_fit(PROBLEMS[task], self._setting, self._strategy, exchange)
            for exchange in self._setting.exchanges
        ] + [
            distributed_fit(PROBLEMS[task], self._setting, self._sharded, exchange)
            for exchange in self._setting.sharded
        ]
        return variants[0].model.count_params(), {one.name: one.measure for one in variants}
