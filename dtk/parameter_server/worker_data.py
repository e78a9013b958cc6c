"""Datasets that workers of parameter servers read themselves: no row passes the chief.

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(dataset, steps_per_epoch=100)

The chief hands out steps; the worker of a step takes the next batch of its own pipeline, which
begins anew when it ends. So workers keep no common order of rows, and a lost worker begins its
pipeline from the start. A backup worker that repeats a slice reads other rows for it: the first
gradients count, and the rows of late gradients are dropped (Chen et al. 2016).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import tensorflow as tf

from dtk.compat import tf_datasets, tf_servers
from dtk.nests import Function, Tree

T = TypeVar("T")


class WorkerDataset(tf_datasets.PerRankDataset):
    """Dataset of one pipeline per worker, made on the workers."""

    def __init__(self, make: Callable[[int], tf.data.Dataset], spec_of: tf.data.Dataset):
        super().__init__(spec_of, whole=None)
        self.make = make

    @property
    def cardinality(self) -> tf.Tensor:
        """Infinite: every pipeline begins anew when it ends."""
        return tf.constant(tf.data.INFINITE_CARDINALITY, tf.int64)

    def map(self, function: Function[Tree]) -> WorkerDataset:
        """Apply a function to every batch, on the workers."""
        local = self.local.map(function)
        return WorkerDataset(lambda worker: self.make(worker).map(function), local)

    def prefetch(self, count: int) -> WorkerDataset:
        """Keep batches ready, on the workers."""
        return WorkerDataset(lambda worker: self.make(worker).prefetch(count), self.local)

    def __iter__(self) -> Iterator[Pipelines]:
        return Pipelines(self)


class Pipelines:
    """Iterators of the workers over a `WorkerDataset`: made on first use, and again after a loss.

    As an iterator, `Pipelines` yields itself once for every step.
    """

    def __init__(self, dataset: WorkerDataset):
        self._dataset = dataset
        self._at: dict[int, tf.data.Iterator] = {}
        self._lost: list[tf.data.Iterator] = []
        self._lock = threading.Lock()
        self.element_spec = dataset.element_spec

    def __iter__(self) -> Pipelines:
        return self

    def __next__(self) -> Pipelines:
        return self

    def of(self, worker: int) -> tf.data.Iterator:
        """Return the iterator of a worker; called on the worker's thread."""
        if worker not in self._at:
            with self._lock:  # `make` may call the script's own function
                self._at[worker] = self._opened(worker)
        return self._at[worker]

    def _opened(self, worker: int) -> tf.data.Iterator:
        """Open an endless iterator over a worker's dataset."""
        elsewhere = ValueError(
            f"dataset_fn gave worker {worker} a dataset that was made on the chief, which cannot "
            "be sent there; make the whole pipeline inside dataset_fn"
        )
        try:
            made = self._dataset.make(worker)
        except tf.errors.InvalidArgumentError as error:
            if "Failed copying input tensor" not in str(error):
                raise
            raise elsewhere from None
        if made.element_spec != self.element_spec:
            raise ValueError(
                f"dataset_fn gave worker {worker} batches of {made.element_spec}, and worker 0 of "
                f"{self.element_spec}; all must be alike"
            )
        if "/job:worker" not in tf.data.experimental.to_variant(made).device:
            raise elsewhere
        return iter(made.repeat())

    def call(self, worker: int, function: Function[T], *more: Tree) -> T:
        """Call a function with the worker's iterator."""
        try:
            return function(self.of(worker), *more)
        except tf.errors.OutOfRangeError:
            raise ValueError(f"dataset_fn gave worker {worker} a dataset without a batch") from None
        except tf.errors.OpError:
            # Keep a lost worker's iterator alive: deleting it would send a message.
            if worker in self._at:
                self._lost.append(self._at.pop(worker))
            raise


def worker_dataset(
    dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset], workers: int, slices: int
) -> WorkerDataset:
    """Make the dataset that `distribute_datasets_from_function` returns on the chief."""

    def make(worker: int) -> tf.data.Dataset:
        try:
            made = dataset_fn(tf.distribute.InputContext(workers, worker, slices))
        except Exception as error:
            error.add_note(f"dtk: raised by dataset_fn, for worker {worker} of {workers}")
            raise
        if not isinstance(made, tf.data.Dataset):
            raise TypeError(
                f"dataset_fn returned a {type(made).__name__}; expected a tf.data.Dataset of "
                "batches"
            )
        return made

    with tf.device(tf_servers.CHIEF):
        example = make(0)
    flat = tf.nest.flatten(example.element_spec)
    if not flat or any(leaf.shape.rank == 0 for leaf in flat if hasattr(leaf, "shape")):
        raise ValueError(
            f"dataset_fn returned single rows ({example.element_spec}), not batches; end it with "
            ".batch(context.get_per_replica_batch_size(global_batch_size))"
        )
    if slices > 1 and any(leaf.shape[0] is None for leaf in flat if hasattr(leaf, "shape")):
        raise ValueError(
            "dataset_fn returned batches of any size, but a synchronous step needs equal ones for "
            "a mean over all rows; batch with drop_remainder=True"
        )
    return WorkerDataset(make, example)
