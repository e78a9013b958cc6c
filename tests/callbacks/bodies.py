"""What the tests of callbacks run, on every rank at once."""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import os
import signal
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtk.strategies import AllReduceStrategy, MirroredStrategy
from dtk.trainer.distributed_model import trainer_of

ROWS, BATCH, EPOCHS = 37, 8, 4  # five steps an epoch, the last of 5 rows
MANY = 96  # rows of `train`


def strategy(kind="world"):
    """The strategy of this process: over its world, or mirrored over two devices."""
    return _strategy(kind)


@functools.cache
def _strategy(kind):
    if kind == "mirrored":
        return MirroredStrategy(devices=2)
    return AllReduceStrategy(os.environ["DTK_TEST_COMMUNICATOR"])


def make_devices():
    strategy("mirrored")


def data(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype("float32")
    y = (x[:, :1] - 0.5 * x[:, 1:2]).astype("float32")
    return x, y


def compiled(optimizer, kind="world", dropout=0.0, width=4, lora=0, **options):
    with strategy(kind).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width, activation="tanh"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(1),
            ]
        )
        if lora:
            model.layers[0].enable_lora(lora)
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return model


def fitted(model, *callbacks, rows=ROWS, **more):
    """Fit a model to the rows of `data`, without a word."""
    x, y = data(rows)
    how = {"batch_size": BATCH, "verbose": 0, **more}
    return model.fit(x, y, callbacks=list(callbacks), **how)


def everything(model):
    """Weights and optimizer state, one vector."""
    variables = [*model.weights, *model.optimizer.variables]
    values = [keras.ops.convert_to_tensor(v).numpy() for v in variables]
    return np.concatenate([np.ravel(v).astype("float64") for v in values])


def difference(one, other):
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


class Crash(Exception):
    """What ends a run in its middle."""


def crash_at(epoch, step):
    class Crasher(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if (self.epoch, batch) == (epoch, step):
                raise Crash

    return Crasher()


class Preempted(keras.callbacks.Callback):
    """Sends SIGTERM to the last rank after a step of an epoch, of training or of validation."""

    def __init__(self, epoch, batch, validation=False):
        super().__init__()
        self.at, self.validation = (epoch, batch), validation

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if not self.validation:
            self._send(batch)

    def on_test_batch_end(self, batch, logs=None):
        if self.validation and self.epoch == self.at[0]:
            time.sleep(0.25)
            self._send(batch)

    def _send(self, batch):
        last = strategy().rank == strategy().communicator.size - 1
        if last and (self.epoch, batch) == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def exit_code(function, *args, **kwargs):
    """The code that a body exits with; None if it returns."""
    try:
        function(*args, **kwargs)
    except SystemExit as ending:
        return ending.code
    return None


def recorder(into):
    """Notes (epoch, step, steps the progress bar was told) of every step."""

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            into.append((self.epoch, batch, self.params["steps"]))

    return Recorder()


# Resuming: for every case the pieces of one training.


def fit(callbacks, form="arrays", epochs=2, kind="world", optimizer="adam", **options):
    """Train on 37 rows; returns the model and the steps taken."""
    keras.utils.set_random_seed(3)
    model = compiled(optimizer, kind, dropout=0.3, **options)
    x, y = data()
    given = {"x": x, "y": y, "batch_size": BATCH}
    if form in ("dataset", "stream"):
        given = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}
    if form == "stream":
        given = {"x": given["x"].repeat(), "steps_per_epoch": 4}
    seen = []
    with contextlib.suppress(Crash):
        model.fit(
            **given,
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks, recorder(seen)],
            # Resets the metrics that count rows.
            validation_data=(x[:9], y[:9]) if form == "dataset" else None,
        )
    return model, [step[:2] for step in seen]


# Sizes and rates by epoch.


def epoch_recorder(steps, rates):
    """Notes for every epoch how many steps it had, and the rate of its first step."""

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.inside = False

        def on_train_batch_begin(self, batch, logs=None):
            if not self.inside:
                self.inside = True
                rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
                steps.append(0)

        def on_train_batch_end(self, batch, logs=None):
            # Not optimizer.iterations: Keras counts the attempt to read beyond the end.
            steps[-1] += 1

    return Recorder()


def train(callbacks, optimizer, epochs=4, form="arrays", kind="world", **options):
    """Returns steps of each epoch, their rates, weights and history."""
    keras.utils.set_random_seed(3)
    model = compiled(optimizer, kind, **options)
    x, y = data(MANY)
    given = {"x": x, "y": y, "batch_size": BATCH}
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if form == "dataset":
        given = {"x": rows.batch(BATCH)}
    if form == "shuffled":
        given = {"x": rows.shuffle(MANY).batch(BATCH)}
    steps, rates = [], []
    model.fit(
        **given,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks, epoch_recorder(steps, rates)],
    )
    return steps, rates, everything(model), model.history.history


def fails(function, *args, **kwargs):
    """The type and text of what a body raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def untried(model):
    """No self-test of this one, whose layer would remember the rows of that."""
    trainer_of(model).checks_of("train").kinds = {}


def examples(module):
    """Run the examples in a module's docstrings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = doctest.testmod(importlib.import_module(module))
    return outcome.failed, outcome.attempted
