"""Legacy Keras under TensorFlow's MultiWorkerMirroredStrategy, with `fit`."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import tensorflow as tf
import tf_keras
from dtk.bench.models import PROBLEMS
from dtk.bench.worker import Measure, Tick


class Worker:
    """See `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, Any]):
        config = json.loads(os.environ["TF_CONFIG"])
        self.rank, self._size = config["task"]["index"], len(config["cluster"]["worker"])
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.versions = {"tf_keras": tf_keras.__version__, "TensorFlow": tf.__version__}
        self._batch, self._steps = setting["batch_size"], setting["steps"]

    def build(self, task: str) -> tuple[int, dict[str, Measure | str]]:
        """See `dtk.bench.worker.BenchWorker`."""
        tf_keras.backend.clear_session()
        if task not in PROBLEMS:
            return 0, {}
        alone = self._fit(task, contextlib.nullcontext(), 1)
        together = self._fit(task, self._strategy.scope(), self._size)
        return alone.parameters, {"limit": alone.measure, "mwms": together.measure}

    def _fit(self, task: str, scope: Any, workers: int) -> _Fit:
        with scope:
            model = PROBLEMS[task].compiled(tf_keras)
        batch = self._batch * workers
        return _Fit(model, PROBLEMS[task].data(batch * (self._steps + 1)), batch)


class _Fit:
    """A model, and the rows of a turn."""

    def __init__(self, model: Any, data: tuple[Any, Any], batch: int):
        self._model, self._data, self._batch = model, data, batch
        self.parameters = model.count_params()

    def measure(self, tick: Tick) -> None:
        """Fit for an epoch."""
        after = tf_keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: tick())
        self._model.fit(*self._data, batch_size=self._batch, verbose=0, callbacks=[after])
