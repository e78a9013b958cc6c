"""What the tests of block updates run on the chief."""

from __future__ import annotations

import threading

import numpy as np
import tensorflow as tf

from dtk.strategies import minimize_blocks

from strategies.bodies import served_with
from strategies.served_bodies import task

BLOCKS, L1 = 5, 6.0


def problem(dtype="float64", columns=None):
    """Rows, targets and first weights; a sixth of the true weights is not zero.

    With `columns`, weights are a matrix and targets have so many columns.
    """
    random = np.random.default_rng(4)
    x = random.normal(size=(103, 24)) + 0.3 * random.normal(size=(103, 1))
    true = random.normal(size=(24, columns or 1)) * (random.random((24, 1)) < 1 / 6)
    y = x @ true + 0.1 * random.normal(size=(103, columns or 1))
    start = 0.1 * random.normal(size=(24, columns or 1))
    if columns is None:
        y, start = y[:, 0], start[:, 0]
    return x.astype(dtype), y.astype(dtype), start.astype(dtype)


def squares(weights, x, y):
    """Half the squared error of each row; weights are a vector or a matrix."""
    whole = tf.reshape(weights, (weights.shape[0], -1))
    error = tf.matmul(x, whole) - tf.reshape(y, (-1, whole.shape[1]))
    return tf.reduce_sum(error**2, 1) / 2


def minimize(given, dtype="float64", columns=None):
    """What `minimize_blocks` finds on the problem."""
    strategy = served_with("async")
    x, y, start = problem(dtype, columns)
    return minimize_blocks(
        strategy, squares, start, (x, y), **{"blocks": BLOCKS, "l1": L1, **given}
    )


def minimize_with_a_pause(given):
    """The same; after step 20, worker 0 stands still for three seconds."""

    def on_record(step, objective):
        if step == 20:
            process = task("worker", 0)
            process.suspend()
            threading.Timer(3.0, process.resume).start()

    # Another record is due long after the pause: TensorFlow makes and deletes functions on every
    # It goes on long before the end: TensorFlow deletes functions on every task with Python's lock
    # held, and then nobody could let this one go on.
    return minimize({"steps": 60, "record_every": 20, "on_record": on_record, **given})


def refused(name):
    """Class and message of what a mistake raised."""
    try:
        MISTAKES[name]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _with_loss(loss, **given):
    x, y, start = problem()
    strategy = served_with("sync")
    given = {"blocks": 2, "steps": 2, "rate": 0.1, **given}
    minimize_blocks(strategy, loss, start, (x, y), **given)


def _in_scope():
    with served_with("sync").scope():
        minimize({"steps": 2, "rate": 0.1})


def _in_rows():
    x, y, start = problem()
    x[50, 3] = np.nan
    minimize_blocks(served_with("sync"), squares, start, (x, y), blocks=2, steps=2, rate=0.1)


MISTAKES = {
    "a mean": lambda: _with_loss(lambda w, x, y: tf.reduce_mean(squares(w, x, y))),
    "another axis": lambda: _with_loss(lambda w, x, y: tf.reduce_sum(x, 0) * w),
    "no gradient": lambda: _with_loss(lambda w, x, y: y),
    "in the scope": _in_scope,
    "rate too high": lambda: minimize({"steps": 300, "rate": 1.0}),
    "rows not finite": _in_rows,
}
