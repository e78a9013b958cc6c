"""Cut global batches: which rows belong to which rank.

Every rank reads the same global batches and keeps its own slice, so all ranks take the same number
of steps and nothing can deadlock on data. Slices are contiguous and differ by at most one row; with
fewer rows than ranks, the last ranks have none:

    rows 0..9 over 3 ranks   ->   [0 1 2 3] [4 5 6] [7 8 9]
    rows 0..1 over 3 ranks   ->   [0] [1] []

A step cannot compute a slice without rows: means become 0/0, and TensorFlow's convolution of no
rows has the wrong shape. So a rank without rows computes a padding row, the batch's last row, and
its results count as zero.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.even_division import even_bounds
from dtk.nests import Function, Leaf, Specs, Tree

# Stands for a number that this process does not know. It is a structure without tensors, so
# TensorFlow traces the step anew.
UNKNOWN: tuple[()] = ()


class Slices(NamedTuple):
    """One global batch, cut for the replicas of this process."""

    # one structure per replica of this process, in rank order; None marks an absent part of a
    # structure, as in Keras. A slice without rows holds a padding row
    parts: tuple[Tree, ...]
    # number of each part's own rows, int64 scalars; 0 for a padding row
    counts: tuple[tf.Tensor, ...]
    # rows of the whole global batch, int64 scalar; UNKNOWN if only their sum over ranks tells it
    rows: tf.Tensor
    # digest of the whole global batch, which ranks compare, int64 scalar; UNKNOWN if each rank
    # reads different batches, or with one process
    digest: tf.Tensor = UNKNOWN


def is_known(number: tf.Tensor | tuple[()]) -> bool:
    """Return whether a number of `Slices` is not UNKNOWN."""
    return not isinstance(number, tuple)


def _has_rows(leaf: Leaf | tf.TypeSpec | None) -> bool:
    return hasattr(leaf, "shape")  # not None, nor what a dataset has for None, nor an Optional


def check_rows(batch: Tree | Specs) -> list[Leaf | tf.TypeSpec]:
    """Refuse data that is not batched."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if _has_rows(leaf)]
    if not leaves:
        raise ValueError("a batch without tensors has no rows; give fit, evaluate or predict data")
    for leaf in leaves:
        if leaf.shape.rank == 0:
            raise ValueError(
                f"every element of the dataset must be a batch of rows, but one part is a scalar "
                f"of dtype {leaf.dtype.name}; call .batch(global_batch_size) on the dataset"
            )
    return leaves


def count_rows(batch: Tree) -> tf.Tensor:
    """Count the rows of a batch: the leading dimension that its leaves share.

    Zipped datasets may differ: 24 rows beside 8 are 8 rows, each with three of the 24.
    """
    leaves = check_rows(batch)
    if _rows_are_equal(leaves):
        return _rows(leaves[0])
    return tf.reduce_min(tf.stack([_rows(leaf) for leaf in leaves]))


def _rows(leaf: Leaf) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def _rows_are_equal(leaves: Sequence[Leaf]) -> bool:
    """Return whether static shapes show that all leaves have the same number of rows."""
    known = {leaf.shape[0] for leaf in leaves}
    return len(leaves) == 1 or (len(known) == 1 and None not in known)


def _multiples(batch: Tree, rows: tf.Tensor) -> Tree:
    """Return how many rows of each leaf belong to one row of the batch; None means one."""
    leaves = check_rows(batch)
    if _rows_are_equal(leaves):
        return tf.nest.map_structure(lambda leaf: None, batch)
    sizes = [_rows(leaf) for leaf in leaves]
    odd = tf.stack(sizes) % tf.maximum(rows, 1)
    check = tf.debugging.Assert(
        tf.reduce_all(odd == 0),
        [
            "the parts of one batch have different numbers of rows, which are no multiples of the "
            "smallest, so workers cannot share them; choose batch sizes of the zipped datasets "
            "that are multiples, with drop_remainder=True. Rows:",
            *sizes,
        ],
        summarize=len(sizes),
    )
    with tf.control_dependencies([check] if check is not None else []):
        return tf.nest.map_structure(
            lambda leaf: _rows(leaf) // tf.maximum(rows, 1) if _has_rows(leaf) else None, batch
        )


def _take(leaf: Leaf, begin: tf.Tensor, end: tf.Tensor, multiple: tf.Tensor | None) -> Leaf:
    if not _has_rows(leaf):
        return leaf
    if multiple is not None:
        begin, end = begin * multiple, end * multiple
    if isinstance(leaf, tf.SparseTensor):
        start = tf.concat([[begin], tf.zeros_like(leaf.dense_shape[1:])], 0)
        size = tf.concat([[end - begin], leaf.dense_shape[1:]], 0)
        taken = tf.sparse.slice(leaf, start, size)
        # Slicing forgets static sizes, which layers need to be built.
        known = [taken.dense_shape[0], *(_size(leaf, axis) for axis in range(1, leaf.shape.rank))]
        return tf.SparseTensor(taken.indices, taken.values, tf.stack(known))
    # Copied: TensorFlow knows that an array from Python (a generator's, a PyDataset's) is not its
    # own memory, but takes a slice of it for its own, and would write results over the script's
    # array where it lies aligned to 64 bytes.
    return tf.nest.map_structure(
        lambda part: tf.raw_ops.DeepCopy(x=part), leaf[begin:end], expand_composites=True
    )


def _size(leaf: tf.SparseTensor, axis: int) -> tf.Tensor:
    known = leaf.shape[axis]
    return leaf.dense_shape[axis] if known is None else tf.constant(known, tf.int64)


def cut_batch(batch: Tree, ranks: Sequence[int], size: int) -> Slices:
    """Cut one global batch for the given ranks."""
    rows = count_rows(batch)
    # Each rank's rows are adjacent. That is what puts rows back in their order: in predictions
    # (`replica_step.make_predict_function`, `batch_jobs.PredictJob`), in losses and metrics of all
    # rows and `gather_over_batch` (`whole_batch`), in trials of a step (`step_trial`, and `joined`
    # below), and where `dtk.data.describe` says which rows a rank has.
    bounds = [even_bounds(rows, rank, size) for rank in ranks]
    # Ranks without rows come last: they take the last row as a padding row.
    padded = [(tf.minimum(begin, rows - 1), end) for begin, end in bounds]
    return Slices(_parts(batch, rows, padded), tuple(end - begin for begin, end in bounds), rows)


def rows_only(spec: Specs, size: int) -> Callable[[Slices], tuple[Tree, ...]]:
    """Return what takes from slices of such batches what loops of one's own get of them."""
    has_rows_for_all = all((leaf.shape[0] or 0) >= size for leaf in check_rows(spec))
    take = without_padding if not has_rows_for_all else lambda batch: batch.parts
    return tf.autograph.experimental.do_not_convert(take)


def without_padding(batch: Slices) -> tuple[Tree, ...]:
    """Return the slices of a batch without padding rows, as loops of one's own get them."""
    return tuple(map(_first_rows, batch.parts, batch.counts))


def _first_rows(part: Tree, count: tf.Tensor) -> Tree:
    leaves = check_rows(part)
    # A slice that is known to have several rows has no padding row.
    if _rows_are_equal(leaves) and (leaves[0].shape[0] or 0) > 1:
        return part
    nothing = tf.zeros_like(count)
    return _parts(part, count_rows(part), [(nothing, count)])[0]


def rows_of(batch: Tree, begin: int, end: int) -> Tree:
    """Take some rows of a batch."""
    bounds = tf.constant(begin, tf.int64), tf.constant(end, tf.int64)
    return _parts(batch, count_rows(batch), [bounds])[0]


def _parts(
    batch: Tree, rows: tf.Tensor, bounds: Sequence[tuple[tf.Tensor, tf.Tensor]]
) -> tuple[Tree, ...]:
    """Take the rows between each pair of bounds."""
    leaves, multiples = tf.nest.flatten(batch), tf.nest.flatten(_multiples(batch, rows))
    parts = []
    for begin, end in bounds:
        taken = [_take(leaf, begin, end, m) for leaf, m in zip(leaves, multiples, strict=True)]
        parts.append(tf.nest.pack_sequence_as(batch, taken))
    return tuple(parts)


def padding_row(batch: Tree) -> Tree:
    """Append a row of zeros to the dense parts of a batch that has no rows."""
    missing = tf.cast(count_rows(batch) == 0, tf.int32)
    return tf.nest.map_structure(lambda leaf: _pad_rows(leaf, missing), batch)


def _pad_rows(leaf: Leaf | None, missing: tf.Tensor) -> Leaf | None:
    if not isinstance(leaf, tf.Tensor):
        return leaf
    shape = tf.concat([[missing], tf.shape(leaf)[1:]], 0)
    return tf.concat([leaf, tf.zeros(shape, leaf.dtype)], 0)


def joined(batch: Slices) -> Slices:
    """Return a batch whose rows are all in the first slice; the others have none."""
    present = [p for p, n in zip(batch.parts, batch.counts, strict=True) if int(n)]
    whole = tf.nest.map_structure(join_rows, *present)
    nothing = tf.zeros_like(batch.counts[0])
    counts = (tf.add_n(batch.counts), *[nothing] * (len(batch.counts) - 1))
    return batch._replace(parts=(whole, *batch.parts[1:]), counts=counts)


def join_rows(*leaves: Leaf | None) -> Leaf | None:
    """Put the rows of several slices' tensors one after the other."""
    first = leaves[0]
    if first is None or not _has_rows(first):
        return first
    if isinstance(first, tf.SparseTensor):
        return tf.sparse.concat(0, list(leaves))
    return tf.concat(leaves, 0) if first.shape.rank else first


def last_row(batch: Tree) -> Tree:
    """Return the last row of a batch of dense tensors."""
    return tf.nest.map_structure(lambda leaf: leaf[-1:], batch)


def is_dense(spec: Specs) -> bool:
    """Return whether batches consist of dense tensors of known ranks."""
    leaves = tf.nest.flatten(spec)
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape.rank for leaf in leaves)


def zeros(spec: Specs) -> Tree:
    """Make a row of zeros; unknown dimensions are 1."""
    return tf.nest.map_structure(
        lambda leaf: tf.zeros([1, *(size or 1 for size in leaf.shape[1:])], leaf.dtype), spec
    )


def forget_rows(batch: Tree) -> Tree:
    """Hide the number of rows from tracing, so that every rank traces the same ops.

    Slices differ by a row, and a static row count changes the graph: a constant has no gradient, so
    synchronized batch norm would call one collective fewer on some ranks and wait forever.
    """
    if tf.executing_eagerly():  # a copy, out of which a script's step may take entries
        return tf.nest.map_structure(lambda leaf: leaf, batch)
    return tf.nest.map_structure(_forget, batch)


def _forget(leaf: Leaf | None) -> Leaf | None:
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.raw_ops.PlaceholderWithDefault(input=leaf.dense_shape[0], shape=[])
        # tf.stack keeps static sizes, which layers need to be built; tf.concat does not.
        sizes = [rows, *(_size(leaf, axis) for axis in range(1, leaf.shape.rank))]
        return tf.SparseTensor(_forget(leaf.indices), _forget(leaf.values), tf.stack(sizes))
    if isinstance(leaf, tf.RaggedTensor):
        splits = tf.raw_ops.PlaceholderWithDefault(input=leaf.row_splits, shape=[None])
        return tf.RaggedTensor.from_row_splits(_forget(leaf.values), splits, validate=False)
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) or leaf.shape[0] is None:
        return leaf
    return tf.raw_ops.PlaceholderWithDefault(input=leaf, shape=[None, *leaf.shape[1:]])


def spec_of(data: Tree | Specs) -> Specs:
    """Return the specification of a batch with any number of rows."""
    return tf.nest.map_structure(_without_rows, data)


def _without_rows(leaf: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(leaf, tf.RaggedTensor | tf.RaggedTensorSpec):
        splits = leaf.row_splits_dtype if isinstance(leaf, tf.RaggedTensorSpec) else None
        splits = splits or leaf.row_splits.dtype
        return tf.RaggedTensorSpec([None, *leaf.shape[1:]], leaf.dtype, leaf.ragged_rank, splits)
    if isinstance(leaf, tf.SparseTensor | tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *leaf.shape[1:]], leaf.dtype)
    if isinstance(leaf, tf.Tensor | tf.TensorSpec):
        # Tensors from tf.py_function may have an unknown rank.
        shape = None if leaf.shape.rank is None else [None, *leaf.shape[1:]]
        return tf.TensorSpec(shape, leaf.dtype)
    return leaf


def cut_dataset(
    dataset: tf.data.Dataset,
    ranks: Sequence[int],
    size: int,
    digest: Callable[[tf.Tensor, Tree], tf.Tensor] | None = None,
    ahead: bool = True,
) -> tf.data.Dataset:
    """Cut every global batch of a dataset for the given ranks."""

    def cut_one(number: tf.Tensor, batch: Tree) -> Slices:
        slices = cut_batch(batch, ranks, size)
        return slices if digest is None else slices._replace(digest=digest(number, batch))

    return mapped(dataset.enumerate(), cut_one, ahead)


def mapped(pairs: tf.data.Dataset, function: Function[Tree], ahead: bool = True) -> tf.data.Dataset:
    """Apply a function to every pair, in order; in parallel and ahead if allowed."""
    # AutoGraph would take half a second and find nothing to convert in this file.
    function = tf.autograph.experimental.do_not_convert(function)
    if not ahead or _may_not_read_ahead(pairs):
        return pairs.map(function, synchronous=True)  # else TensorFlow makes it parallel
    parallel = pairs.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return read_ahead(parallel)


# Pipelines that end when their data does.
#
# While a pipeline is read, TensorFlow models it in a separate thread, which tunes every
# `tf.data.AUTOTUNE`: after 10 ms, then 20, 40, and so on up to a minute. Closing the pipeline wakes
# that thread and waits for its end. But the thread wakes before the flag that ends it is set. If it
# gets a core at once, it goes back to sleep, and closing waits for this sleep: about as long again
# as the pipeline was read. (`CancellationManager::StartCancel` calls back before it sets the flag
# that `model::Model::OptimizeLoop` reads; TensorFlow 2.21.) On one core this happens nearly every
# time, at the end of every epoch; with two idle cores, one time in ten. A thread waits for it
# (`dtk.compat.tf_datasets.patch_iterators`): if it happened to one of many ranks, all would wait.
#
# Without the model TensorFlow reads ahead only where a pipeline says so, runs the calls of a plain
# `map` one after the other, and takes AUTOTUNE for as many parallel calls as the process has
# threads, up to 16. So dtk disables the model only where it gains nothing: on one core, and where
# `fit` or `evaluate` gets arrays. A script that sets `autotune.enabled` decides for itself. So does
# Keras, which forbids reading ahead if a `PyDataset` has workers: they stop at the end of an epoch.


def read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Prefetch elements of a dataset, unless its options forbid it.

    Example:
        >>> list(read_ahead(tf.data.Dataset.range(3)).as_numpy_iterator())
        [0, 1, 2]
    """
    if _may_not_read_ahead(dataset):
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


def _may_not_read_ahead(dataset: tf.data.Dataset) -> bool:
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
