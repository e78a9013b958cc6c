"""The rule that divides rows, cores and the like: evenly, with one more for the first parts.

10 over 3   ->   4 3 3   ->   [0, 4) [4, 7) [7, 10)
 2 over 3   ->   1 1 0   ->   [0, 1) [1, 2) [2, 2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf

# A number: an int, or a tensor of a graph.
CountT = TypeVar("CountT", int, "tf.Tensor")


def even_sizes(count: int, parts: int) -> list[int]:
    """Return the size of each part.

    Example:
        >>> even_sizes(8, 3), even_sizes(1, 2)
        ([3, 3, 2], [1, 0])
    """
    each, left = divmod(count, parts)
    return [each + (part < left) for part in range(parts)]


def even_sizes_in_graph(count: tf.Tensor, parts: int) -> tf.Tensor:
    """Compute `even_sizes` for an int64 scalar in a graph."""
    import tensorflow as tf  # not at the top: launchers divide cores without loading TensorFlow

    number = tf.range(parts, dtype=tf.int64)
    return count // parts + tf.cast(number < count % parts, tf.int64)


def even_bounds(count: CountT, part: int, parts: int) -> tuple[CountT, CountT]:
    """Return where a part begins and ends; tensors if the count is a tensor.

    Example:
        >>> [even_bounds(10, part, 3) for part in range(3)]
        [(0, 4), (4, 7), (7, 10)]
    """
    each, left = count // parts, count % parts
    if isinstance(count, int):
        return part * each + min(part, left), (part + 1) * each + min(part + 1, left)
    import tensorflow as tf

    def longer(before: int) -> tf.Tensor:
        return tf.minimum(tf.cast(before, left.dtype), left)

    return part * each + longer(part), (part + 1) * each + longer(part + 1)
