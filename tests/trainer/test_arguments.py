"""Numbers that no call can train with are refused on every rank, before anything is read."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.strategies import MirroredStrategy

from support import bodies

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


def model_and_rows(rows):
    strategy = bodies.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return strategy, model, np.ones((rows, 2), "float32"), np.ones((rows, 1), "float32")


def said(call, *data, **given):
    """What a call refuses."""
    try:
        call(*data, verbose=0, **given)
    except ValueError as error:
        return str(error)
    return "taken"


def refusals():
    """What is said of numbers, of tensors, and of what is no callback."""
    strategy, model, x, y = model_and_rows(8)
    numbers = [
        said(getattr(model, name), *((x,) if name == "predict" else (x, y)), **given)
        for name, given, _ in WRONG
    ]
    two = tf.constant(2)
    counts = {"batch_size": np.int64(4), "epochs": np.int32(2), "steps_per_epoch": two}
    taken = model.fit(x, y, **counts, verbose=0)
    assert {type(taken.params[name]) for name in ("epochs", "steps")} == {int}  # JSON takes these
    wrong = (tf.constant(0.5), tf.constant(False), tf.constant([2]), tf.constant(0))
    tensors = [said(model.fit, x, y, steps_per_epoch=one) for one in wrong]
    callbacks = [
        said(call, x, y, callbacks=given)
        for given in ([7], [keras.callbacks.EarlyStopping], "log", [[None], lambda: 0])
        for call in (model.fit, model.evaluate)
    ]
    model.evaluate(x, y, verbose=0, callbacks=keras.callbacks.Callback())
    return numbers, (taken.epoch, tensors), callbacks


@pytest.mark.worlds(("collective", 2))
def test_what_no_call_can_train_with_is_refused(pool):
    """Ranks failed with "type object 'type' has no attribute 'on_train_batch_begin'", and later."""
    expected = "in callbacks; expected instances of keras.callbacks.Callback"
    for rank, (numbers, (epochs, tensors), callbacks) in enumerate(pool.run(refusals)):
        here = f"rank {rank}: "
        for told, (name, given, wanted) in zip(numbers, WRONG, strict=True):
            ((argument, value),) = given.items()
            assert told.startswith(f"{here}{name} got {argument}={value!r}; {wanted}")
        assert epochs == [0, 1], "tensors that are whole numbers are taken, as by Keras"
        for told in tensors:
            assert told.startswith(f"{here}fit got steps_per_epoch=<tf.Tensor") and STEPS in told
        assert callbacks[:2] == [f"{here}{name} got 7 {expected}" for name in ("fit", "evaluate")]
        assert callbacks[2].endswith(f"EarlyStopping'> {expected}; write EarlyStopping(...)")
        assert callbacks[4] == f"{here}fit got 'log' {expected}"
        assert len(callbacks) == 8 and "got None in" in callbacks[6]


def idle():
    strategy, model, x, y = model_and_rows(3)
    strategy.told.clear()  # by a test before, in this process
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        for _ in range(2):
            model.fit(x, y, batch_size=1, verbose=0)
    return told.getvalue().count("batch_size=1 leaves 1 of 2 workers without rows in every step")


@pytest.mark.worlds(("collective", 2))
def test_a_rank_without_rows_is_told_of_once(pool):
    assert pool.run(idle) == [1, 0]


def test_a_device_is_named_once():
    for names in (["CPU:0", "CPU:0"], ["/cpu:0", "/device:CPU:0"]):
        with pytest.raises(ValueError, match="names a device twice; name each once"):
            MirroredStrategy(names)
