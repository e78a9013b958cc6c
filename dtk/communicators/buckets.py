"""Packing: many tensors in few flat buckets, and back.

A collective costs a fixed latency, and packing costs a copy at memory speed. Three hundred biases
one by one pay the latency three hundred times; one bucket for everything copies the large tensors
needlessly. So small neighbours of one dtype share a bucket, and a tensor as large as the limit is a
bucket by itself, without a copy.

    tensors   a:f32[3]  b:f16[4]  c:f32[2,2]  d:f32[9]         limit = 8 floats
    buckets   [a a a c c c c]  [b b b b]  [d d d d d d d d d]

A bucket is sent as soon as its own tensors are ready. So the first buckets travel while the other
tensors are still being computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.costs import BUCKET_MOST, Costs

DEFAULT_LIMIT = BUCKET_MOST
# Computation hides all but the last bucket of a list, but each bucket costs a latency.
_SEVERAL = 4
_LEAST = 2**18


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Places of tensors in buckets."""

    members: tuple[tuple[int, ...], ...]  # for each bucket the indices of its tensors, in order
    # elements of each tensor; None if its static shape is not known
    sizes: tuple[int | None, ...]


def plan(dtypes: Sequence[tf.DType], sizes: Sequence[int | None], limit: int) -> BucketLayout:
    """Decide the buckets from dtypes and static sizes, which are equal on all ranks."""
    if limit < 1:
        raise ValueError(f"a bucket must hold at least 1 byte, got a limit of {limit}")
    buckets: list[list[int]] = []
    open_bucket: dict[tf.DType, tuple[list[int], int]] = {}  # dtype -> (bucket, bytes in it)
    for index, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True)):
        if size is None or size * dtype.size >= limit:
            buckets.append([index])
            continue
        bucket, filled = open_bucket.get(dtype, ([], 0))
        if bucket and filled + size * dtype.size > limit:
            bucket, filled = [], 0
        if not bucket:
            buckets.append(bucket)
        bucket.append(index)
        open_bucket[dtype] = (bucket, filled + size * dtype.size)
    return BucketLayout(tuple(tuple(bucket) for bucket in buckets), tuple(sizes))


def limit_for(
    tensors: Sequence[tf.Tensor], most: int = DEFAULT_LIMIT, costs: Costs | None = None
) -> int:
    """Return the bytes of a bucket, so that a list travels in a few buckets.

    Example:
        >>> limit_for([tf.zeros([2**20])] * 2) // 2**20  # 8 MiB in all
        2
    """
    sizes = zip(static_sizes(tensors), tensors, strict=True)
    total = sum(size * tensor.dtype.size for size, tensor in sizes if size)
    return min(most, costs.bucket(total) if costs else max(_LEAST, -(-total // _SEVERAL)))


def pack(
    tensors: Sequence[tf.Tensor], limit: int = DEFAULT_LIMIT
) -> tuple[list[tf.Tensor], BucketLayout]:
    """Flatten `tensors` into one-dimensional buckets of one dtype each."""
    layout = plan([t.dtype for t in tensors], static_sizes(tensors), limit)
    return [_join([tensors[i] for i in members]) for members in layout.members], layout


def unpack(
    buckets: Sequence[tf.Tensor], like: Sequence[tf.Tensor], layout: BucketLayout
) -> list[tf.Tensor]:
    """Cut buckets, of any dtype, into tensors with the shapes of `like`; static shapes are kept."""
    tensors: list[tf.Tensor | None] = [None] * len(layout.sizes)
    for bucket, members in zip(buckets, layout.members, strict=True):
        if len(members) == 1:
            parts = [bucket]
        else:
            parts = tf.split(bucket, [layout.sizes[i] for i in members])
        for index, part in zip(members, parts, strict=True):
            tensors[index] = shaped_like(part, like[index])
    return tensors


def static_sizes(tensors: Sequence[tf.Tensor]) -> list[int | None]:
    """Return each tensor's number of elements; None if its static shape is not known."""
    return [math.prod(t.shape) if t.shape.is_fully_defined() else None for t in tensors]


def shaped_like(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Give `flat` the shape of `like`; static dimensions stay static."""
    if like.shape.is_fully_defined():
        return tf.reshape(flat, like.shape)
    return tf.ensure_shape(tf.reshape(flat, tf.shape(like)), like.shape)


def _join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
