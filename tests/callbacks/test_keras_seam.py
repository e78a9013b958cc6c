"""Keras's private names that the callbacks rest on, each named by the test that fails."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest

from dtk.compat import keras_data
from dtk.trainer.gradients import shared_optimizer


def array_adapter():
    return keras_data.ArrayDataAdapter(np.zeros((5, 2)), np.zeros(5), batch_size=2, shuffle=True)


@pytest.mark.parametrize("name", ["_inputs", "_shuffle", "partial_batch_size", "num_batches"])
def test_array_adapter(name):
    assert hasattr(array_adapter(), name), f"Keras's ArrayDataAdapter has lost {name}"


@pytest.mark.parametrize(
    "name",
    ["_enumerate_iterator", "_get_iterator", "_interrupted_warning", "reset", "num_batches"],
)
def test_epoch_iterator_methods(name):
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    assert hasattr(TFEpochIterator, name), f"Keras's TFEpochIterator has lost {name}"


@pytest.mark.parametrize(
    "name", ["_num_batches", "_current_iterator", "_steps_seen", "data_adapter", "steps_per_epoch"]
)
def test_epoch_iterator_attributes(name):
    from keras.src.trainers.epoch_iterator import EpochIterator

    source = inspect.getsource(EpochIterator.__init__)
    assert f"self.{name} = " in source, f"Keras's EpochIterator has lost {name}"


def test_epoch_iterator_yields_step_end_and_iterator():
    from keras.src.trainers.epoch_iterator import EpochIterator

    source = inspect.getsource(EpochIterator.__iter__)
    assert "self._enumerate_iterator()" in source, "Keras no longer enumerates where dtk resumes"


def test_optimizer_learning_rate():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert shared_optimizer.schedule_of(keras.optimizers.SGD(decay)) is decay
    assert shared_optimizer.schedule_of(keras.optimizers.SGD(0.1)) is None
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(decay))
    assert shared_optimizer.schedule_of(wrapped) is decay


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.RMSprop])
def test_momentum_buffers_are_found(kind):
    from dtk.callbacks.hyperparameters.rate import momentum_buffers

    optimizer = kind(0.1, momentum=0.9)
    optimizer.build([keras.Variable(np.zeros(3)), keras.Variable(np.zeros(2))])
    assert [tuple(b.shape) for b in momentum_buffers(optimizer)] == [(3,), (2,)]
    adam = keras.optimizers.Adam(0.1)
    adam.build([keras.Variable(np.zeros(3))])
    assert momentum_buffers(adam) == []


def test_swapping_averages_remembers_which_weights_are_in_the_model():
    found = vars(keras.callbacks.SwapEMAWeights())
    assert found.get("_ema_weights_in_model") is False, "SwapEMAWeights has lost its flag"
