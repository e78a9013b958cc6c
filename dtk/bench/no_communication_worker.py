"""The limit: plain Keras on every rank, by itself. Nothing joins these processes."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk import quiet
from dtk.bench.models import PROBLEMS
from dtk.bench.report import BOUND
from dtk.bench.setting import Setting
from dtk.bench.variant import LocalFit
from dtk.bench.worker import Measure
from dtk.cluster import detect
from dtk.communicators.null import NullCommunicator
from dtk.strategies import devices
from dtk.trainer import undistributed_jobs


class Worker:
    """Measures the no-communication bound; see `dtk.bench.worker.Worker`."""

    def __init__(self, setting: dict[str, object]):
        self._setting = Setting.of(setting)
        environment = detect()
        # Tells the rank, for its rows and its device, and sends nothing.
        self._communicator = NullCommunicator(environment.rank, environment.size)
        self._communicator.set_hosts(environment.hosts)
        undistributed_jobs.made_strategy()  # here it is meant to make none
        with quiet.device_start():
            self._device = devices.pin(self._communicator)
        self.rank = self._communicator.rank
        self.versions = {"TensorFlow": tf.__version__, "Keras": keras.__version__}

    def build(self, task: str) -> tuple[int, dict[str, Measure | str]]:
        """See `dtk.bench.worker.Worker`."""
        keras.utils.clear_session()
        if task not in PROBLEMS:
            return 0, {}
        limit = LocalFit(PROBLEMS[task], self._setting, self._communicator, self._device)
        return limit.model.count_params(), {BOUND: limit.measure}
