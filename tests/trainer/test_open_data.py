"""What `fit` and its like open is closed when they end, and never by a thread that others need."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from dtk.strategies import AllReduceStrategy

X, Y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")


class Items(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[:8], Y[:8]


def generator():
    while True:
        yield X[:8], Y[:8]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def validated(data, **options):
    return {"x": data, "validation_data": data, "epochs": 2, "verbose": 0, **options}


DATA = {
    "known length": lambda: validated(dataset()),
    "unknown length": lambda: validated(dataset().filter(lambda x, y: True)),
    "endless": lambda: validated(dataset().repeat(), steps_per_epoch=3, validation_steps=2),
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3, "epochs": 2, "verbose": 0},
    "items": lambda: validated(Items()),
    "arrays": lambda: {"x": X, "y": Y, "epochs": 2, "verbose": 0, "validation_data": (X, Y)},
}


def alive():
    """How many iterators are there, and epoch iterators of Keras."""
    found = [type(one).__mro__ for one in gc.get_objects() if hasattr(type(one), "__mro__")]
    names = [kind.__name__ for mro in found for kind in mro]
    return names.count(OwnedIterator.__name__), names.count("EpochIterator")


class Leaving(keras.callbacks.Callback):
    def __init__(self, fails):
        super().__init__()
        self._fails = fails

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self._fails:
            raise KeyError
        self.model.stop_training = batch == 1


def left_open(kind):
    """What calls leave open without the collector, by how they end."""
    strategy = AllReduceStrategy(self_test=False)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    given = DATA[kind]
    model.fit(**given())
    gc.collect()
    gc.disable()
    found, before = {}, alive()

    def note(how):
        found[how] = [now - then for now, then in zip(alive(), before, strict=True)]

    try:
        for _ in range(2):
            model.fit(**given())
        note("fit")
        model.fit(**given(), callbacks=[Leaving(fails=False)])
        note("a fit that is stopped")
        with contextlib.suppress(KeyError):
            model.fit(**given(), callbacks=[Leaving(fails=True)])
        note("a fit that fails")
        data, steps = given()["x"], {"generator": 2, "endless": 2}.get(kind)
        model.evaluate(data, None if kind != "arrays" else Y, steps=steps, verbose=0)
        note("evaluate")
        model.predict(data, steps=steps, verbose=0)
        note("predict")
    finally:
        gc.enable()
    return found


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("kind", DATA)
def test_nothing_stays_open(pool, kind):
    """Closures on Keras's iterator were cycles, and three fits left six pipelines open."""
    expected = dict.fromkeys(
        ["fit", "a fit that is stopped", "a fit that fails", "evaluate", "predict"], [0, 0]
    )
    assert pool.run(left_open, kind) == [expected] * 2


def closed_by():
    """Names of the threads that closed pipelines: one dropped, one found by the collector."""
    AllReduceStrategy()
    names = []

    def opened():
        iterator = iter(tf.data.Dataset.range(3))
        resource = iterator._iterator_resource
        seen.append(weakref.ref(resource, lambda _: names.append(threading.current_thread().name)))
        return iterator

    seen = []
    opened()
    cycle = [opened()]
    cycle.append(cycle)
    del cycle
    collecting = threading.Thread(target=gc.collect, name="collects")
    collecting.start()
    collecting.join()
    until = time.monotonic() + 20
    while len(names) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    return names


@pytest.mark.worlds(("collective", 2))
def test_a_thread_closes_pipelines(pool):
    """Closing may take a minute: the thread of MPI did it, and all ranks waited."""
    assert pool.run(closed_by) == [["dtk-close"] * 2] * 2


def closed_beside_another():
    """Whether a pipeline closes while another waits for Python of the script's."""
    AllReduceStrategy()
    closed, waiting, over = threading.Event(), threading.Event(), threading.Event()

    def batches():
        yield 1
        waiting.set()
        over.wait(60)

    spec = tf.TensorSpec((), tf.int64)
    stuck = iter(tf.data.Dataset.from_generator(batches, output_signature=spec).prefetch(2))
    next(stuck)
    waiting.wait(60)
    iterator = iter(tf.data.Dataset.range(3))
    seen = weakref.ref(iterator._iterator_resource, lambda _: closed.set())
    del stuck, iterator
    try:
        return closed.wait(20) and seen() is None
    finally:
        over.set()


@pytest.mark.worlds(("collective", 2))
def test_a_pipeline_that_cannot_close_keeps_none_open(pool):
    assert pool.run(closed_beside_another) == [True, True]
