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

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.costs import BUCKET_MOST, Costs

DEFAULT_LIMIT = BUCKET_MOST
# Computation hides all but the last bucket of a list, but each bucket costs a latency.
_SEVERAL = 4
_LEAST = 2**18


def plan(dtypes: Sequence[tf.DType], sizes: Sequence[int | None], limit: int) -> list[list[int]]:
    """Return the tensors of each bucket, from dtypes and static sizes, equal on all ranks."""
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
    return buckets


def limit_for(
    tensors: Sequence[tf.Tensor], most: int = DEFAULT_LIMIT, costs: Costs | None = None
) -> int:
    """Return the bytes of a bucket, so that a list travels in a few buckets.

    Example:
        >>> limit_for([tf.zeros([2**20])] * 2) // 2**20  # 8 MiB in all
        2
    """
    total = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
    return min(most, costs.bucket(total) if costs else max(_LEAST, -(-total // _SEVERAL)))


def pack(
    tensors: Sequence[tf.Tensor], limit: int = DEFAULT_LIMIT
) -> tuple[list[tf.Tensor], list[list[int]]]:
    """Return one-dimensional buckets of one dtype each, and which tensors each one holds."""
    layout = plan([t.dtype for t in tensors], [t.shape.num_elements() for t in tensors], limit)
    flat = [tf.reshape(t, [-1]) for t in tensors]
    return [
        flat[members[0]] if len(members) == 1 else tf.concat([flat[i] for i in members], axis=0)
        for members in layout
    ], layout


def unpack(
    buckets: Sequence[tf.Tensor], like: Sequence[tf.Tensor], layout: Sequence[Sequence[int]]
) -> list[tf.Tensor]:
    """Cut buckets, of any dtype, into tensors with the shapes of `like`; static shapes are kept."""
    tensors: list[tf.Tensor | None] = [None] * len(like)
    for bucket, members in zip(buckets, layout, strict=True):
        sizes = [like[i].shape.num_elements() for i in members]
        parts = [bucket] if len(members) == 1 else tf.split(bucket, sizes)
        for index, part in zip(members, parts, strict=True):
            tensors[index] = shaped_like(part, like[index])
    return tensors


def shaped_like(flat: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Give `flat` the shape of `like`; static dimensions stay static."""
    if like.shape.is_fully_defined():
        return tf.reshape(flat, like.shape)
    return tf.ensure_shape(tf.reshape(flat, tf.shape(like)), like.shape)
