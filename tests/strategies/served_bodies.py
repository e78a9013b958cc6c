"""What the tests of parameter servers run on the chief."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

import keras
import numpy as np
import psutil
import tensorflow as tf

from strategies.bodies import digits, flat, served_with


def task(role, index):
    """The process of a task of this job."""
    mine = os.environ["TF_CONFIG"]
    cluster = json.loads(mine)["cluster"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            here = config.get("task") == {"type": role, "index": index}
            if here and config.get("cluster") == cluster and process.status() != "zombie":
                return process
    raise LookupError(f"no process for {role} {index}")


@contextlib.contextmanager
def slowed(process, share):
    """Let a process run only this share of the time, by stopping and continuing it."""
    over = threading.Event()

    def stutter():
        while not over.is_set():
            process.suspend()
            over.wait(0.2 * (1 - share))
            process.resume()
            time.sleep(0.2 * share)

    thread = threading.Thread(target=stutter, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        process.resume()


def line(rate=0.01, inputs=3):
    """A model whose gradient is the same whatever its weights: mean(x) for y = w x."""
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(rate), loss=lambda y, prediction: prediction)
    return model


def every_gradient_once(consistency, steps=100):
    """Weights after `steps` constant gradients, the optimizer's count, and what was observed."""
    strategy = served_with(consistency)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = line()
        model.layers[0].kernel.assign(tf.zeros((3, 1)))
    x = np.tile(np.float32([1, 2, 3]), (8 * steps, 1))
    history = model.fit(x, x[:, :1], batch_size=8, epochs=1, verbose=0).history
    iterations = int(model.optimizer.iterations.numpy())
    return flat(model.get_weights()), iterations, history


def left_and_fitted_again(consistency):
    """A callback leaves `fit` in the middle; the next `fit` has nothing of it. Steps of both."""
    strategy = served_with(consistency)
    x = np.tile(np.float32([1, 2, 3]), (80, 1))

    class Leave(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise KeyError("enough")

    with strategy.scope():
        model = line()
    with contextlib.suppress(KeyError):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Leave()])
    first = int(model.optimizer.iterations.numpy())
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return first, int(model.optimizer.iterations.numpy()) - first


def staleness(consistency, slow):
    """Statistics of 60 steps, one worker slowed down to a fifth."""
    strategy = served_with(consistency)
    x, y = digits()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    model.fit(x[:64], y[:64], batch_size=16, verbose=0)
    seen = {}
    before = [worker["steps"] for worker in strategy.traffic]

    class Slow(keras.callbacks.Callback):
        """From the second step on: functions are made before, on every task, slow ones too."""

        stack = contextlib.ExitStack()

        def on_train_batch_begin(self, batch, logs=None):
            seen["schedule"] = strategy.schedule_of(model)
            if batch == 1 and slow:
                self.stack.enter_context(slowed(task("worker", 0), 0.2))

    with Slow.stack:
        history = model.fit(x[:960], y[:960], batch_size=16, verbose=0, callbacks=[Slow()]).history
    statistics = seen["schedule"].statistics
    return {
        "max": statistics.max,
        "lag": statistics.lag,
        "steps": statistics.steps,
        "by worker": [w["steps"] - old for w, old in zip(strategy.traffic, before, strict=True)],
        "history": history,
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def accuracy(consistency):
    """On the digits' last 360 images after 8 epochs on the others."""
    keras.utils.set_random_seed(7)
    x, y = digits()
    with served_with(consistency).scope() if consistency else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.005),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    model.fit(x[:-360], y[:-360], batch_size=32, epochs=12, verbose=0)
    return model.evaluate(x[-360:], y[-360:], verbose=0)[1]


def tables(consistency, parts):
    """Two steps of a partitioned embedding, with one and without a strategy: weights, traffic."""
    keras.utils.set_random_seed(5)
    strategy = served_with(consistency) if consistency else None
    tokens = np.random.default_rng(0).integers(0, 1001, (48, 6))
    labels = (tokens.sum(1) % 4).astype("int64")
    if strategy is not None:
        strategy.extended._variable_partitioner = Partitioner(parts)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential(
                [
                    keras.Input((6,), dtype="int32"),
                    keras.layers.Embedding(1001, 8),
                    keras.layers.Flatten(),
                    keras.layers.Dense(4),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        before = strategy.traffic if strategy else []
        history = model.fit(tokens, labels, batch_size=16, epochs=3, verbose=0).history
        moved = [
            {name: after[name] - old[name] for name in after}
            for after, old in zip(strategy.traffic if strategy else [], before, strict=True)
        ]
        devices = sorted(
            {shard.device for shard in getattr(model.layers[0]._embeddings._value, "variables", [])}
        )
        predicted = model.predict(tokens, verbose=0)
        return flat(model.get_weights()), history, moved, devices, predicted
    finally:
        if strategy is not None:
            strategy.extended._variable_partitioner = None


class Partitioner:
    """Cuts what has at least a thousand rows."""

    def __init__(self, parts):
        self.parts = parts

    def __call__(self, shape, dtype, axis=0):
        cut = self.parts if shape[0] >= 1000 else 1
        return [cut] + [1] * (len(shape) - 1)


def placement():
    """Bytes on each server after a model was made, and of its largest variable."""
    strategy = served_with("async")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((100,)), *(keras.layers.Dense(n) for n in (300, 100, 300, 10))]
        )
    return strategy.placement, max(4 * int(np.prod(v.shape)) for v in model.trainable_variables)


def refused(name):
    """Class and message of what a mistake raised."""
    try:
        MISTAKES[name]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _fit(consistency, layers, loss=None, **compiled):
    x, y = digits()
    with served_with(consistency).scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, **compiled)
    model.fit(x[:32], y[:32], batch_size=16, verbose=0)


def _no_gradient():
    class Idle(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            return {"loss": tf.reduce_mean(self(x))}

    with served_with("async").scope():
        model = Idle()
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)


MISTAKES = {
    "synchronized normalisation": lambda: _fit(
        "sync", [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(10)]
    ),
    "eager steps": lambda: _fit("async", [keras.layers.Dense(10)], run_eagerly=True),
    "no gradient": _no_gradient,
    "too many backups": lambda: _fit_with_backups(2),
}


def _fit_with_backups(count):
    from dtk.strategies import Sync

    _fit(Sync(count), [keras.layers.Dense(10)])
