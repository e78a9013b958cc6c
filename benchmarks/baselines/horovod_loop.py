"""A training loop written by hand over Horovod, as its documentation shows it for TensorFlow 2.

Horovod's own tape and optimizers expect TensorFlow's variables, which Keras 3 wraps: gradients are
reduced here by the calls they are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from dtk.bench.models import PROBLEMS
from dtk.bench.results import bytes_of
from dtk.bench.worker import Measure, Tick

Reduce = Callable[[list[Any]], list[Any]]


class Worker:
    """See `dtk.bench.worker.BenchWorker`."""

    def __init__(self, setting: dict[str, Any]):
        hvd.init()
        self.rank = hvd.rank()
        self.versions = {"Horovod": horovod.__version__, "TensorFlow": tf.__version__}
        self._batch, self._steps = setting["batch_size"], setting["steps"]

    def build(self, task: str) -> tuple[int, dict[str, Measure | str]]:
        """See `dtk.bench.worker.BenchWorker`."""
        keras.utils.clear_session()
        size = bytes_of(task)
        if size:
            return 0, {"allreduce": self._sum(size)}
        turns: dict[str, Measure | str] = {}
        for name, reduce in _REDUCES.items():
            model = PROBLEMS[task].compiled(keras)
            turns[name] = self._train(model, reduce, task)
        return model.count_params(), turns

    def _sum(self, size: int) -> Measure:
        values = tf.zeros(size // 4)
        # One element: to read all of them would copy them.
        step = tf.function(
            lambda: hvd.allreduce(values, op=hvd.Sum, name=f"sum_{size}")[0], jit_compile=False
        )

        def measure(tick: Tick) -> None:
            for _ in range(self._steps + 1):
                step().numpy()
                tick()

        return measure

    def _train(self, model: Any, reduce: Reduce, task: str) -> Measure:
        variables = [variable.value for variable in model.trainable_variables]
        hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
        count = self._batch * (self._steps + 1)
        x, y = PROBLEMS[task].data(count * hvd.size())
        own = slice(hvd.rank() * count, (hvd.rank() + 1) * count)
        rows = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(self._batch)

        @tf.function(jit_compile=False)
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            gradients = reduce(tape.gradient(loss, variables))
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        def measure(tick: Tick) -> None:
            for batch in rows:
                step(*batch).numpy()
                tick()

        return measure


def _one_by_one(gradients: list[Any]) -> list[Any]:
    return [
        hvd.allreduce(gradient, name=f"gradient_{index}", ignore_name_scope=True)
        for index, gradient in enumerate(gradients)
    ]


def _grouped(gradients: list[Any]) -> list[Any]:
    """Sparse ones go apart, as in Horovod's own optimizers."""
    dense = [one for one in gradients if isinstance(one, tf.Tensor)]
    reduced = iter(hvd.grouped_allreduce(dense, name="gradients", ignore_name_scope=True))
    return [
        next(reduced) if isinstance(one, tf.Tensor) else hvd.allreduce(one, name=f"sparse_{index}")
        for index, one in enumerate(gradients)
    ]


# The loop's own limit sends nothing.
_REDUCES: dict[str, Reduce] = {
    "limit": list,
    "allreduce": _one_by_one,
    "grouped_allreduce": _grouped,
}
