"""Rows of arrays, sequences of samples, and `tf.data`.

data                                           some of its rows            sent as
an array, or a tuple or dict of arrays         the same, with fewer rows   itself
a tf.data.Dataset of single elements           a tf.data.Dataset           Elements
a sequence of samples                          a Subset, read when asked   a list
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import tensorflow as tf

from dtk.nests import Array, Specs, Tree

# Data with rows: arrays, a sequence of samples, a dataset of single elements.
Data: TypeAlias = "Tree | Array | Sequence[object] | tf.data.Dataset"

Slice: TypeAlias = "slice[int | None, int | None, int | None]"

# Row numbers, in the wanted order.
Indices: TypeAlias = "Sequence[int] | Array"


class Subset(Sequence[object]):
    """Some items of a sequence; each is read on access.

    Example:
        >>> list(Subset("abcde", [4, 0]))
        ['e', 'a']
    """

    def __init__(self, items: Sequence[object], indices: Indices):
        self._items = items
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int | Slice) -> object:  # type: ignore[override]
        if isinstance(index, slice):
            return Subset(self._items, self._indices[index])
        return self._items[int(self._indices[index])]


class Elements(NamedTuple):
    """Elements of a `tf.data.Dataset`, kept in memory."""

    spec: Specs  # their specification
    held: list[Tree]  # the elements

    def dataset(self) -> tf.data.Dataset:
        """Return a dataset of the elements, in this order."""
        made = tf.data.Dataset.from_generator(lambda: iter(self.held), output_signature=self.spec)
        return made.apply(tf.data.experimental.assert_cardinality(len(self.held)))


def are_arrays(dataset: Data) -> bool:
    """Return whether a dataset is an array, or a tuple or dict of arrays."""
    leaves = tf.nest.flatten(dataset) if isinstance(dataset, tuple | dict) else [dataset]
    return bool(leaves) and all(isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves)


def count_rows(dataset: Data) -> int:
    """Return the number of rows, elements or samples.

    Example:
        >>> count_rows((np.zeros((4, 2)), np.zeros(4))), count_rows(["a", "b"])
        (4, 2)
    """
    if isinstance(dataset, tf.data.Dataset):
        count = int(dataset.cardinality())
        if count < 0:
            why = "whose elements TensorFlow cannot count"
            if count == tf.data.INFINITE_CARDINALITY:
                why = "without end"
            raise ValueError(
                f"a dataset {why} has no known rows; use take, or "
                "tf.data.experimental.assert_cardinality"
            )
        return count
    if not are_arrays(dataset):
        return len(_sequence(dataset))
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(dataset)]
    if len({shape[:1] for shape in shapes}) > 1 or not shapes[0]:
        raise ValueError(
            f"arrays of shapes {shapes} do not hold the same rows along their first axis; a list "
            "of them is taken for a list of samples"
        )
    return shapes[0][0]


def empty_dataset(dataset: Data) -> list[tuple[()]]:
    """Return as many empty elements as a dataset has.

    This is ChainerMN's `create_empty_dataset`: in a chain of stages only the first rank reads
    inputs. The other ranks loop over the empty elements, and so take as many steps without reading
    or holding a row.

    Args:
        dataset: An array, a tuple or dict of arrays, a sequence, or a `tf.data.Dataset`.

    Returns:
        A list of empty tuples, one for each row.

    Raises:
        ValueError: The dataset's rows cannot be counted.

    Example:
        >>> import numpy as np
        >>> empty_dataset(np.zeros((3, 28, 28)))
        [(), (), ()]
    """
    return [()] * count_rows(dataset)


def take(dataset: Data, indices: Indices) -> Data:
    """Return some rows.

    Example:
        >>> take(np.arange(5) * 10, np.array([4, 0])).tolist()
        [40, 0]
    """
    if isinstance(dataset, tf.data.Dataset):
        if isinstance(indices, range):
            return dataset.skip(indices.start).take(len(indices))
        return unpack(pack(dataset, [indices])[0])
    if are_arrays(dataset):
        return tf.nest.map_structure(lambda leaf: _take_array(leaf, indices), dataset)
    return Subset(_sequence(dataset), indices)


def _sequence(dataset: Data) -> Sequence[object]:
    # Neither arrays nor a dataset. If it is not a sequence either, reading raises.
    return cast(Sequence[object], dataset)


def _take_array(array: Array | tf.Tensor, indices: Indices) -> Array | tf.Tensor:
    if isinstance(indices, range):
        return array[indices.start : indices.stop]
    return tf.gather(array, indices) if isinstance(array, tf.Tensor) else array[indices]


def _read(dataset: tf.data.Dataset, indices: Iterable[int]) -> dict[int, Tree]:
    """Read the elements at some positions, in one pass."""
    specs = tf.nest.flatten(dataset.element_spec)
    if odd := [spec for spec in specs if not isinstance(spec, tf.TensorSpec)]:
        raise ValueError(
            f"elements of {type(odd[0]).__name__} cannot be kept in memory; make such a dataset on "
            "every rank and scatter it without shuffle"
        )
    wanted = set(indices)
    return {index: element for index, element in enumerate(dataset) if index in wanted}


def pack(dataset: Data, blocks: Sequence[Indices]) -> list[Data | Elements]:
    """Return several blocks of rows, each as a value that can be sent; `unpack` undoes it."""
    if isinstance(dataset, tf.data.Dataset):
        held = _read(dataset, {index for block in blocks for index in block})
        return [Elements(dataset.element_spec, [held[i] for i in block]) for block in blocks]
    if are_arrays(dataset):
        return [take(dataset, block) for block in blocks]
    return [list(Subset(_sequence(dataset), block)) for block in blocks]


def unpack(packed: Data | Elements) -> Data:
    """Undo `pack` for one of its values."""
    return packed.dataset() if isinstance(packed, Elements) else packed
