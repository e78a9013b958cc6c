"""Data to predict, cut into batches and batches into parts, of which each rank reads its own.

data                                        a batch is                      a rank reads
arrays, memory maps, structures of them     `batch_size` rows               its own batches alone
a keras.utils.PyDataset                     what `data[index]` returns      its own batches alone
a function of an index, and `steps`         what `data(index)` returns      its own batches alone
a tf.data.Dataset of batches                an element                      all, and skips most

A part is some successive batches, and one file of each output. Its batches are cut in one way
whatever the number of ranks, so that a row is always computed in the same company.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.compat import tf_datasets
from dtk.compat.keras_data import as_tensors
from dtk.even_division import even_sizes
from dtk.input import digests, slicing
from dtk.nests import Array, Tree

# Whatever can be predicted to disk.
Data: TypeAlias = "Tree | Array | tf.data.Dataset | keras.utils.PyDataset | Callable[[int], Tree]"
# The parts that a rank predicts: number -> batches.
Parts: TypeAlias = "Iterator[tuple[int, Iterator[Tree]]]"

# Batch size of arrays when nothing is said, as Keras's.
_BATCH_SIZE = 32


class IndexedSource:
    """Batches that are read by their index, in any order."""

    read = None  # ranks read apart

    def __init__(
        self,
        kind: str,
        steps: int,
        batch: Callable[[int], Tree],
        batch_size: int | None = None,
        rows: int | None = None,
    ):
        self.kind, self.steps, self.rows, self.batch_size = kind, steps, rows, batch_size
        self.batch = lambda index: as_tensors(batch(index))

    def first(self) -> Tree:
        return self.batch(0)

    def digest(self) -> int:
        """Return a digest of the first batch, one in the middle, and the last."""
        found = tf.constant(0, tf.int64)
        for index in sorted({0, self.steps // 2, self.steps - 1}):
            found = digests.add(found, digests.digest(_inputs(self.batch(index))))
        return int(found)

    def parts_of(self, rank: int, size: int, done: Collection[int], per_part: int) -> Parts:
        """Read a block of the parts that are left: neighbours, so that a disk reads on."""
        left = [part for part in range(-(-self.steps // per_part)) if part not in done]
        sizes = even_sizes(len(left), size)
        first = sum(sizes[:rank])
        for part in left[first : first + sizes[rank]]:
            indices = range(part * per_part, min((part + 1) * per_part, self.steps))
            yield part, map(self.batch, indices)


class StreamSource:
    """Batches of a `tf.data.Dataset`, which every rank reads from the first to the last."""

    kind, batch_size, rows = "dataset", None, None

    def __init__(self, dataset: tf.data.Dataset):
        self._dataset = dataset
        count = int(dataset.cardinality())
        self.steps = count if count >= 0 else None  # None where only reading tells
        self.read = (0, 0)  # batches that `parts_of` has read, and their digest

    def first(self) -> Tree:
        return next(iter(self._dataset))

    def digest(self) -> int:
        """Return a digest of the first batch."""
        return int(digests.digest(_inputs(self.first())))

    def parts_of(self, rank: int, size: int, done: Collection[int], per_part: int) -> Parts:
        """Read everything, and yield every `size`-th of the parts that are left."""
        turn = 0
        for part, group in itertools.groupby(self._observed(), lambda each: each[0] // per_part):
            if part not in done:
                if turn % size == rank:
                    yield part, (batch for _, batch in group)
                turn += 1

    def _observed(self) -> Iterator[tuple[int, Tree]]:
        digest = tf.constant(0, tf.int64)
        for number, batch in enumerate(self._dataset):
            found = digests.digest_of(tf.constant(number, tf.int64), _inputs(batch))
            digest = digests.add(digest, found)
            self.read = number + 1, int(digest)
            yield number, batch


# Batches in a fixed order, the same on every rank and in every run.
Source: TypeAlias = IndexedSource | StreamSource


def _inputs(batch: Tree) -> Tree:
    """Return what a batch is predicted from: targets and weights may change."""
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def source_of(data: Data, batch_size: int | None = None, steps: int | None = None) -> Source:
    """Return the batches of any data that can be predicted to disk."""
    has_batches = isinstance(data, tf.data.Dataset | keras.utils.PyDataset) or callable(data)
    if has_batches and batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} with a {type(data).__name__}, which has batches of its own; "
            "leave batch_size out, and make its batches of that size"
        )
    if steps is not None and (not callable(data) or isinstance(data, keras.utils.PyDataset)):
        raise ValueError(
            f"steps={steps} belongs to a function from an index to a batch; a "
            f"{type(data).__name__} knows its own number"
        )
    if isinstance(data, tf_datasets.PerRankDataset):
        raise ValueError(
            "a dataset of dtk.data.shard holds this rank's own rows; give every rank the whole "
            "dataset, or file names by a function: predict_to_disk divides the work itself"
        )
    if isinstance(data, tf.data.Dataset):
        if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "the dataset has no end, so its predictions would fill the disk; leave out "
                "repeat(), or end it with take(steps)"
            )
        if int(data.cardinality()) == 0:
            raise ValueError("the dataset has no batch to predict; check what it is made of")
        slicing.check_rows(data.element_spec)
        return StreamSource(data)
    if isinstance(data, keras.utils.PyDataset):
        kind, batch, steps = "PyDataset", data.__getitem__, data.num_batches
    elif callable(data):
        kind, batch = "function", data
    else:
        return _of_arrays(data, _BATCH_SIZE if batch_size is None else batch_size)
    if steps is None:
        raise ValueError(
            f"how many batches has the {kind}? give steps=... for a function, and a PyDataset "
            "whose __len__ is a number"
        )
    if steps < 1:
        raise ValueError(f"the {kind} has {steps} batches, and 1 or more are needed")
    return IndexedSource(kind, steps, batch)


def _of_arrays(arrays: Tree | Array, batch_size: int) -> IndexedSource:
    leaves = tf.nest.flatten(arrays)
    if not leaves or not all(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
        names = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"data to predict is made of {', '.join(names) or 'nothing'}; give arrays with rows "
            "(or a structure of them), a tf.data.Dataset of batches, a keras.utils.PyDataset, or a "
            "function from an index to a batch"
        )
    counts = [int(leaf.shape[0]) for leaf in leaves]
    if len(set(counts)) > 1 or counts[0] == 0:
        raise ValueError(
            f"the arrays to predict have {counts} rows; give all of them the same number, 1 or more"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}, but a batch has 1 row or more")
    rows = counts[0]

    def batch(index: int) -> Tree:
        begin, end = index * batch_size, min((index + 1) * batch_size, rows)
        return (tf.nest.map_structure(lambda leaf: leaf[begin:end], arrays),)

    return IndexedSource("arrays", -(-rows // batch_size), batch, batch_size, rows)
