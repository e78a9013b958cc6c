"""Pipelines that end when their data does.

While a pipeline is read, TensorFlow models it in a separate thread, which tunes every
`tf.data.AUTOTUNE`: after 10 ms, then 20, 40, and so on up to a minute. Closing the pipeline wakes
that thread and waits for its end. But the thread wakes before the flag that ends it is set. If it
gets a core at once, it goes back to sleep, and closing waits for this sleep: about as long again as
the pipeline was read. (`CancellationManager::StartCancel` calls back before it sets the flag that
`model::Model::OptimizeLoop` reads; TensorFlow 2.21.) On one core this happens nearly every time, at
the end of every epoch; with two idle cores, one time in ten. If it happens on one of many ranks,
all wait for that rank.

Without the model TensorFlow reads ahead only where a pipeline says so, runs the calls of a plain
`map` one after the other, and takes AUTOTUNE for as many parallel calls as the process has threads,
up to 16. So dtk disables the model only where it gains nothing: on one core, and where `fit` or
`evaluate` gets arrays. A script that sets `autotune.enabled` decides for itself. So does Keras,
which forbids reading ahead if a `PyDataset` has workers: they stop at the end of an epoch.
"""

from __future__ import annotations

import os
import time

import tensorflow as tf


def read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Prefetch elements of a dataset, unless its options forbid it.

    Example:
        >>> list(read_ahead(tf.data.Dataset.range(3)).as_numpy_iterator())
        [0, 1, 2]
    """
    if may_not_read_ahead(dataset):
        return dataset
    ahead = dataset.prefetch(tf.data.AUTOTUNE)
    return untuned(ahead) if _on_one_core() else ahead


def in_time(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Prefetch elements of a script's own pipeline on one core, where tuning gains nothing."""
    if not isinstance(dataset, tf.data.Dataset) or dataset.options().autotune.enabled is not None:
        return dataset
    return read_ahead(dataset) if _on_one_core() else dataset


def seconds_of_batch(dataset: tf.data.Dataset) -> float:
    """Return how long a batch takes to read, once a pipeline's buffers are filled."""
    begin, read = time.perf_counter(), 0
    for read, _ in enumerate(dataset.take(5)):
        begin = begin if read else time.perf_counter()
    return (time.perf_counter() - begin) / max(read, 1)


def may_not_read_ahead(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset's options forbid reading ahead."""
    return dataset.options().autotune.enabled is False


def _on_one_core() -> bool:
    return len(os.sched_getaffinity(0)) == 1


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disable the model that tunes a pipeline while it is read.

    Example:
        >>> untuned(tf.data.Dataset.range(3)).options().autotune.enabled
        False
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
