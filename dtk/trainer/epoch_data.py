"""The batches that `fit` reads, cut by rank.

dtk gives Keras's epoch iterator the cut dataset. `feed` replaces the dataset between epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.compat import keras_data, tf_datasets
from dtk.input import digests, row_maps, slicing
from dtk.input.pipelines import read_ahead, untuned
from dtk.nests import Nest, Specs
from dtk.trainer.strategy import Strategy

# A dataset that a script gives to `fit`, or that Keras reads in its place.
Dataset: TypeAlias = "tf.data.Dataset | tf_datasets.PerRankDataset"


def cut(dataset: Dataset, strategy: Strategy) -> tf.data.Dataset:
    """Cut a dataset for the replicas of this process."""
    if isinstance(dataset, tf_datasets.PerRankDataset):
        if dataset.whole is None:
            local = dataset.local
            return read_ahead(local.map(slicing.on_elements(local, _own_rows)))
        dataset = dataset.whole
    return tf_datasets.cut_through(dataset, functools.partial(_cut, strategy))


def _cut(strategy: Strategy, dataset: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
    ranks, size = strategy.local_ranks(), strategy.num_replicas_in_sync
    if strategy.world.size == 1:
        return slicing.cut_dataset(dataset, ranks, size, ahead=ahead)
    maps = strategy.extended.row_maps(dataset)
    if maps is not None:
        return row_maps.cut_dataset(maps, ranks[0], size, digests.digest_of, ahead)
    return slicing.cut_dataset(dataset, ranks, size, digests.digest_of, ahead)


def _own_rows(batch: Nest) -> slicing.Slices:
    return slicing.Slices((batch,), (slicing.count_rows(batch),), ())


def cut_batches(batches: Iterable[Nest], strategy: Strategy) -> Iterator[slicing.Slices]:
    """Cut single global batches, of tensors or arrays."""
    for batch in batches:
        yield slicing.cut(as_tensors(batch), strategy.local_ranks(), strategy.num_replicas_in_sync)


def as_tensors(batch: Nest) -> Nest:
    """Convert every leaf of a batch to a tensor."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), batch
    )


class EpochDataset:
    """Dataset for Keras's epoch iterator; it is cut once, when it is first opened."""

    def __init__(self, given: Dataset, cut: Callable[[Dataset], Dataset]):
        if not is_per_rank(given):
            slicing.check_rows(spec_of(given))
        self.given = given
        self._cut = cut

    @functools.cached_property
    def _pipeline(self) -> Dataset:
        return self._cut(self.given)

    def __iter__(self) -> Iterator[Nest]:
        return iter(self._pipeline)


def spec_of(given: Dataset) -> Specs:
    """Return the spec of a batch with any number of rows, from which Keras builds models."""
    whole = getattr(given, "whole", None)
    spec = slicing.spec_of((given if whole is None else whole).element_spec)
    return keras.tree.map_structure(lambda leaf: leaf if hasattr(leaf, "shape") else None, spec)


def tuned_for(adapter: keras_data.DataAdapter, dataset: Dataset) -> Dataset:
    """Disable tuning of a pipeline that takes rows from arrays: it has nothing to tune."""
    return untuned(dataset) if isinstance(adapter, keras_data.ArrayDataAdapter) else dataset


def is_per_rank(dataset: Dataset) -> bool:
    """Return whether every rank reads its own pipeline."""
    return isinstance(dataset, tf_datasets.PerRankDataset) and dataset.whole is None
