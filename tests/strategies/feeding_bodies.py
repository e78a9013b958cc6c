"""Bodies of test_feeding.py: what a rank does to read its data."""

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import dtk
from dtk.strategies import AllReduceStrategy, adopt, slicing


def fit():
    """How often Keras's adapters built pipelines, and the files of the code that cut batches."""
    built, files = [], set()
    build, count_rows = adopt.ArrayDataAdapter.get_tf_dataset, slicing.count_rows

    def counted_build(adapter):
        built.append(adapter)
        return build(adapter)

    def seen_count_rows(batch):
        files.add(sys._getframe(1).f_code.co_filename)
        return count_rows(batch)

    keras.utils.set_random_seed(1)  # without, every epoch has an order, and a pipeline, of its own
    x, y = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    strategy = AllReduceStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    adopt.ArrayDataAdapter.get_tf_dataset, slicing.count_rows = counted_build, seen_count_rows
    try:
        model.fit(x, y, verbose=0, epochs=2)
        return len(built), sorted(files)
    finally:
        adopt.ArrayDataAdapter.get_tf_dataset, slicing.count_rows = build, count_rows


def tuned():
    """For each pipeline that was opened, by who opened it, whether TensorFlow tunes it."""
    opened, now = {}, []
    open_own = tf.data.Dataset.__iter__

    def noted_open(dataset):
        opened.setdefault(now[-1], []).append(dataset.options().autotune.enabled)
        return open_own(dataset)

    rows = np.zeros((8, 2), "float32"), np.zeros((8, 1), "float32")
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    wanted = tf.data.Options()
    wanted.autotune.enabled = True
    strategy = AllReduceStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")

    def loop():
        return list(strategy.experimental_distribute_dataset(dataset.batch(4)))

    given = {
        "predict": lambda: model.predict(rows[0], verbose=0),
        "dataset": lambda: model.evaluate(dataset.batch(4), verbose=0),
        "shard": lambda: model.fit(dtk.data.shard(dataset, strategy, 4), verbose=0),
        "loop": loop,
        "asked for": lambda: model.fit(dataset.batch(4).with_options(wanted), verbose=0),
    }
    actions = {
        "fit": lambda: model.fit(*rows, validation_data=rows, epochs=2, verbose=0),
        **given,
        **{f"{name}, on one core": act for name, act in given.items()},
    }
    cores = os.sched_getaffinity(0)
    tf.data.Dataset.__iter__ = noted_open
    try:
        for name, act in actions.items():
            now.append(name)
            os.sched_setaffinity(0, {min(cores)} if "one core" in name else cores)
            act()
        return len(cores), opened
    finally:
        tf.data.Dataset.__iter__ = open_own
        os.sched_setaffinity(0, cores)


def late():
    """For each batch of a loop on one core, how many steps before its own it was made."""
    asked, made = [], []

    def make(number):
        made.append(len(asked))
        return number

    dataset = tf.data.Dataset.range(8).map(
        lambda number: tf.ensure_shape(tf.numpy_function(make, [number], tf.int64), [])
    )
    strategy = AllReduceStrategy()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        for _ in strategy.experimental_distribute_dataset(dataset.batch(2)):
            asked.append(time.sleep(0.2))
    finally:
        os.sched_setaffinity(0, cores)
    return [step - made[2 * step] for step in range(4)]
