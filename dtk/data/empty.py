"""Datasets for ranks that get their input from another rank."""

from __future__ import annotations

from dtk.data.rows import Data, count_rows


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
