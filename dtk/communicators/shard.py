"""The part of a tensor that a rank of a group holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.errors import at_rank
from dtk.even_division import even_sizes
from dtk.nests import Array


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of a tensor that this rank holds, and how to find the whole.

    Parts of neighbouring ranks follow each other along `axis`, without overlap.

    Example:
        >>> from dtk.communicators import LocalCommunicator
        >>> shard = Shard.evenly(8, axis=1, communicator=LocalCommunicator())
        >>> shard.sizes, shard.offset, shard.whole_shape([3, 8])
        ((8,), 0, (3, 8))
    """

    axis: int
    sizes: tuple[int, ...]
    communicator: Communicator

    def __post_init__(self) -> None:
        """Check that axis and sizes fit."""
        rank, size = self.communicator.rank, self.communicator.size
        if self.axis < 0:
            raise ValueError(
                at_rank(rank, f"axis={self.axis} of a shard; count axes from 0, not from the end")
            )
        if len(self.sizes) != size or min(self.sizes) < 0:
            message = (
                f"a shard got sizes {list(self.sizes)}; it takes one length, 0 or more, for "
                f"each of {size} ranks"
            )
            raise ValueError(at_rank(rank, message))

    @classmethod
    def evenly(cls, length: int, axis: int, communicator: Communicator) -> Shard:
        """Divide an axis as evenly as can be; the first ranks get one more."""
        return cls(axis, tuple(even_sizes(length, communicator.size)), communicator)

    @property
    def size(self) -> int:
        """Length of this rank's part."""
        return self.sizes[self.communicator.rank]

    @property
    def offset(self) -> int:
        """First position of this rank's part in the whole axis."""
        return sum(self.sizes[: self.communicator.rank])

    @property
    def length(self) -> int:
        """Length of the whole axis."""
        return sum(self.sizes)

    def whole_shape(self, part_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the whole tensor."""
        return self._with_axis(part_shape, self.size, self.length)

    def part_shape(self, whole_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of this rank's part."""
        return self._with_axis(whole_shape, self.length, self.size)

    def part(self, whole: tf.Tensor | Array) -> tf.Tensor:
        """Cut this rank's part out of a tensor; nothing is sent."""
        whole = tf.convert_to_tensor(whole)
        self._with_axis(whole.shape.as_list(), self.length, self.size)
        before = (slice(None),) * self.axis
        return whole[(*before, slice(self.offset, self.offset + self.size))]

    def whole(self, part: tf.Tensor | Array) -> tf.Tensor:
        """Gather the whole tensor; every rank of the group calls it.

        Each rank sends its part once. All ranks know the sizes, so these are not sent.
        """
        part = tf.convert_to_tensor(part)
        self._with_axis(part.shape.as_list(), self.size, self.length)
        if self.communicator.size == 1:
            return tf.identity(part)
        # Gather flat parts: moving the axis to the front and back would copy the whole twice.
        shape = tf.shape(part, tf.int64)
        before, behind = shape[: self.axis], shape[self.axis + 1 :]
        shapes = [tf.concat([before, [size], behind], 0) for size in self.sizes]
        counts = tf.stack([tf.reduce_prod(one) for one in shapes])
        gathered = self.communicator.allgather(tf.reshape(part, [-1]), counts)
        parts = tf.split(gathered, counts, num=len(self.sizes))
        whole = tf.concat(
            [tf.reshape(one, shape) for one, shape in zip(parts, shapes, strict=True)], self.axis
        )
        return tf.ensure_shape(whole, self.whole_shape(part.shape.as_list()))

    def _with_axis(
        self, shape: Sequence[int | None], expected: int, becomes: int
    ) -> tuple[int | None, ...]:
        if self.axis >= len(shape) or shape[self.axis] not in (None, expected):
            message = (
                f"a tensor of shape {tuple(shape)}; axis {self.axis} should have length "
                f"{expected}, where ranks hold {list(self.sizes)}"
            )
            raise ValueError(at_rank(self.communicator.rank, message))
        return (*shape[: self.axis], becomes, *shape[self.axis + 1 :])


@dataclasses.dataclass(frozen=True)
class FlatShard(Shard):
    """The elements of a tensor that this rank holds, of the tensor as one row; of any shape there.

    Example:
        >>> from dtk.communicators import LocalCommunicator
        >>> shard = FlatShard(0, (6,), LocalCommunicator(), (2, 3))
        >>> shard.whole(tf.range(6)).shape
        TensorShape([2, 3])
    """

    shape: tuple[int, ...] = ()  # of the whole tensor

    def whole_shape(self, part_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the whole tensor."""
        return self.shape

    def part(self, whole: tf.Tensor | Array) -> tf.Tensor:
        """Cut this rank's elements out of a tensor, as one row; nothing is sent."""
        return super().part(tf.reshape(whole, [-1]))

    def whole(self, part: tf.Tensor | Array) -> tf.Tensor:
        """Gather the whole tensor; every rank of the group calls it."""
        flat = tf.reshape(part, [-1])
        return tf.reshape(self.communicator.allgather(flat, self.sizes), self.shape)


@dataclasses.dataclass(frozen=True)
class OneRanks:
    """A tensor that only one rank of a group holds, like the weights of a pipeline's stage."""

    owner: int
    communicator: Communicator
