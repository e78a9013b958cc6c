"""Keras's data adapters and its epoch iterator, which give `fit` its batches.

while a pipeline is made   ArrayDataAdapter._epoch          pipeline_of
                           functions that shuffle           shuffled_from
of one epoch iterator      _get_iterator                    on_opening
                           _enumerate_iterator              patch_steps, at_end_of_data
                           catch_stop_iteration             after_loop
                           _interrupted_warning             end_quietly
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator as TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter as TFDatasetAdapter
from keras.utils import PyDataset

from dtk.compat import names
from dtk.nests import Nest
from dtk.patches import patch

DataAdapter: TypeAlias = ArrayDataAdapter | TFDatasetAdapter

# The steps of an epoch: numbers of an execution's first and last step, and the iterator over the
# data that it reads.
Steps: TypeAlias = Iterator[tuple[int, int, Iterator[Nest]]]


def arrays_of(adapter: ArrayDataAdapter) -> tuple[Nest, ...]:
    """Return the data of an adapter of arrays: inputs, targets and row weights."""
    return adapter._inputs


def shuffles(adapter: ArrayDataAdapter) -> bool | str | None:
    """Return how an adapter of arrays shuffles; falsy if it does not."""
    return adapter._shuffle


def pipeline_of(adapter: DataAdapter) -> tf.data.Dataset:
    """Make the pipeline of an adapter, in the order it has when `fit` begins.

    Keras 3.16 makes the pipeline once and shuffles it by the number of the present epoch.
    """
    if not isinstance(getattr(adapter, "_epoch", None), int):
        return adapter.get_tf_dataset()
    with patch(adapter, _epoch=0):
        return adapter.get_tf_dataset()


def shuffled_from(adapter: ArrayDataAdapter, seed: tf.Variable) -> tf.data.Dataset:
    """Make the pipeline of an adapter of arrays, in an order drawn from the seed in a variable.

    Keras draws the order from TensorFlow's global seed at the time the pipeline is made.
    """

    draw, asked = tf.random.experimental.stateless_shuffle, []

    def shuffle(rows: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        asked.append(rows)
        # Keras shuffles the row numbers of each batch; the first number differs by batch.
        return draw(rows, tf.stack([seed, rows[0]]))

    with (
        patch(tf.random, shuffle=shuffle),  # up to Keras 3.15
        patch(tf.random.experimental, stateless_shuffle=shuffle),
    ):
        dataset = adapter.get_tf_dataset()
    if not asked:
        raise names.gone("keras.Model.fit's call of a shuffle of tf.random", "the order of rows")
    return dataset


class _TimedItems:
    """A `PyDataset` that measures how long its items take."""

    def __init__(self, source: PyDataset, count: int, tell: Callable[[float], None]):
        self._source, self._left, self._count, self._tell = source, count, count, tell
        self._seconds = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    def __getitem__(self, index: int) -> Nest:
        begin = time.perf_counter()
        item = self._source[index]
        self._seconds += time.perf_counter() - begin
        self._left -= 1
        if self._left == 0:
            self._tell(self._seconds / self._count)
        return item


def on_items(adapter: PyDatasetAdapter, count: int, tell: Callable[[float], None]) -> None:
    """Call a function with the mean seconds of the first items that a `PyDataset` makes."""
    adapter.py_dataset = _TimedItems(adapter.py_dataset, count, tell)


def dataset_of(iterator: TFEpochIterator) -> tf.data.Dataset:
    """Return the dataset that an epoch iterator opens in each epoch."""
    return iterator._distributed_dataset


def set_dataset(iterator: TFEpochIterator, dataset: tf.data.Dataset) -> None:
    """Make the following epochs read another dataset."""
    iterator._distributed_dataset = dataset


def batches_in(iterator: TFEpochIterator) -> int | None:
    """Return the number of batches in an epoch iterator's data."""
    return iterator._num_batches


def set_batches_in(iterator: TFEpochIterator, count: int | None) -> None:
    """Set the number of batches in an epoch iterator's data."""
    iterator._num_batches = count


def is_open(iterator: TFEpochIterator) -> bool:
    """Return whether the next epoch may continue an open iterator over the data."""
    return iterator._current_iterator is not None


def steps_seen(iterator: TFEpochIterator) -> int:
    """Return the number of steps taken from the open iterator over the data."""
    return iterator._steps_seen


def forget_place(iterator: TFEpochIterator) -> None:
    """Make the next epoch begin with a new iterator over the data."""
    iterator._current_iterator = None


def set_place(iterator: TFEpochIterator, current: Iterator[Nest], seen: int) -> None:
    """Make the next epoch continue a given iterator over the data."""
    iterator._current_iterator, iterator._steps_seen = current, seen


def open_data(iterator: TFEpochIterator) -> Iterator[Nest]:
    """Open the data as an epoch does; a dataset shuffles anew each time."""
    return iter(iterator._get_iterator())


def on_opening(iterator: TFEpochIterator, call: Callable[[], None]) -> None:
    """Call a function whenever the data is opened anew."""
    get_iterator = iterator._get_iterator

    def observed() -> tf.data.Iterator:
        call()
        return get_iterator()

    iterator._get_iterator = observed


def patch_steps(
    iterator: TFEpochIterator,
    change: Callable[[Steps], Steps],
    once: bool = False,
) -> None:
    """Put a generator between Keras and the steps of an epoch."""
    enumerate_steps = iterator._enumerate_iterator

    def changed() -> Steps:
        if once:
            iterator._enumerate_iterator = enumerate_steps
        yield from change(enumerate_steps())

    iterator._enumerate_iterator = changed


def at_end_of_data(iterator: TFEpochIterator, call: Callable[[], None]) -> None:
    """Call a function whenever an epoch of a Keras epoch iterator has run all its steps.

    An epoch that ends early does not call it: its generator ends at garbage collection, at any time
    and on any thread. `fit` passes the same iterator of validation data in every epoch, so it is
    changed only once.
    """
    if getattr(iterator, "_dtk_tells_its_end", False):
        return
    iterator._dtk_tells_its_end = True

    def until_end(steps: Steps) -> Steps:
        yield from steps
        call()

    patch_steps(iterator, until_end)


def after_loop(iterator: TFEpochIterator, call: Callable[[], None]) -> None:
    """Call a function after each loop over an epoch iterator, of any length.

    A loop that an exception ends does not call it. The iterator is changed once, as in
    `at_end_of_data`.
    """
    if getattr(iterator, "_dtk_tells_its_loops", False):
        return
    iterator._dtk_tells_its_loops = True
    catch = iterator.catch_stop_iteration

    @contextlib.contextmanager
    def through() -> Iterator[None]:
        with catch():
            yield
        call()

    iterator.catch_stop_iteration = through


def end_quietly(iterator: TFEpochIterator) -> None:
    """Keep Keras from warning when the data ends before the steps do."""
    iterator._interrupted_warning = lambda: None
