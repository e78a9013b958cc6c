"""Pipelines taken apart by operation, and put together in another order.

while a shuffle is made anew   gen_dataset_ops.dummy_seed_generator   _shuffled_alike
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_dataset_ops

from dtk import quiet
from dtk.input import slicing
from dtk.nests import Function, Tree
from dtk.patches import patch
from dtk.pipelines import drawn_maps, row_maps
from dtk.pipelines.row_maps import ArrayRows, RowMaps

# Kinds of datasets, see `kind_of`.
_MAPS = ("Map", "ParallelMap")
_BATCHES = ("Batch", "ParallelBatch")
_COUNTED = ("Repeat", "Skip", "Take")
# Keras's function that turns `class_weight` into row weights.
_CLASS_WEIGHTS = "make_class_weight_map_fn.<locals>.class_weights_map_fn"
# Keras's function that takes the rows with given numbers from arrays.
_TAKES_ROWS = "ArrayDataAdapter.get_tf_dataset.<locals>.slice_inputs.<locals>.grab_batch"
# Bytes of arrays that are copied to look into a dataset.
_MOST_HELD = 2**28
# Operations that draw random numbers, or change a variable, such as the seed of Keras's layers.
_DRAWS = re.compile(
    r"Assign|Multinomial|ParameterizedTruncated|Random|Rng|SampleDistorted|Stateful(?!Part)|Trunc"
)
# Datasets that leave elements unchanged.
_TRANSPARENT = ("Prefetch", "Options")


def cut_pipeline(
    dataset: tf.data.Dataset,
    ranks: Sequence[int],
    size: int,
    digest: row_maps.Digest | None = None,
    taking_apart: Callable[[tf.data.Dataset], RowMaps | ArrayRows | None] | None = None,
) -> tf.data.Dataset:
    """Cut every global batch of a pipeline for the given ranks, into `slicing.Slices`.

    Args:
        dataset: Of global batches.
        ranks: Whose slices are wanted.
        size: Number of slices.
        digest: Of a batch, for ranks to compare; None for none.
        taking_apart: Where each of several processes cuts the pipeline for itself, so that they
            must agree on the order of its rows. Gives the maps to be moved behind the cut.
    """

    def cut_one(pipeline: tf.data.Dataset, ahead: bool) -> tf.data.Dataset:
        if taking_apart is not None:
            pipeline = _in_known_order(pipeline)
            maps = taking_apart(pipeline)
            if maps is not None:
                return row_maps.cut_before_maps(maps, ranks[0], size, digest, ahead)
            pipeline = drawn_in_order(pipeline)
        return slicing.cut_dataset(pipeline, ranks, size, digest, ahead)

    return _cut_in_order(dataset, cut_one)


def _cut_in_order(
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
    while kind_of(node) == "Options":
        node = node._input_dataset
    if kind_of(node) != "Prefetch":
        return cut(dataset, False)
    batches = node._input_dataset.with_options(dataset.options())
    return cut(batches, False).prefetch(_number(node._buffer_size))


def _in_known_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Put a dataset in order whose options allow any: ranks that each read all must agree on it."""
    if dataset.options().deterministic is not False:
        return dataset
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def drawn_in_order(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Make maps draw in the order of their elements: ranks that each read all must draw alike.

    Threads of a parallel map draw as they come. TensorFlow's pass for `enable_op_determinism` draws
    beforehand, one element after the other, and leaves the rest of the map parallel.
    """
    if not any(_draws_in_threads(node) for node in (dataset, *all_sources_of(dataset))):
        return dataset
    spec = dataset.element_spec
    with quiet.filtered():
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            output_types=structure.get_flat_tensor_types(spec),
            output_shapes=structure.get_flat_tensor_shapes(spec),
        )
    ordered = tf.data.experimental.from_variant(variant, spec)
    ordered._dtk_owner = dataset  # what its functions hold lives as long as this one
    return ordered


def _draws_in_threads(node: tf.data.Dataset) -> bool:
    if kind_of(node) != "ParallelMap":
        return False
    graph = node._map_func.function.graph.as_graph_def()
    called = (one for function in graph.library.function for one in function.node_def)
    return any(_DRAWS.match(one.op) for one in (*graph.node, *called))


def _shuffles_again(dataset: tf.data.Dataset) -> bool:
    if kind_of(dataset) == "Repeat":
        return any(kind_of(node) == "Shuffle" for node in all_sources_of(dataset))
    return any(_shuffles_again(source) for source in dataset._inputs())


def all_sources_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    for source in dataset._inputs():
        yield source
        yield from all_sources_of(source)


def take_apart(dataset: tf.data.Dataset) -> RowMaps | ArrayRows | str | None:
    """Find the maps that make each row of a batch from one row, or arrays that rows are taken from.

    Returns a str that says why a rank cannot map its own rows only; None if nothing maps rows.
    """
    behind: list[tf.data.Dataset] = []
    node = dataset
    while kind_of(node) in (*_TRANSPARENT, *_COUNTED) or _is_class_weights(node):
        behind.insert(0, node)
        node = node._input_dataset
    if _takes_rows(node):
        return ArrayRows(_as_behind(node._input_dataset, behind, dataset))
    if kind_of(node) not in _BATCHES:
        if not _maps_rows(node):
            return None
        called = re.sub(r"\B(?=[A-Z])", "_", kind_of(node).removeprefix("Parallel")).lower()
        return f"its {called} takes or makes whole batches"
    rows, steps, why = _apart(node._input_dataset)
    if not steps:
        return why
    refused = _why_not_rebatched(node, rows) or _why_not_left(behind, rows)
    if refused is not None:
        return refused
    return RowMaps(
        rows=drawn_in_order(rows),
        size=int(node._batch_size),
        batch=lambda source, size: _batched(source, node, size),
        apply=lambda source: _rebuilt(source, steps),
        behind=lambda batches: _as_behind(batches, behind, dataset),
        salt=row_maps.salt_of(
            [
                one._map_func.function
                for one in [*(step.node for step in steps), *behind]
                if one is not None and kind_of(one) in _MAPS
            ]
        ),
        why=why,
    )


def _takes_rows(node: tf.data.Dataset) -> bool:
    """Return whether a dataset is Keras's map that takes rows of dense arrays by their numbers."""
    if kind_of(node) not in _MAPS or not _is_named(node, _TAKES_ROWS):
        return False
    leaves = tf.nest.flatten(node.element_spec)
    return all(isinstance(one, tf.TensorSpec) or not hasattr(one, "shape") for one in leaves)


def _is_named(node: tf.data.Dataset, name: str) -> bool:
    return getattr(node._map_func._func, "__qualname__", "") == name


def _is_class_weights(node: tf.data.Dataset) -> bool:
    """Return whether a dataset is Keras's map of `class_weight` and takes any number of rows."""
    if kind_of(node) != "Map" or not _is_named(node, _CLASS_WEIGHTS):
        return False
    leaves = tf.nest.flatten(node._input_dataset.element_spec)
    return all(getattr(leaf, "shape", [None])[0] is None for leaf in leaves)


def kind_of(node: tf.data.Dataset) -> str:
    return type(node).__name__.strip("_").removesuffix("Dataset")


def sources_of(node: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a dataset's source, its source, and so on, up to a cache or several sources."""
    while (node := getattr(node, "_input_dataset", None)) is not None:
        if kind_of(node) == "Cache":
            return
        yield node


def cache_files(dataset: tf.data.Dataset) -> list[str]:
    """Return the names of the files in which a pipeline caches its elements."""
    nodes = [one for one in (dataset, *all_sources_of(dataset)) if kind_of(one) == "Cache"]
    names = [tf.get_static_value(one._filename) for one in nodes]
    return [os.fsdecode(name) for name in names if name]


def shuffle_seeds(dataset: tf.data.Dataset) -> list[tuple[int | None, ...] | None]:
    """Return the seeds of a pipeline's shuffles; None where each process draws its own."""
    nodes = [one for one in (dataset, *all_sources_of(dataset)) if kind_of(one) == "Shuffle"]
    seeds = [(_number(one._seed), _number(one._seed2)) for one in nodes]
    return [None if pair == (0, 0) else pair for pair in seeds]


def _maps_rows(node: tf.data.Dataset) -> bool:
    """Return whether rows are mapped before they are put into batches."""
    kinds = [kind_of(one) for one in (node, *sources_of(node))]
    batch = next((i for i, kind in enumerate(kinds) if "Batch" in kind), len(kinds))
    return any(kind in _MAPS for kind in kinds[batch:])


class _Step(NamedTuple):
    """What is done to rows: mapping, or reading ahead."""

    node: tf.data.Dataset | None  # the pipeline's operation, which says how; None: as the next
    call: Function[Tree] | None  # from row to row; None if the operation maps nothing


class _Apart(NamedTuple):
    """A dataset of rows as another one and what is done to each of its rows."""

    rows: tf.data.Dataset
    steps: list[_Step]
    why: str | None = None  # why other maps are not among the steps


def _apart(node: tf.data.Dataset) -> _Apart:
    """Move maps behind all operations that only choose and order rows.

    What stands before a map that stays is left as it is.
    """
    if kind_of(node) in _MAPS:
        return _map_apart(node)
    if kind_of(node) == "Zip":
        return _zip_apart(node)
    if kind_of(node) not in (*_TRANSPARENT, *_COUNTED, "Shuffle"):
        maps = kind_of(node) != "Cache" and any(kind_of(one) in _MAPS for one in sources_of(node))
        return _Apart(node, [], f"{kind_of(node)} stands between map and batch" if maps else None)
    rows, steps, why = _apart(node._input_dataset)
    if not steps:
        return _Apart(node, [], why)
    if kind_of(node) in _TRANSPARENT:  # `_as_behind` sets the options
        return _Apart(rows, [*steps, _Step(node, None)], why)
    if kind_of(node) == "Shuffle":
        if _bytes_held(node) > _MOST_HELD:
            return _Apart(node, [], "shuffle is given arrays of more than 256 MB")
        alike = _shuffled_alike(rows, node)
        if alike is None:
            return _Apart(node, [], "TensorFlow does not show where shuffle keeps its seeds")
        return _Apart(alike, steps, why)
    if kind_of(rows) == "Shuffle" and kind_of(node._input_dataset) != "Shuffle":
        # TensorFlow makes one operation of shuffle and repeat, which has another order.
        rows = rows.with_options(tf.data.Options())
    return _Apart(_counted(rows, node), steps, why)


def _map_apart(node: tf.data.Dataset) -> _Apart:
    rows, steps, why = _apart(node._input_dataset)
    wrapped = node._map_func
    halves: drawn_maps.Halves | str | None = None
    if node._use_inter_op_parallelism and node._preserve_cardinality:
        impure = drawn_maps.impure_nodes(wrapped.function, _is_stateful)
        if impure:
            halves = drawn_maps.split(wrapped.function, impure)
    else:
        halves = "was not made by tf.data.Dataset.map"
    if isinstance(halves, str):
        return _Apart(node, [], f"{_place_of(wrapped._func)} {halves}")
    if halves is None:
        return _Apart(rows, [*steps, _Step(node, _call_of(node))], why)
    # Numbered: TensorFlow would pass the parts of a tuple as so many arguments.
    draw = tf.autograph.experimental.do_not_convert(lambda number, row: (row, halves.draw()))
    drawn = rows.enumerate().map(draw, synchronous=True)
    return _Apart(drawn, [*_on_part(steps, 0), _Step(node, _call_of(node, halves))], why)


def _call_of(node: tf.data.Dataset, halves: drawn_maps.Halves | None = None) -> Function[Tree]:
    """Return a map's function: from row to row, or from a pair of row and draws."""
    wrapped, spec = node._map_func, node._input_dataset.element_spec

    def call(row: Tree) -> Tree:
        made = wrapped.function(*structure.to_tensor_list(spec, row))
        return structure.from_compatible_tensor_list(wrapped.output_structure, made)

    if halves is None:
        return call

    def call_with_draws(pair: tuple[Tree, tuple[tf.Tensor, ...]]) -> Tree:
        made = halves.rest(structure.to_tensor_list(spec, pair[0]), pair[1])
        return structure.from_compatible_tensor_list(wrapped.output_structure, made)

    return call_with_draws


def _zip_apart(node: tf.data.Dataset) -> _Apart:
    parts = [_apart(one) for one in node._inputs()]
    why = next((part.why for part in parts if part.why), None)
    steps = [step for i, part in enumerate(parts) for step in _on_part(part.steps, i)]
    if not steps:
        return _Apart(node, [], why)
    zipped = tf.data.Dataset.zip(tuple(part.rows for part in parts), name=node._name)
    pack = _Step(None, lambda row: tf.nest.pack_sequence_as(node._datasets, row))
    return _Apart(zipped, [*steps, pack], why)


def _on_part(steps: Sequence[_Step], i: int) -> list[_Step]:
    """Return steps that change one part of a tuple."""

    def on_part(call: Function[Tree]) -> Function[Tree]:
        return lambda row: (*row[:i], call(row[i]), *row[i + 1 :])

    return [_Step(step.node, step.call and on_part(step.call)) for step in steps]


def _place_of(function: Function[Tree]) -> str:
    """Return the name of a function and where it stands."""
    name = getattr(function, "__name__", type(function).__name__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _bytes_held(node: tf.data.Dataset) -> int:
    """Return the bytes of the arrays from which a dataset takes its elements."""
    held = [one for source in all_sources_of(node) for one in getattr(source, "_tensors", [])]
    return sum(one.dtype.size * one.shape.num_elements() for one in held)


def _shuffled_alike(rows: tf.data.Dataset, node: tf.data.Dataset) -> tf.data.Dataset | None:
    """Shuffle rows in the order in which a dataset shuffles its own; None if that cannot be known.

    A dataset that shuffles holds a generator, which gives each iterator its seeds. Both share it,
    so the order is right however often a script has read the dataset before.
    """
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=node._variant_tensor, external_state_policy=1
        )
    except tf.errors.OpError:  # a kind of dataset that TensorFlow cannot write
        return None
    graph = tf.compat.v1.GraphDef.FromString(text.numpy())
    nodes = {one.name: one for one in graph.node}
    (end,) = (one for one in graph.node if one.op == "_Retval")
    shuffle = nodes[end.input[0].split(":")[0]]
    if shuffle.op != "ShuffleDatasetV3":
        return None
    generator = nodes[shuffle.input[-1].split(":")[0]]
    (held,) = generator.attr["value"].tensor.resource_handle_val
    # An op that makes a handle from a name; it creates nothing.
    handle = tf.raw_ops.VarHandleOp(
        dtype=tf.int64, shape=[], container=held.container, shared_name=held.name
    )
    with patch(gen_dataset_ops, dummy_seed_generator=lambda: handle):
        # The seed is not used; without it TensorFlow would draw one.
        made = rows.shuffle(node._buffer_size, 1, node._reshuffle_each_iteration, name=node._name)
    made._dtk_owner = node  # the generator lives as long as this dataset
    return made


def _is_stateful(kind: str) -> bool | None:
    op = op_def_registry.get(kind)
    return None if op is None else op.is_stateful


def _why_not_rebatched(batch: tf.data.Dataset, rows: tf.data.Dataset) -> str | None:
    """Return why a rank's rows cannot form batches by themselves, or before the maps."""
    if None in (_number(batch._batch_size), _number(batch._drop_remainder)):
        return "the batch size is a tensor of a graph"
    if not _are_alike(rows.element_spec):
        return f"rows have no fixed shape before they are mapped: {_shapes(rows.element_spec)}"
    mapped = batch._input_dataset.element_spec
    absent = tf.type_spec_from_value(None)
    if not _are_alike([leaf for leaf in tf.nest.flatten(mapped) if leaf != absent]):
        return f"mapped rows have no fixed shape (tf.ensure_shape sets it): {_shapes(mapped)}"
    return None


def _shapes(spec: Tree) -> str:
    """Return the shapes of the parts of an element."""
    return ", ".join(str(getattr(leaf, "shape", leaf)) for leaf in tf.nest.flatten(spec))


def _why_not_left(behind: Sequence[tf.data.Dataset], rows: tf.data.Dataset) -> str | None:
    """Return why reading ahead would change the rows of the next iterator."""
    kinds = {kind_of(one) for one in (*behind, rows, *all_sources_of(rows))}
    if any(kind_of(one) == "Take" for one in behind) and {"Shuffle", "Repeat"} <= kinds:
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
    # See `_in_known_order`.
    return None if node._deterministic == "default" else True


def _batched(rows: tf.data.Dataset, like: tf.data.Dataset, size: int) -> tf.data.Dataset:
    drop = bool(_number(like._drop_remainder))
    if kind_of(like) == "Batch":
        return rows.batch(size, drop, name=like._name)
    calls = _number(like._num_parallel_calls)
    return rows.batch(size, drop, calls, _order(like), like._name)


def _rebuilt(dataset: tf.data.Dataset, steps: Sequence[_Step]) -> tf.data.Dataset:
    """Do to the second part of pairs what is done to rows, by the functions already traced."""
    before: Function[Tree] | None = None
    for node, call in steps:
        if call is None:
            if node is not None and kind_of(node) == "Prefetch":
                dataset = dataset.prefetch(_number(node._buffer_size), name=node._name)
            continue
        call, before = _chained(before, call), None
        if node is None:
            before = call
        elif kind_of(node) == "ParallelMap":
            dataset = dataset.map(
                _on_second(call),
                num_parallel_calls=node._num_parallel_calls,
                deterministic=_order(node),
                use_unbounded_threadpool=node._use_unbounded_threadpool,
                name=node._name,
            )
        else:
            synchronous = node._force_synchronous
            dataset = dataset.map(_on_second(call), synchronous=synchronous, name=node._name)
    return dataset if before is None else dataset.map(_on_second(before))


def _chained(first: Function[Tree] | None, second: Function[Tree]) -> Function[Tree]:
    return second if first is None else lambda row: second(first(row))


def _on_second(call: Function[Tree]) -> Function[tuple[tf.Tensor, Tree]]:
    return tf.autograph.experimental.do_not_convert(lambda first, second: (first, call(second)))


def _counted(dataset: tf.data.Dataset, like: tf.data.Dataset) -> tf.data.Dataset:
    return getattr(dataset, kind_of(like).lower())(like._count, name=like._name)


def _as_behind(
    batches: tf.data.Dataset, behind: Sequence[tf.data.Dataset], dataset: tf.data.Dataset
) -> tf.data.Dataset:
    """Repeat on other batches the operations after a pipeline's batch; keep count and options."""
    for node in behind:
        if kind_of(node) in _COUNTED:
            batches = _counted(batches, node)
        elif kind_of(node) in _TRANSPARENT:
            batches = _rebuilt(batches, [_Step(node, None)])
        else:  # Keras's class weights
            batches = _rebuilt(batches, [_Step(node, _call_of(node))])
    count = int(dataset.cardinality())
    if count != tf.data.UNKNOWN_CARDINALITY:
        batches = batches.apply(tf.data.experimental.assert_cardinality(count))
    return batches.with_options(tf.data.Options().merge(dataset.options()))
