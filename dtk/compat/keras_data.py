"""Keras's data adapters and its epoch iterator, which give `fit` its batches.

keras.src.trainers.data_adapters     ArrayDataAdapter (._inputs, ._shuffle), TFDatasetAdapter,
            DataAdapter (its name)
TFEpochIterator   _distributed_dataset, _num_batches, _current_iterator, _steps_seen,
            _get_iterator, _enumerate_iterator, _interrupted_warning
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator as TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter

# The data adapter and the epoch iterator, which give `fit` its batches.


def arrays_of(adapter: ArrayDataAdapter) -> Any:
    """What an adapter of arrays was given: inputs, and targets and row weights if there are."""
    return adapter._inputs


def shuffles(adapter: ArrayDataAdapter) -> bool | str | None:
    """How an adapter of arrays shuffles; falsy if it does not."""
    return adapter._shuffle


def dataset_of(iterator: TFEpochIterator) -> tf.data.Dataset:
    """The dataset an epoch iterator makes an iterator of for each epoch."""
    return iterator._distributed_dataset


def set_dataset(iterator: TFEpochIterator, dataset: tf.data.Dataset) -> None:
    """Make the following epochs read another dataset."""
    iterator._distributed_dataset = dataset


def batches_in(iterator: TFEpochIterator) -> int | None:
    """Batches in an epoch iterator's data; None until an epoch has shown it."""
    return iterator._num_batches


def set_batches_in(iterator: TFEpochIterator, count: int | None) -> None:
    """Tell an epoch iterator how many batches its data has."""
    iterator._num_batches = count


def is_open(iterator: TFEpochIterator) -> bool:
    """Whether an iterator over the data is kept that the next epoch may go on with."""
    return iterator._current_iterator is not None


def steps_seen(iterator: TFEpochIterator) -> int:
    """Steps taken from the iterator over the data that is kept."""
    return iterator._steps_seen


def forget_place(iterator: TFEpochIterator) -> None:
    """Make the next epoch begin with a new iterator over the data."""
    iterator._current_iterator = None


def set_place(iterator: TFEpochIterator, current: Iterator, seen: int) -> None:
    """Make the next epoch go on with an iterator over the data from which `seen` were taken."""
    iterator._current_iterator, iterator._steps_seen = current, seen


def open_data(iterator: TFEpochIterator) -> Iterator:
    """A new iterator over the data, as an epoch makes it; a dataset shuffles anew with each."""
    return iter(iterator._get_iterator())


def on_opening(iterator: TFEpochIterator, call: Callable[[], None]) -> None:
    """Call a function whenever the data is opened anew."""
    get_iterator = iterator._get_iterator

    def observed() -> tf.data.Iterator:
        call()
        return get_iterator()

    iterator._get_iterator = observed


def steps_through(
    iterator: TFEpochIterator,
    change: Callable[[Iterator[tuple]], Iterator[tuple]],
    once: bool = False,
) -> None:
    """Put a generator between Keras and the steps of an epoch.

    Args:
        iterator: The epoch iterator.
        change: Gets Keras's steps, each (first step, last step, iterator over the data), and yields
            those that are to be done.
        once: In the next epoch only; else in all.
    """
    enumerate_steps = iterator._enumerate_iterator

    def changed() -> Iterator[tuple]:
        if once:
            iterator._enumerate_iterator = enumerate_steps
        yield from change(enumerate_steps())

    iterator._enumerate_iterator = changed


def end_quietly(iterator: TFEpochIterator) -> None:
    """Keep Keras from warning when the data ends before the steps do."""
    iterator._interrupted_warning = lambda: None
