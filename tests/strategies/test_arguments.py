"""Numbers that no call can train with are refused on every rank, before anything is read."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.strategies import MirroredStrategy

from strategies import bodies

ROWS = "expected rows of all ranks, 1 or more"
STEPS = "expected a number of steps, 1 or more"
EPOCHS = "expected a number of epochs, 0 or more"
WRONG = [
    *(("fit", {"batch_size": value}, ROWS) for value in (0, -1, 1.5, "a", True)),
    ("fit", {"validation_batch_size": 0}, ROWS),
    ("evaluate", {"batch_size": 0}, ROWS),
    ("predict", {"batch_size": "a"}, ROWS),
    *(("fit", {"epochs": value}, EPOCHS) for value in (-1, "a", 1.5, None)),
    ("fit", {"initial_epoch": -3}, EPOCHS),
    *(("fit", {"steps_per_epoch": value}, STEPS) for value in (0, -1, "a")),
    ("fit", {"validation_steps": 0}, STEPS),
    ("evaluate", {"steps": -1}, STEPS),
    *(
        ("fit", {"validation_split": value}, "expected a part of the rows")
        for value in (1.0, -0.1, float("nan"), "a")
    ),
]


def model_of(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def refusals():
    model = model_of(bodies.strategy())
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    told = []
    for name, given, _ in WRONG:
        data = (x,) if name == "predict" else (x, y)
        try:
            getattr(model, name)(*data, verbose=0, **given)
        except ValueError as error:
            told.append(str(error))
        else:
            told.append("taken")
    return told


@pytest.mark.worlds(("collective", 2))
def test_what_no_call_can_train_with_is_refused(pool):
    for rank, told in enumerate(pool.run(refusals)):
        for said, (name, given, expected) in zip(told, WRONG, strict=True):
            ((argument, value),) = given.items()
            assert said.startswith(f"rank {rank}: {name} got {argument}={value!r}; {expected}")


def told_of_tensors():
    """What is said of whole numbers that are no Python numbers, and of tensors that are not."""
    model = model_of(bodies.strategy())
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    two, half, false = tf.constant(2), tf.constant(0.5), tf.constant(False)
    history = model.fit(x, y, steps_per_epoch=two, batch_size=np.int64(4), epochs=2, verbose=0)
    told = [len(history.epoch)]
    for wrong in (half, false, tf.constant([2]), tf.constant(0)):
        try:
            model.fit(x, y, steps_per_epoch=wrong, verbose=0)
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.worlds(("collective", 2))
def test_tensors_that_are_whole_numbers_are_taken(pool):
    """As Keras takes them."""
    for rank, (epochs, *told) in enumerate(pool.run(told_of_tensors)):
        assert epochs == 2 and len(told) == 4
        for said in told:
            assert said.startswith(f"rank {rank}: fit got steps_per_epoch=<tf.Tensor")
            assert STEPS in said


def no_callbacks():
    model = model_of(bodies.strategy())
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    told = []
    for given in ([7], [keras.callbacks.EarlyStopping], "log", [[None], lambda: 0]):
        for call in (model.fit, model.evaluate):
            try:
                call(x, y, verbose=0, callbacks=given)
            except ValueError as error:
                told.append(str(error))
    model.evaluate(x, y, verbose=0, callbacks=keras.callbacks.Callback())
    return told


@pytest.mark.worlds(("collective", 2))
def test_callbacks_that_are_none_are_refused(pool):
    """Ranks failed with "type object 'type' has no attribute 'on_train_batch_begin'"."""
    expected = "in callbacks; expected instances of keras.callbacks.Callback"
    for rank, told in enumerate(pool.run(no_callbacks)):
        assert told[0] == f"rank {rank}: fit got 7 {expected}"
        assert told[1] == f"rank {rank}: evaluate got 7 {expected}"
        assert told[2].endswith(f"EarlyStopping'> {expected}; write EarlyStopping(...)")
        assert told[4] == f"rank {rank}: fit got 'log' {expected}"
        assert len(told) == 8 and "got None in" in told[6]


def idle():
    strategy = bodies.strategy()
    strategy.told_of_idle = False  # by a test before, in this process
    model = model_of(strategy)
    x, y = np.ones((3, 2), "float32"), np.ones((3, 1), "float32")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for _ in range(2):
            model.fit(x, y, batch_size=1, verbose=0)
    return said.getvalue().count("batch_size=1 leaves 1 of 2 workers without rows in every step")


@pytest.mark.worlds(("collective", 2))
def test_a_rank_without_rows_is_told_of_once(pool):
    assert pool.run(idle) == [1, 0]


def test_a_device_is_named_once():
    for names in (["CPU:0", "CPU:0"], ["/cpu:0", "/device:CPU:0"]):
        with pytest.raises(ValueError, match="names a device twice; name each once"):
            MirroredStrategy(names)
