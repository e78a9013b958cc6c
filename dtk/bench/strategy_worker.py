"""A world of dtk's: `fit` under an AllReduceStrategy, over what joins its ranks."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.bench.models import PROBLEMS
from dtk.bench.setting import Setting, bytes_of
from dtk.bench.variant import AllReduce, DistributedFit
from dtk.bench.worker import Measure
from dtk.strategies import AllReduceStrategy
from dtk.version import __version__


class Worker:
    """Measures dtk over one communicator; see `dtk.bench.worker.Worker`."""

    def __init__(self, setting: dict[str, object]):
        self._setting = Setting.of(setting)
        self._strategy = AllReduceStrategy()
        self.rank = self._strategy.rank
        self.versions = {
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
            "dtk": __version__,
        }

    def build(self, task: str) -> tuple[int, dict[str, Measure | str]]:
        """See `dtk.bench.worker.Worker`."""
        keras.utils.clear_session()
        count = bytes_of(task)
        if count:
            return 0, {"allreduce": AllReduce(count, self._setting, self._strategy).measure}
        variants = [
            DistributedFit(PROBLEMS[task], self._setting, self._strategy, exchange)
            for exchange in self._setting.exchanges
        ]
        return variants[0].model.count_params(), {one.name: one.measure for one in variants}
