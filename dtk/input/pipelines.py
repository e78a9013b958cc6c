"""Pipelines that end when their data does.

While a pipeline is read, TensorFlow models it in a thread of its own, which sizes whatever says
`tf.data.AUTOTUNE`: after 10 ms, then 20, 40, and so on up to a minute. Who closes the pipeline
wakes that thread and waits for its end. But it is woken before it can read that it shall end. Where
it gets a core at once it goes back to sleep, and closing takes as long as it meant to: about as
long again as the pipeline was read. (`CancellationManager::StartCancel` calls back before it sets
what `model::Model::OptimizeLoop` reads; TensorFlow 2.21.) A process bound to one core loses nearly
every time, at the end of every epoch; one with two idle cores one time in ten. When one of many
ranks does, all wait for it.

Without the model TensorFlow reads nothing ahead that does not say so, makes the calls of a `map`
that says nothing one after the other, and takes AUTOTUNE for as many calls at a time as the process
has threads, up to 16. So dtk leaves the model out only where it could not gain anything: on one
core, and where `fit` or `evaluate` is given arrays. A script that sets `autotune.enabled` decides
for itself. So does Keras, which forbids reading ahead where a `PyDataset` has workers of its own:
they stop at the end of an epoch.
"""

from __future__ import annotations

import os

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
    """Prefetch elements of a script's own pipeline where TensorFlow cannot tune it: on one core."""
    if not isinstance(dataset, tf.data.Dataset) or dataset.options().autotune.enabled is not None:
        return dataset
    return read_ahead(dataset) if _on_one_core() else dataset


def may_not_read_ahead(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset's options forbid making elements before they are asked for."""
    return dataset.options().autotune.enabled is False


def _on_one_core() -> bool:
    return len(os.sched_getaffinity(0)) == 1


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disable the model by which TensorFlow tunes a pipeline while it is read.

    Example:
        >>> untuned(tf.data.Dataset.range(3)).options().autotune.enabled
        False
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
