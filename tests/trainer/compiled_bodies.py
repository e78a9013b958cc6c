"""Models compiled by XLA: what `test_jit` runs on every rank, and in one plain process."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dtk
from dtk.cluster.variables import FUSED_BATCH_NORM
from dtk.kernels import fused_layers, optimizer_updates
from dtk.strategies import start

from support import bodies, cases


def twice(values):
    """Batches of 16 rows that are 8 rows twice.

    Two replicas then see the same moments as one process does, so that batch normalization may be
    compared without synchronizing it, which XLA cannot compile.
    """
    eighths = values[: len(values) // 8 * 8].reshape(-1, 8, *values.shape[1:])
    return np.repeat(eighths, 2, 0).reshape(-1, *values.shape[1:])


def convolutional():
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, strides=2, use_bias=False),
            keras.layers.BatchNormalization(name="moments"),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(10, kernel_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )


def fit(strategy=None, devices=0, jit_compile=True):
    """Fit; evaluate and predict an odd number of rows."""
    x, y = bodies.digits()
    x, y, weight = twice(x[:32]), y[:64], np.linspace(0.0, 2.0, 64)
    strategy = bodies.strategy(devices) if strategy == "here" else strategy
    model = cases.compiled(
        strategy,
        convolutional,
        optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    # so that all updates are compiled
    with mock.patch.object(optimizer_updates, "_WORTH_COMPILING", 1):
        history = model.fit(
            x, y, sample_weight=weight, batch_size=16, epochs=2, shuffle=False, verbose=0
        )
    assert model.jit_compile == jit_compile
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        assert model.optimizer.update_step.compiled == jit_compile
    return cases.outcome(
        model,
        history,
        evaluated=model.evaluate(x[:11], y[:11], batch_size=16, verbose=0),
        predicted=model.predict(x[:11], batch_size=16, verbose=0),
    )


def mixed(strategy=None, devices=0):
    """16 bits, with a scale of the loss that changes."""
    x, y = cases.rows(64)

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Flatten(dtype="mixed_float16")]
        layers += [keras.layers.Dense(n, dtype="mixed_float16") for n in (12, 10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    scale = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**10, dynamic_growth_steps=3
    )
    model = cases.compiled(
        bodies.strategy(devices) if strategy == "here" else strategy,
        build,
        optimizer=scale,
        jit_compile=True,
    )
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return cases.outcome(model, history, scale=float(scale.dynamic_scale))


# What is refused.


def text_inside(devices=0):
    """A layer of strings, which XLA cannot compile."""

    def build():
        keras.utils.set_random_seed(3)
        written = keras.layers.Lambda(
            lambda x: tf.strings.to_number(tf.strings.as_string(x)), output_shape=(8, 8, 1)
        )
        layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), written, *layers])

    return _error_of(build, devices)


def adversaries(devices=0):
    """Two optimizers, of which the second step uses what the first has changed."""
    x, _ = cases.rows(16)
    keras.utils.set_random_seed(5)
    with bodies.strategy(devices).scope():
        model = cases.Adversaries()
        model.build((None, 8, 8, 1))
        model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01))
    model.jit_compile = True
    return _error(lambda: model.fit(x, batch_size=8, verbose=0))


class Derived(cases.Subclassed):
    """Logs a number that it computes from the result of a metric."""

    def train_step(self, data):
        return {"twice": 2.0 * super().train_step(data)["loss"]}


class Communicating(keras.layers.Layer):
    """A layer of a script's own that adds up over ranks."""

    def call(self, x):
        total = bodies.strategy(0).communicator.allreduce(tf.stop_gradient(x[:1]))
        return x + 0.0 * total


def derived(devices=0):
    return _error_of(Derived, devices)


def communicating():
    def build():
        layers = [Communicating(), keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    return _error_of(build, 0)


def in_parts(devices=0):
    def build():
        layer = dtk.layers.ChannelParallelDense(10, name="parts")
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), layer])

    return _error_of(build, devices)


def served():
    strategy = bodies.served()
    return _error(lambda: cases.compiled(strategy, convolutional, jit_compile=True))


def _error_of(build, devices):
    x, y = cases.rows(16)
    strategy = bodies.strategy(devices)

    def fit():
        cases.compiled(strategy, build, jit_compile=True).fit(x, y, batch_size=8, verbose=0)

    return _error(fit)


def _error(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# Keras's choice.


def chosen(strategy=None):
    """What `jit_compile="auto"` is where a GPU seems to be: by model; and what was printed."""
    strategy = bodies.strategy(2)
    x, y = cases.rows(16)
    found = {"here": cases.compiled(strategy, convolutional).jit_compile}
    devices = [*tf.config.list_physical_devices("CPU"), mock.Mock(device_type="GPU")]
    printed = io.StringIO()
    with (
        mock.patch.object(tf.config, "list_physical_devices", lambda kind=None: devices),
        contextlib.redirect_stderr(printed),
    ):
        found["plain"] = cases.compiled(None, convolutional).jit_compile
        model = cases.compiled(strategy, convolutional)
        found["under the strategy"] = model.jit_compile
        model.fit(x, y, batch_size=8, verbose=0)
        found["eagerly"] = cases.compiled(strategy, convolutional, run_eagerly=True).jit_compile
        synchronized = cases.compiled(strategy)
        found["synchronized"] = synchronized.jit_compile
        synchronized.fit(x, y, batch_size=8, verbose=0)
        unsupported = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.RandomZoom(0.1)])
        found["unsupported"] = cases.compiled(strategy, lambda: unsupported).jit_compile
        derived = cases.compiled(strategy, Derived)
        found["derived"] = derived.jit_compile
        derived.fit(x, y, batch_size=8, epochs=2, verbose=0)
        found["derived, after a step"] = derived.jit_compile
    return found, printed.getvalue().splitlines()


def fused_fit(strategy=None):
    """Fit without XLA; also whether normalization and Adam were fused."""
    with (
        mock.patch.object(fused_layers, "_fused", wraps=fused_layers._fused) as norm,
        mock.patch.object(
            optimizer_updates, "_update_adam", wraps=optimizer_updates._update_adam
        ) as adam,
    ):
        found = fit(strategy, jit_compile=False)
    return found, (norm.called, adam.called)


def other_norms_on_rank_1():
    """What a strategy says where one rank alone has fused batch normalization."""
    strategy = bodies.strategy()
    chosen = {FUSED_BATCH_NORM: "0"} if strategy.rank == 1 else {}
    with mock.patch.dict(os.environ, chosen):
        try:
            start.check_same_program(strategy.communicator)
        except dtk.errors.DtkError as error:
            return str(error)
    return "nothing"
