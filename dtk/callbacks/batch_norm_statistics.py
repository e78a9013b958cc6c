"""Batch normalization's statistics from whole batches instead of moving averages."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from dtk.callbacks.strategy_callback import StrategyCallback
from dtk.compat import keras_models
from dtk.input import slicing
from dtk.nests import Logs, Tree
from dtk.patches import patch
from dtk.schedules.runs import check_count
from dtk.trainer.ranks import rank_checks
from dtk.trainer.replica.step_trial import Snapshot


class BatchNormStatistics(StrategyCallback):
    """Give batch normalization exact statistics of some training batches before validation.

    Moving averages lag behind: they still contain batches computed with older weights, which
    matters if epochs have few steps (Akiba et al. trained at batch 32,768 without moving averages).
    Besides, without `synchronized=True` each worker averages the variance within its own rows; the
    mean of these, which dtk keeps, lacks the variance between workers. This callback sums every
    layer's sum of x, sum of x^2 and count over the batches and all ranks:

        mean = sum_b n_b m_b / n         variance = sum_b n_b (v_b + m_b^2) / n - mean^2

    for the parts b of the batches that workers normalize with their own mean m_b and variance v_b,
    as in a training step. The results replace `moving_mean` and `moving_variance` before `fit`'s
    validation, or at the end of an epoch without validation, and so before `Checkpoint` saves.
    Nothing else changes. Dropout is as in training, and masked entries count in n.

    Args:
        data: Training inputs, the same on every rank: an array (or tuple or dict of arrays), whose
            first rows are used, or a dataset of batches as for `fit`, whose first batches are used.
        batches: Number of batches; 1 is the recipe of Akiba et al.
        batch_size: Global batch for arrays; None for `fit`'s.

    Raises:
        ValueError: An argument is out of range; at train begin, if the model has no
            `BatchNormalization` to train, or one with `renorm`, or steps run behind parameter
            servers.
        DisagreementError: At train begin, if ranks have different data.

    Example:
        >>> import dtk, keras, numpy as np
        >>> strategy = dtk.strategies.AllReduceStrategy(communicator="local")
        >>> norm = keras.layers.BatchNormalization()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((1,)), norm, keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x = np.arange(8.0)[:, None]
        >>> history = model.fit(x, x, batch_size=8, verbose=0, callbacks=[
        ...     dtk.callbacks.BatchNormStatistics(x)])
        >>> norm.moving_mean.numpy().tolist(), norm.moving_variance.numpy().tolist()
        ([3.5], [5.25])

    Source: Akiba, Suzuki and Fukuda, "Extremely large minibatch SGD", 2017, arXiv:1711.04325.
    """

    def __init__(
        self, data: Tree | tf.data.Dataset, batches: int = 1, batch_size: int | None = None
    ):
        super().__init__()
        check_count("batches", batches)
        check_count("batch_size", batch_size, none="fit's")
        self._data, self._batches, self._batch_size = data, batches, batch_size
        self._layers: list[keras.layers.BatchNormalization] = []
        self._done = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the layers."""
        if self.has_servers:
            raise ValueError(
                f"{type(self).__name__} sums over all ranks, and workers behind parameter servers "
                "do not speak with each other; leave it out"
            )
        rank_checks.check_same_call(self.strategy, {"data for batch norm statistics": self._data})
        self._layers = [layer for layer in keras_models.layers_of(self.model) if _is_trained(layer)]
        if not self._layers:
            raise ValueError(
                f"{type(self).__name__}: model {self.model.name!r} has no BatchNormalization that "
                "is trained; leave the callback out"
            )
        self._run = self.trainer.make_step_function(self._sums, "batch_norm_statistics")

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note that training changes the moving averages again."""
        self._done = False

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Replace the moving averages before `fit`'s validation."""
        self._replace()
        self._done = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the moving averages in an epoch without validation."""
        if not self._done:
            self._replace()

    def _replace(self) -> None:
        kept = Snapshot(self.model.non_trainable_variables)
        try:
            with contextlib.ExitStack() as stack:
                for layer in self._layers:
                    # Steps that are traced here set moving averages to a batch's statistics.
                    stack.enter_context(patch(layer, momentum=0.0))
                columns = [
                    tf.nest.flatten(self._run(iter([batch]))) for batch in self._global_batches()
                ]
        finally:
            kept.restore()
        for layer, *parts in zip(self._layers, *columns, strict=True):
            count, total, squares = sum(part.numpy() for part in parts)
            mean = total / count
            layer.moving_mean.assign(mean)
            layer.moving_variance.assign(np.maximum(squares / count - mean**2, 0.0))

    def _global_batches(self) -> tf.data.Dataset:
        if isinstance(self._data, tf.data.Dataset):
            return self._data.take(self._batches)
        size = self.batch_size_or_fits(self._batch_size)
        rows = tf.data.Dataset.from_tensor_slices((self._data,))
        return rows.batch(size).take(self._batches)

    def _sums(self, data: Tree) -> tuple[tf.Tensor, ...]:
        """Compute each layer's n, sum x and sum x^2 over the world, in float64, in a replica."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.model(x, training=True)
        rows = tf.cast(slicing.count_rows(x), tf.float64)
        sums = []
        for layer in self._layers:
            mean = tf.cast(layer.moving_mean.value, tf.float64)
            square = tf.cast(layer.moving_variance.value, tf.float64) + mean**2
            sums.append(rows * tf.stack([tf.ones_like(mean), mean, square]))
        replica = tf.distribute.get_replica_context()
        return tuple(replica.all_reduce(tf.distribute.ReduceOp.SUM, sums))


def _is_trained(layer: keras.Layer) -> bool:
    if not isinstance(layer, keras.layers.BatchNormalization) or not layer.trainable:
        return False
    if getattr(layer, "renorm", False):  # new in Keras 3.14
        raise ValueError(
            f"BatchNormStatistics: layer {layer.name!r} has renorm=True, and so needs its moving "
            "averages in training; leave one of the two out"
        )
    return True
