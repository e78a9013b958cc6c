"""Send the gradients of matrices as two factors, and multiply the factors on every rank.

The gradient of a Dense layer's kernel is the product of the layer's inputs x and the gradients d of
its outputs, with one row for each row of the batch:

    g = x' d,   x: [rows, m],   d: [rows, n],   g: [m, n]

The sum over ranks is the product of all ranks' rows, stacked. So ranks may send their rows, (m + n)
numbers each, in place of m n numbers, and multiply the rows they receive: the same sum, in another
order. With few rows there is far less to send, and a little more to compute. If processors are
alike (`Communicator.alike`), the product has the same bits on all ranks.

Source: Xie et al., "Lighter-Communication Distributed Machine Learning via Sufficient Factor
Broadcasting", UAI 2016; layer by layer, where it pays: Zhang et al., "Poseidon", USENIX ATC 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from dtk import placement
from dtk.communicators.base import Communicator
from dtk.communicators.costs import FLOPS_PER_BYTE

# A kernel with fewer entries is sent with the rest.
_FEW = 1 << 14


class Factored(NamedTuple):
    """A gradient that is the product of two matrices, `left' right`."""

    left: tf.Tensor  # shape (rows, m)
    right: tf.Tensor  # shape (rows, n)

    @property
    def entries(self) -> int:
        """Number of entries of the product: m n."""
        return self.left.shape[1] * self.right.shape[1]

    @property
    def width(self) -> int:
        """Numbers in one row of both factors: m + n."""
        return self.left.shape[1] + self.right.shape[1]

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the product: (m, n)."""
        return tf.TensorShape([self.left.shape[1], self.right.shape[1]])

    @property
    def dtype(self) -> tf.DType:
        """Dtype of the product."""
        return self.left.dtype

    def product(self) -> tf.Tensor:
        """Return the gradient, of shape (m, n)."""
        return tf.matmul(self.left, self.right, transpose_a=True)


# Sums tensors over all ranks, given the places of their gradients.
_Whole: TypeAlias = Callable[[Sequence[int], list[tf.Tensor]], list[tf.Tensor]]
# Multiplies the factors of all ranks, given the place of their gradient.
_Product: TypeAlias = Callable[[int, Factored], tf.Tensor]


def factored(
    gradient: tf.Tensor | tf.IndexedSlices | None,
) -> tf.Tensor | tf.IndexedSlices | Factored | None:
    """Return a gradient's factors, if a graph computes it as a product; else the gradient.

    Ops that only compute the product then do not run.

    Example:
        >>> @tf.function
        ... def is_factored(x, kernel):
        ...     with tf.GradientTape() as tape:
        ...         tape.watch(kernel)
        ...         loss = tf.reduce_sum(x @ kernel)
        ...     return isinstance(factored(tape.gradient(loss, kernel)), Factored)
        >>> bool(is_factored(tf.ones([8, 256]), tf.ones([256, 64])))
        True
    """
    if not isinstance(gradient, tf.Tensor) or tf.executing_eagerly():
        return gradient
    operation = gradient.op
    while operation.type in ("EnsureShape", "Identity"):
        operation = operation.inputs[0].op
    if operation.type != "MatMul" or operation.graph is not tf.compat.v1.get_default_graph():
        return gradient
    if not operation.get_attr("transpose_a") or operation.get_attr("transpose_b"):
        return gradient
    factors = Factored(*operation.inputs)
    if None in (factors.left.shape[1], factors.right.shape[1]) or factors.entries < _FEW:
        return gradient
    return factors if all(_is_row_per_example(f) for f in factors) else gradient


def _is_row_per_example(factor: tf.Tensor) -> bool:
    """Return whether a factor has one row per row of the batch, not one per place of a sequence."""
    if factor.op.type != "Reshape":
        return True
    before = factor.op.inputs[0].shape
    return bool(before.rank) and before[1:].num_elements() == factor.shape[1]


def reduce_products(
    gradients: dict[int, Factored],
    communicator: Communicator,
    whole: _Whole,
    product: _Product,
    in_parts: bool = False,
) -> dict[int, tf.Tensor]:
    """Sum gradients over all ranks, as factors if that is faster with this many rows.

    With `in_parts`, `whole` and `product` return only this rank's part of each sum.
    """
    results: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(g.dtype for g in gradients.values()):  # a message has one dtype
        alike = {i: g for i, g in gradients.items() if g.dtype == dtype}
        reduced = _reduce_alike(alike, communicator, whole, product, in_parts)
        results.update(zip(alike, reduced, strict=True))
    return results


def _reduce_alike(
    gradients: dict[int, Factored],
    communicator: Communicator,
    whole: _Whole,
    product: _Product,
    in_parts: bool,
) -> list[tf.Tensor]:
    places, factors = list(gradients), list(gradients.values())
    counts = _row_counts(factors, communicator)
    costs = communicator.costs
    with tf.device(placement.host()):
        flops_per_byte = costs.flops_per_byte if costs else FLOPS_PER_BYTE
        pays = _pays(factors, counts, flops_per_byte, in_parts)
    return tf.cond(
        pays,
        lambda: list(map(product, places, _gathered(factors, counts, communicator))),
        lambda: whole(places, [g.product() for g in factors]),
    )


def _row_counts(gradients: list[Factored], communicator: Communicator) -> tf.Tensor:
    """Return each rank's number of rows for each gradient: shape (size, gradients), int64."""
    shapes = [tf.shape(g.left, tf.int64) for g in gradients]  # on the host it would take all there
    with tf.device(placement.host()):
        mine = tf.stack([shape[0] for shape in shapes])
    with communicator.concurrent("rows"):  # known long before the gradients
        return communicator.allgather(mine[None], [1] * communicator.size)


def _pays(
    gradients: list[Factored], counts: tf.Tensor, flops_per_byte: float, in_parts: bool = False
) -> tf.Tensor:
    """Return whether sending factors is faster than the sums; the same on all ranks."""
    # An all-gather waits for the rank with the most rows, as if all ranks had as many.
    rows = tf.unstack(counts.shape[0] * tf.cast(tf.reduce_max(counts, 0), tf.float32))
    # A rank multiplies its own rows either way; or as much, if it multiplies all for its part.
    others = 0.0 if in_parts else 1.0 - 1.0 / counts.shape[0]
    factors = [
        n * (g.width * g.left.dtype.size + 2.0 * g.entries * others / flops_per_byte)
        for n, g in zip(rows, gradients, strict=True)
    ]
    # An all-reduce sends everything twice, a reduce-scatter once.
    times = 1.0 if in_parts else 2.0
    whole = [times * g.entries * g.left.dtype.size for g in gradients]
    return tf.add_n(factors) < sum(whole)


def _gathered(
    gradients: list[Factored], counts: tf.Tensor, communicator: Communicator
) -> list[Factored]:
    """Gather all ranks' rows in one message; stack each gradient's rows in rank order."""
    joined = tf.concat([tf.reshape(f, [-1]) for g in gradients for f in g], 0)
    with tf.device(placement.host()):
        widths = tf.constant([g.width for g in gradients], tf.int64)
        sizes = tf.linalg.matvec(counts, widths)
        lengths = [
            counts[rank, i] * f.shape[1]
            for rank in range(communicator.size)
            for i, g in enumerate(gradients)
            for f in g
        ]
        splits = tf.stack(lengths)
    everything = communicator.allgather(joined, sizes)
    parts = tf.split(everything, splits, num=len(lengths))
    matrices = [
        tf.reshape(tf.concat(parts[i :: 2 * len(gradients)], 0), [-1, f.shape[1]])
        for i, f in enumerate(f for g in gradients for f in g)
    ]
    return [Factored(*pair) for pair in zip(matrices[::2], matrices[1::2], strict=True)]
