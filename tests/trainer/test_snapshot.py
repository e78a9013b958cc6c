"""Values come back bit for bit, each replica its own; the callbacks' tests do so over ranks."""

from __future__ import annotations

import doctest

import keras
import numpy as np

from dtk.trainer.replica import step_trial


def test_nan_and_negative_zero_come_back():
    values = np.array([np.nan, -0.0, np.inf, 1e-45], "float32")
    variable = keras.Variable(values)
    kept = step_trial.Snapshot([variable, variable])
    variable.assign(np.ones(4))
    kept.restore()
    assert variable.numpy().tobytes() == values.tobytes()


def test_all_that_training_changes_is_listed():
    layers = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    model.train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
    names = {v.name for v in step_trial.changed_by_training(model)}
    assert {"kernel", "moving_mean", "seed_generator_state"} <= names
    assert {"total", "count", "iteration", "learning_rate"} <= names
    assert any(name.endswith("_momentum") for name in names)


def test_the_example_runs():
    failed, tried = doctest.testmod(step_trial)
    assert tried
    assert not failed
