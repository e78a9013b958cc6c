"""Per-rank datasets that Keras treats as distributed.

for good   OwnedIterator._create_iterator   patch_iterators
           OwnedIterator._next_internal
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import IteratorSpec, OwnedIterator
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.distribute.values import PerReplicaSpec

from dtk.communicators import sequencer
from dtk.input import slicing
from dtk.nests import Function, Specs, Tree
from dtk.patches import patch_for_good
from dtk.pipelines import operations

# Makes the pipeline of one of several processes or workers.
MakesDataset: TypeAlias = Callable[[tf.distribute.InputContext], tf.data.Dataset]


def patch_iterators() -> None:
    """Let other ranks wait neither for the end of data nor for its closing, from now on."""
    closing: queue.SimpleQueue[list[object]] = queue.SimpleQueue()

    def read(iterator: OwnedIterator, *, original: Function[Tree]) -> Tree:
        """Let a graph's collectives begin when the batch of their step is there."""
        # Steps of dtk's own see to it, so that all else runs that Keras runs beyond the end: it
        # counts a step, and draws seeds.
        if tf.executing_eagerly() or isinstance(iterator.element_spec, slicing.Slices):
            return original(iterator)
        with tf.control_dependencies(sequencer.ended_before()):
            batch = original(iterator)
        sequencer.begin_after(batch)
        return batch

    def create(
        iterator: OwnedIterator, dataset: tf.data.Dataset, *, original: Function[None]
    ) -> None:
        """Let a thread close a pipeline, wherever its last reference is dropped.

        That may be in any thread, by the collector of garbage, and closing may take as long as the
        pipeline was open: see `dtk.input.slicing`.
        """
        original(iterator, dataset)
        if tf.executing_eagerly():
            # A pipeline that is closed calls what its dataset keeps: the resource goes first.
            held = [dataset, iterator._iterator_resource]
            weakref.finalize(iterator, closing.put, held).atexit = False

    def drop(held: list[object]) -> None:
        while held:
            held.pop()

    def close() -> None:
        while held := closing.get():
            # One each: a pipeline in the middle of a script's Python may never close.
            one = threading.Thread(target=drop, args=(held,), name="dtk-close", daemon=True)
            del held
            with contextlib.suppress(RuntimeError):  # at the end of the process none may begin
                one.start()

    if not hasattr(OwnedIterator._create_iterator, "_dtk_original"):
        threading.Thread(target=close, name="dtk-closes", daemon=True).start()
        patch_for_good(OwnedIterator, "_create_iterator", create)
        patch_for_good(OwnedIterator, "_next_internal", read)


def regroup(parts: tuple[Tree, ...]) -> Tree:
    """Turn one structure per replica into one structure of per-replica values."""
    return distribute_utils.regroup(parts, always_wrap=True)


def _regrouped_spec(parts: Sequence[Specs]) -> Specs:
    return tf.nest.map_structure(lambda *of_replicas: PerReplicaSpec(*of_replicas), *parts)


class PerRankIterator(OwnedIterator):
    """Iterator over regrouped batches, or over those beside a digest that ranks compare.

    Both also inside a `tf.function`, where nothing is compared.
    """

    def __init__(
        self,
        dataset: tf.data.Dataset | None = None,
        components: Sequence[tf.Tensor] | None = None,
        element_spec: Specs | None = None,
        regrouped: bool = False,
        on_read: Callable[[tf.Tensor], None] | None = None,
    ):
        super().__init__(dataset, components, element_spec)
        self._regrouped = regrouped
        self._on_read = on_read

    @property
    def element_spec(self) -> Specs:
        """Specification of a batch."""
        spec = self._element_spec
        return _regrouped_spec(spec) if self._regrouped else spec[0]

    @property
    def _type_spec(self) -> PerRankIteratorSpec:
        return PerRankIteratorSpec(self._element_spec, self._regrouped)

    def _shown(self, element: tuple[Tree, ...]) -> Tree:
        if self._regrouped:
            return regroup(element)
        rows, digest = element
        if self._on_read is not None and tf.executing_eagerly():
            self._on_read(digest)
        return rows

    def _next_internal(self) -> Tree:
        return self._shown(super()._next_internal())

    def get_next_as_optional(self) -> tf.experimental.Optional:
        """Return the next batch, or none at the end."""
        inner = OwnedIterator(None, (self._iterator_resource,), self._element_spec)
        found = inner.get_next_as_optional()
        return tf.cond(
            found.has_value(),
            lambda: tf.experimental.Optional.from_value(self._shown(found.get_value())),
            lambda: tf.experimental.Optional.empty(self.element_spec),
        )


class PerRankIteratorSpec(IteratorSpec):
    """Type of a `PerRankIterator`, so that it can be an argument of a `tf.function`."""

    def __init__(self, element_spec: Specs, regrouped: bool):
        super().__init__(element_spec)
        self._regrouped = regrouped

    @property
    def value_type(self) -> type:
        """The class `PerRankIterator`."""
        return PerRankIterator

    def _serialize(self) -> tuple[Specs, bool]:
        return self._element_spec, self._regrouped

    def _from_components(self, components: Sequence[tf.Tensor]) -> PerRankIterator:
        return PerRankIterator(None, components, self._element_spec, self._regrouped)


class PerRankDataset(input_lib.DistributedDataset):
    """Dataset of a rank's own batches, which `fit` must not cut again.

    Keras recognises it by the name of its base class; nothing else of that class is used.
    """

    def __init__(
        self,
        local: tf.data.Dataset | Callable[[], tf.data.Dataset],
        whole: tf.data.Dataset | None,
        regrouped: bool = False,
        on_read: Callable[[tf.Tensor], None] | None = None,
        digested: Callable[[], tf.data.Dataset] | None = None,
    ):
        self._local = local
        self.whole = whole
        self._regrouped = regrouped
        self._on_read = on_read
        self._make_digested = digested

    @property
    def local(self) -> tf.data.Dataset:
        """Dataset of this rank's rows."""
        if not isinstance(self._local, tf.data.Dataset):
            self._local = self._local()
        return self._local

    @functools.cached_property
    def _digested(self) -> tf.data.Dataset:
        """Pairs of this rank's rows and the digest of the global batch that they are from."""
        assert self._make_digested is not None
        return self._make_digested()

    @property
    def element_spec(self) -> tf.TypeSpec:
        """Specification of a local element."""
        spec = self.local.element_spec
        return _regrouped_spec(spec) if self._regrouped else spec

    @property
    def cardinality(self) -> tf.Tensor:
        """Number of batches in an epoch; a property, as in `tf.distribute.DistributedDataset`."""
        return self.local.cardinality()

    def map(self, function: Function[Tree]) -> PerRankDataset:
        """Apply a function to every batch, as Keras does to turn class weights into row weights."""
        whole = None if self.whole is None else self.whole.map(function)
        return PerRankDataset(lambda: self.local.map(function), whole, self._regrouped)

    def prefetch(self, count: int) -> PerRankDataset:
        """Keep batches ready."""
        return PerRankDataset(lambda: self.local.prefetch(count), self.whole, self._regrouped)

    def __len__(self) -> int:
        return len(self.local)

    def __iter__(self) -> Iterator[Tree]:
        # Opened here: Keras opens data once more at the end, and a shuffle counts its openings.
        if self._on_read is not None and tf.executing_eagerly():
            return PerRankIterator(self._digested, on_read=self._on_read)
        return PerRankIterator(self.local, regrouped=True) if self._regrouped else iter(self.local)

    def reduce(self, initial_state: Tree, reduce_func: Callable[[Tree, Tree], Tree]) -> Tree:
        """Reduce all local elements, as `for` does inside a `tf.function`."""
        if not self._regrouped:
            return self.local.reduce(initial_state, reduce_func)
        return self.local.reduce(
            initial_state, lambda state, parts: reduce_func(state, regroup(parts))
        )

    @property
    def _type_spec(self) -> PerRankDatasetSpec:
        return PerRankDatasetSpec(tf.data.DatasetSpec(self.local.element_spec), self._regrouped)


def mark_of_this_rank(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Mark a dataset, and all that is made of it, as a rank's own batches."""
    dataset._dtk_of_this_rank = True
    return dataset


def is_of_this_rank(dataset: object) -> bool:
    """Return whether a dataset holds a rank's own batches, which `fit` must not cut."""
    if isinstance(dataset, PerRankDataset):
        return dataset.whole is None
    if not isinstance(dataset, tf.data.Dataset):
        return False
    nodes = (dataset, *operations.all_sources_of(dataset))
    return any(hasattr(node, "_dtk_of_this_rank") for node in nodes)


def has_batches(dataset: tf.data.Dataset) -> bool:
    """Return whether a dataset's elements are batches, as far as can be seen."""
    for node in (dataset, *operations.sources_of(dataset)):
        if "Batch" in operations.kind_of(node):
            return True
        if operations.kind_of(node) in ("Unbatch", "FlatMap", "Interleave", "ParallelInterleave"):
            break
    shapes = [getattr(leaf, "shape", None) for leaf in tf.nest.flatten(dataset.element_spec)]
    return all(one is not None and one.rank != 0 and one[:1] == [None] for one in shapes)


def own_dataset(cut: PerRankDataset | tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that a strategy has cut as one that may be mapped and cached further."""
    return mark_of_this_rank(cut.local) if isinstance(cut, PerRankDataset) else cut


def is_per_replica(dataset: object) -> bool:
    """Return whether a dataset holds batches of single replicas of this process."""
    return isinstance(dataset, input_lib.DistributedDatasetsFromFunction)


def refuse_per_replica_batches(function: object = None) -> NoReturn:
    """Say what to give to `fit` in place of batches of single replicas."""
    raise ValueError(
        "the batches of distribute_datasets_from_function are each replica's own, and fit and "
        "evaluate under MirroredStrategy cut global batches. Give them "
        "dataset_fn(tf.distribute.InputContext()), in which get_per_replica_batch_size(size) is "
        "the global size; loops of your own, and strategies of several processes, take both"
    )


def read_alone(dataset: tf.data.Dataset | PerRankDataset) -> tf.data.Dataset:
    """Return what one rank reads of a dataset without the others: all that it was given."""
    if not isinstance(dataset, PerRankDataset):
        return dataset
    return dataset.local if dataset.whole is None else dataset.whole


class PerRankDatasetSpec(tf.TypeSpec):
    """Type of a `PerRankDataset`, so that it can be an argument of a `tf.function`."""

    def __init__(self, local: tf.data.DatasetSpec, regrouped: bool):
        self._local = local
        self._regrouped = regrouped

    @property
    def value_type(self) -> type:
        """The class `PerRankDataset`."""
        return PerRankDataset

    def _serialize(self) -> tuple[tf.data.DatasetSpec, bool]:
        return self._local, self._regrouped

    @property
    def _component_specs(self) -> tf.data.DatasetSpec:
        return self._local

    def _to_components(self, value: PerRankDataset) -> tf.data.Dataset:
        return value.local

    def _from_components(self, components: tf.data.Dataset) -> PerRankDataset:
        return PerRankDataset(components, None, self._regrouped)
