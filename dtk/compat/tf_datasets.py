"""Per-rank datasets that Keras treats as distributed, and pipelines taken apart by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.distribute import distribute_utils, input_lib
from tensorflow.python.framework import op_def_registry

from dtk.input import row_maps
from dtk.input.row_maps import RowMaps
from dtk.nests import Function, Tree

# Makes the pipeline of one of several processes or workers.
MakesDataset: TypeAlias = Callable[[tf.distribute.InputContext], tf.data.Dataset]

# Kinds of datasets, see `_kind`.
_MAPS = ("Map", "ParallelMap")
_BATCHES = ("Batch", "ParallelBatch")
_COUNTED = ("Repeat", "Skip", "Take")
# Keras's function that turns `class_weight` into row weights.
_CLASS_WEIGHTS = "make_class_weight_map_fn.<locals>.class_weights_map_fn"
# Datasets that leave elements unchanged.
_TRANSPARENT = ("Prefetch", "Options")


def regroup(parts: tuple[Tree, ...]) -> Tree:
    """Turn one structure per replica into one structure of per-replica values."""
    return distribute_utils.regroup(parts, always_wrap=True)


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
    ):
        self._local = local
        self.whole = whole
        self._regrouped = regrouped
        self._on_read = on_read

    @property
    def local(self) -> tf.data.Dataset:
        """Dataset of this rank's rows."""
        if not isinstance(self._local, tf.data.Dataset):
            self._local = self._local()
        return self._local

    @property
    def element_spec(self) -> tf.TypeSpec:
        """Specification of a local element."""
        return self.local.element_spec

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
        if self._on_read is not None:
            return self._observed(self._on_read)
        return map(regroup, self.local) if self._regrouped else iter(self.local)

    def _observed(self, on_read: Callable[[tf.Tensor], None]) -> Iterator[Tree]:
        for rows, digest in self.local:
            on_read(digest)
            yield rows

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


# Pipelines taken apart.


def cut_in_order(
    dataset: tf.data.Dataset, cut: Callable[[tf.data.Dataset, bool], tf.data.Dataset]
) -> tf.data.Dataset:
    """Cut batches by `cut(dataset, ahead)`, without reading ahead if that would change the order.

    An iterator over `shuffle(n).repeat()` shuffles several times and takes one of the dataset's
    seeds each time; the next iterator takes the seeds after them. If dtk read further ahead than
    the script asks for, the next `fit` would have another order. So such batches are cut one by
    one, before the script's own prefetch.
    """
    if not _shuffles_again(dataset):
        return cut(dataset, True)
    node = dataset
    while _kind(node) == "Options":
        node = node._input_dataset
    if _kind(node) != "Prefetch":
        return cut(dataset, False)
    batches = node._input_dataset.with_options(dataset.options())
    return cut(batches, False).prefetch(_number(node._buffer_size))


def _shuffles_again(dataset: tf.data.Dataset) -> bool:
    if _kind(dataset) == "Repeat":
        return any(_kind(node) == "Shuffle" for node in _all_sources(dataset))
    return any(_shuffles_again(source) for source in dataset._inputs())


def _all_sources(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    for source in dataset._inputs():
        yield source
        yield from _all_sources(source)


def take_apart(dataset: tf.data.Dataset) -> RowMaps | str | None:
    """Find the maps that make each row of a batch from one row.

    Returns a str that says why a rank cannot map its own rows only; None if nothing maps rows.
    """
    behind: list[tf.data.Dataset] = []
    node = dataset
    while _kind(node) in (*_TRANSPARENT, *_COUNTED) or _is_class_weights(node):
        behind.insert(0, node)
        node = node._input_dataset
    if _kind(node) not in _BATCHES:
        return f"{_kind(node)} makes or changes batches" if _maps_rows(node) else None
    maps, rows, why = _maps_before(node._input_dataset)
    if not maps:
        return why
    why = _why_not_rebatched(dataset, node, rows) or _why_not_left(behind, rows)
    if why is not None:
        return why
    return RowMaps(
        rows=rows,
        size=int(node._batch_size),
        batch=lambda given, size: _batched(given, node, size),
        apply=lambda given: _rebuilt(given, maps),
        behind=lambda given: _as_behind(given, behind, dataset),
        salt=row_maps.salt_of(
            [one._map_func.function for one in maps + behind if _kind(one) in _MAPS]
        ),
    )


def _is_class_weights(node: tf.data.Dataset) -> bool:
    """Return whether a dataset is Keras's map of `class_weight` and takes any number of rows."""
    if _kind(node) != "Map":
        return False
    own = getattr(node._map_func._func, "__qualname__", "") == _CLASS_WEIGHTS
    leaves = tf.nest.flatten(node._input_dataset.element_spec)
    return own and all(getattr(leaf, "shape", [None])[0] is None for leaf in leaves)


def _kind(node: tf.data.Dataset) -> str:
    return type(node).__name__.strip("_").removesuffix("Dataset")


def _sources(node: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset's source, its source, and so on, up to a cache or several sources."""
    while (node := getattr(node, "_input_dataset", None)) is not None:
        if _kind(node) == "Cache":
            return
        yield node


def _maps_rows(node: tf.data.Dataset) -> bool:
    """Return whether rows are mapped before they are put into batches."""
    kinds = [_kind(one) for one in (node, *_sources(node))]
    batch = next((i for i, kind in enumerate(kinds) if "Batch" in kind), len(kinds))
    return any(kind in _MAPS for kind in kinds[batch:])


def _maps_before(
    node: tf.data.Dataset,
) -> tuple[list[tf.data.Dataset], tf.data.Dataset, str | None]:
    """Return the maps before a batch, from the first; their input; and why no more maps fit.

    Options and prefetching between the maps are included.
    """
    found: list[tf.data.Dataset] = []
    passed: list[tf.data.Dataset] = []
    rows, why = node, None
    while _kind(node) in (*_TRANSPARENT, *_MAPS):
        passed.insert(0, node)
        if _kind(node) in _MAPS:
            why = _why_not_pure(node)
            if why is not None:
                break
            found, passed, rows = passed + found, [], node._input_dataset
        node = node._input_dataset
    kept = _kind(node) == "Cache"
    if why is None and not kept and any(_kind(one) in _MAPS for one in _sources(node)):
        why = f"{_kind(node)} stands between map and batch"
    return found, rows, why


def _why_not_pure(node: tf.data.Dataset) -> str | None:
    """Return why a rank cannot map its own rows only; None if each result depends on its row."""
    wrapped = node._map_func
    name = getattr(wrapped._func, "__name__", type(wrapped._func).__name__)
    if getattr(node, "_deterministic", None) == "false":
        return f"map({name}) gives its rows in any order (deterministic=False)"
    if not (node._use_inter_op_parallelism and node._preserve_cardinality):
        return f"map({name}) was not made by tf.data.Dataset.map"
    why = row_maps.why_not_pure(wrapped.function, _is_stateful)
    return None if why is None else f"{name} {why}"


def _is_stateful(kind: str) -> bool | None:
    op = op_def_registry.get(kind)
    return None if op is None else op.is_stateful


def _why_not_rebatched(
    dataset: tf.data.Dataset, batch: tf.data.Dataset, rows: tf.data.Dataset
) -> str | None:
    """Return why a rank's rows cannot form batches by themselves, or before the maps."""
    if (
        getattr(batch, "_deterministic", None) == "false"
        or dataset.options().deterministic is False
    ):
        return "rows come in any order (deterministic=False)"
    if None in (_number(batch._batch_size), _number(batch._drop_remainder)):
        return "the batch size is a tensor of a graph"
    if not _are_alike(rows.element_spec):
        return f"rows have no fixed shape before they are mapped: {rows.element_spec}"
    mapped = batch._input_dataset.element_spec
    absent = tf.type_spec_from_value(None)
    if not _are_alike([leaf for leaf in tf.nest.flatten(mapped) if leaf != absent]):
        return f"mapped rows have no fixed shape (tf.ensure_shape sets it): {mapped}"
    return None


def _why_not_left(behind: Sequence[tf.data.Dataset], rows: tf.data.Dataset) -> str | None:
    """Return why reading ahead would change the rows of the next iterator."""
    kinds = {_kind(one) for one in (*behind, rows, *_sources(rows))}
    if any(_kind(one) == "Take" for one in behind) and {"Shuffle", "Repeat"} <= kinds:
        return "take leaves a stream that is shuffled again and again while it is read ahead"
    return None


def _are_alike(spec: tf.TypeSpec) -> bool:
    """Return whether all rows have one shape and are dense."""
    leaves = tf.nest.flatten(spec)
    return bool(leaves) and all(
        type(leaf) is tf.TensorSpec
        and leaf.shape.is_fully_defined()
        and leaf.dtype not in (tf.resource, tf.variant)
        for leaf in leaves
    )


def _number(tensor: tf.Tensor) -> int | None:
    value = tf.get_static_value(tensor)
    return None if value is None else int(value)


def _order(node: tf.data.Dataset) -> bool | None:
    return {"true": True, "default": None}[node._deterministic]


def _batched(given: tf.data.Dataset, like: tf.data.Dataset, size: int) -> tf.data.Dataset:
    drop = bool(_number(like._drop_remainder))
    if _kind(like) == "Batch":
        return given.batch(size, drop, name=like._name)
    calls = _number(like._num_parallel_calls)
    return given.batch(size, drop, calls, _order(like), like._name)


def _rebuilt(given: tf.data.Dataset, maps: Sequence[tf.data.Dataset]) -> tf.data.Dataset:
    """Map the second part of pairs as rows are mapped, by the functions already traced."""
    for node in maps:
        if _kind(node) == "Prefetch":
            given = given.prefetch(_number(node._buffer_size), name=node._name)
        elif _kind(node) == "Map":
            synchronous = node._force_synchronous
            given = given.map(_on_second(node), synchronous=synchronous, name=node._name)
        elif _kind(node) == "ParallelMap":
            given = given.map(
                _on_second(node),
                num_parallel_calls=node._num_parallel_calls,
                deterministic=_order(node),
                use_unbounded_threadpool=node._use_unbounded_threadpool,
                name=node._name,
            )
    return given


def _on_second(node: tf.data.Dataset) -> Function[tuple[tf.Tensor, Tree]]:
    wrapped, spec = node._map_func, node._input_dataset.element_spec

    @tf.autograph.experimental.do_not_convert
    def apply(first: tf.Tensor, second: Tree) -> tuple[tf.Tensor, Tree]:
        made = wrapped.function(*structure.to_tensor_list(spec, second))
        return first, structure.from_compatible_tensor_list(wrapped.output_structure, made)

    return apply


def _as_behind(
    given: tf.data.Dataset, behind: Sequence[tf.data.Dataset], dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Repeat on other batches the operations after a pipeline's batch; keep count and options."""
    for node in behind:
        if _kind(node) not in _COUNTED:
            given = _rebuilt(given, [node])
        else:
            given = getattr(given, _kind(node).lower())(node._count, name=node._name)
    count = int(dataset.cardinality())
    if count != tf.data.UNKNOWN_CARDINALITY:
        given = given.apply(tf.data.experimental.assert_cardinality(count))
    return given.with_options(dataset.options())
