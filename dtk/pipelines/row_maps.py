"""Cut batches before a script maps its rows, so that a rank maps only the rows that it keeps.

If a pipeline ends in `.map(decode).batch(n)` and the map's result depends on the row only, these
two give a rank the same rows, and the second decodes no row in vain:

    rows  ->  decode all  ->  batches of n  ->  own slice of each
    rows  ->  batches of n  ->  own slice of each  ->  rows  ->  decode own  ->  own batches

A rank has the same number of rows in every batch except the last, which ends the data: its batches
are as long as its slice of n rows, and the rows left at the end are its slice of the last batch. A
slice without rows is a padding row in both.

Ranks compare a digest of each batch's rows before they are mapped, plus `salt`, a hash of the
numbers that the functions hold.

Keras takes a batch from arrays by the numbers of its rows; there a rank cuts the numbers, and
digests are of the numbers and of rows that all ranks take.

A `tf.data` function is a graph. It is pure if it holds no resource, and if no op in it, or in a
function that it calls, is registered as stateful. TensorFlow's random ops, variables, tables and
Python functions are stateful; reading a file is not, here as in TensorFlow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.even_division import even_sizes
from dtk.input import digests, slicing
from dtk.nests import Tree

# Takes the number of a batch and the batch; returns its digest.
Digest = Callable[[tf.Tensor, Tree], tf.Tensor]


class RowMaps(NamedTuple):
    """A pipeline of batches, taken apart."""

    # dataset of rows, before they are mapped; dense, and each of the same shape
    rows: tf.data.Dataset
    size: int  # rows of a batch
    # makes batches of the given size, as the pipeline does
    batch: Callable[[tf.data.Dataset, int], tf.data.Dataset]
    # maps the second part of a dataset's pairs, as the pipeline maps rows
    apply: Callable[[tf.data.Dataset], tf.data.Dataset]
    # repeats on a dataset of batches the pipeline's operations after `batch`
    behind: Callable[[tf.data.Dataset], tf.data.Dataset]
    salt: int  # hash of the numbers that the functions hold, int64
    why: str | None = None  # why all ranks map all rows by other functions


class ArrayRows(NamedTuple):
    """A pipeline that takes batches from arrays by the numbers of their rows."""

    numbers: tf.data.Dataset  # batches of numbers, each with the arrays
    why: None = None


def cut_before_maps(
    maps: RowMaps | ArrayRows,
    rank: int,
    size: int,
    digest: Digest | None = None,
    ahead: bool = True,
) -> tf.data.Dataset:
    """Cut every global batch for a rank, before its rows are mapped."""
    if isinstance(maps, ArrayRows):

        def take(number: tf.Tensor, element: tuple[tf.Tensor, Tree]) -> slicing.Slices:
            numbers, arrays = element
            slices = slicing.cut_batch(numbers, (rank,), size)
            slices = slices._replace(parts=tuple(_taken(arrays, part) for part in slices.parts))
            if digest is None:
                return slices
            return slices._replace(digest=digest(number, _to_digest(number, numbers, arrays)))

        return slicing.mapped(maps.numbers.enumerate(), take, ahead)

    def as_slices(about: tf.Tensor, part: Tree) -> slicing.Slices:
        rows, count, batch_digest = tf.unstack(about[0])
        known = slicing.UNKNOWN if digest is None else batch_digest
        return slicing.Slices((part,), (count,), rows, known)

    return slicing.mapped(_own_batches(maps, rank, size, digest), as_slices, ahead)


def _own_batches(maps: RowMaps, rank: int, size: int, digest: Digest | None) -> tf.data.Dataset:
    """Return batches of one rank's rows, with (rows, own rows, digest) repeated for each row."""

    @tf.autograph.experimental.do_not_convert
    def cut(number: tf.Tensor, batch: Tree) -> tuple[tf.Tensor, Tree]:
        parts, counts, rows, _ = slicing.cut_batch(batch, (rank,), size)
        batch_digest = tf.constant(maps.salt, tf.int64)
        if digest is not None:
            batch_digest += digest(number, batch)
        about = tf.stack([rows, counts[0], batch_digest])
        return tf.repeat(about[None], slicing.count_rows(parts[0]), axis=0), parts[0]

    whole = maps.batch(maps.rows, maps.size)
    # Not in parallel: a stream that shuffles must not be read further ahead than the script does.
    own = maps.apply(whole.enumerate().map(cut).unbatch())
    return maps.behind(maps.batch(own, max(even_sizes(maps.size, size)[rank], 1)))


def _taken(arrays: Tree, numbers: tf.Tensor) -> Tree:
    return tf.nest.map_structure(
        lambda array: None if array is None else tf.gather(array, numbers), arrays
    )


def _to_digest(number: tf.Tensor, numbers: tf.Tensor, arrays: Tree) -> Tree:
    some = [
        tf.gather(array, digests.rows_to_digest(number, numbers, array.shape[1:].num_elements()))
        for array in tf.nest.flatten(arrays)
        if array is not None
    ]
    return numbers, some


def salt_of(functions: Sequence[tf.types.experimental.ConcreteFunction]) -> int:
    """Hash the numbers that functions hold, to find ranks with different numbers.

    Strings are left out: each rank may have its files in another folder.
    """
    salt = hashlib.blake2b(digest_size=8)
    for function in functions:
        graph = function.graph.as_graph_def()
        # Called functions are in the order of their names, which may differ by rank: sort by hash.
        inner = sorted(_numbers_of(one.node_def) for one in graph.library.function)
        salt.update(b"".join([_numbers_of(graph.node), *inner]))
        for tensor in function.captured_inputs:
            if tensor.dtype not in (tf.string, tf.resource, tf.variant):
                salt.update(tf.io.serialize_tensor(tensor).numpy())
    return int.from_bytes(salt.digest(), "big", signed=True)


def _numbers_of(nodes: Iterable[tf.compat.v1.NodeDef]) -> bytes:
    """Hash the constants of a graph that are not strings."""
    hasher = hashlib.blake2b(digest_size=8)
    for node in nodes:
        value = node.attr["value"].tensor
        if node.op == "Const" and value.dtype != tf.string.as_datatype_enum:
            hasher.update(value.SerializeToString(deterministic=True))
    return hasher.digest()
