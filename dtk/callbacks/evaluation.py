"""Evaluations of the model within `fit`, which do not change the running epoch."""

from __future__ import annotations

from typing import NamedTuple

import keras
import tensorflow as tf

from dtk.nests import Logs, Nest
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.ranks import rank_checks
from dtk.trainer.replica.replica_step import metric_variables
from dtk.trainer.replica.snapshot import Snapshot


class Evaluated(NamedTuple):
    """Result of an evaluation."""

    numbers: dict[str, float]  # loss and metrics by name, over all data, equal on every rank
    samples: int  # rows of the data
    minibatches: int  # batches of the data


class Evaluation:
    """Evaluates a model with `model.evaluate`, always on the same data."""

    def __init__(self, name: str, data: Nest | tf.data.Dataset, batch_size: int | None):
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, or None for fit's, got {batch_size}")
        if data is None:
            raise ValueError(f"the {name} is missing; give arrays (x, y), or a dataset")
        self._name = name
        self._data = keras.utils.unpack_x_y_sample_weight(data)
        self._batch_size = batch_size

    def check(self, trainer: DistributedTrainer) -> None:
        """Compare the data over all ranks. All ranks call it together."""
        rank_checks.check_same_call(trainer.strategy, {self._name: self._data[0]})

    def run(self, trainer: DistributedTrainer) -> Evaluated:
        """Evaluate now, and restore the epoch's metrics. All ranks call it together."""
        trainer.flush()
        model = trainer.model
        kept, counter = Snapshot(metric_variables(model)), _Counter()
        x, y, sample_weight = self._data
        try:
            numbers = model.evaluate(
                x,
                y,
                sample_weight=sample_weight,
                batch_size=self._batch_size_for(x, trainer),
                callbacks=[counter],
                verbose=0,
                return_dict=True,
            )
            samples = _rows_of(x)
            samples = count_rows(model) if samples is None else samples
        finally:
            kept.restore()
        numbers = {key: float(value) for key, value in numbers.items()}
        return Evaluated(numbers, samples, counter.minibatches)

    def _batch_size_for(self, x: Nest | tf.data.Dataset, trainer: DistributedTrainer) -> int | None:
        return None if _rows_of(x) is None else self._batch_size or trainer.feed.batch_size()


class _Counter(keras.callbacks.Callback):
    """Counts batches."""

    minibatches = 0

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.minibatches = min(batch + 1, self.params.get("steps") or batch + 1)


def _rows_of(x: Nest | tf.data.Dataset) -> int | None:
    """Return the number of rows of arrays; None for data in batches."""
    first = keras.tree.flatten(x)[0]
    return int(first.shape[0]) if getattr(first, "shape", None) else None


def count_rows(model: keras.Model) -> int:
    """Return the rows that a model's metrics have seen since they were reset, over all ranks.

    Keras weights the mean of its losses by rows, and so counts them, in float32: exact up to 2^24.
    """
    trackers = [m for m in model.metrics if isinstance(m, keras.metrics.Mean) and m.name == "loss"]
    own = any(
        getattr(type(model), name) is not getattr(keras.Model, name)
        for name in ("train_step", "test_step")
    )
    if own or not trackers:
        raise ValueError(
            f"to count the rows of this data dtk needs Keras's own mean of the loss, which model "
            f"{model.name!r} may not keep, since it has a train_step or test_step of its own; give "
            "fit arrays, also as validation data"
        )
    # Restored metric state is divided among ranks, so the sum may not be a whole number.
    return round(float(keras.ops.convert_to_numpy(trackers[0].count)))
