"""Send every gradient whole in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.contract import BatchPart, Exchange, ExchangeOp, Gradient, Update
from dtk.exchange.factors import Factored, reduce_products

_DTYPES = ("float16", "bfloat16")
_NAMES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class DenseOp(ExchangeOp):
    """An all-reduce, or an all-gather of a gradient's factors if that is faster; see `factors`.

    Rows of tables (`tf.IndexedSlices`) and factors keep their dtype: they are few.
    """

    exchange: Dense
    in_parts = False  # whether each rank gets its part of sums only

    def prepare(self) -> None:
        """See `ExchangeOp.prepare`."""
        # Every rank multiplies factors by itself: different processors may differ in the last bit.
        self.factors = self.exchange.factors and self.communicator.alike
        self.exact = self.exchange.dtype is None and not self.in_parts

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`."""
        # Last layers first: their gradients are ready first and are sent during the backward pass.
        backwards = range(len(gradients))[::-1]
        products = [i for i in backwards if isinstance(gradients[i], Factored)]
        others = [i for i in backwards if i not in products]
        results: list[Gradient] = list(gradients)
        with self.communicator.concurrent("rest") if products else contextlib.nullcontext():
            totals = self._sums(others, [gradients[i] for i in others])
        product_totals = reduce_products(
            {i: gradients[i] for i in products},
            self.communicator,
            self._sums,
            self._product,
            self.in_parts,
        )
        for i, total in (*zip(others, totals, strict=True), *product_totals.items()):
            results[i] = total
        return results, None

    def _product(self, place: int, factors: Factored) -> tf.Tensor:
        """Multiply the factors of all ranks."""
        del place
        return factors.product()

    def _sums(
        self, places: Sequence[int], gradients: Sequence[Gradient]
    ) -> list[tf.Tensor | tf.IndexedSlices]:
        """Add up gradients, given their places among those of the step."""
        del places
        dtype = self.exchange.dtype
        narrow = [
            g if dtype is None or isinstance(g, tf.IndexedSlices) else tf.cast(g, dtype)
            for g in gradients
        ]
        return [
            r if isinstance(r, tf.IndexedSlices) else tf.cast(r, g.dtype)
            for r, g in zip(self.communicator.allreduce(narrow), gradients, strict=True)
        ]


@dataclass(frozen=True)
class Dense(Exchange):
    """Send whole gradients, unchanged or in half precision.

    Half precision sends half the bytes and rounds each gradient once per rank and once for each sum
    of two (over MPI, where dtk sums in float32, once for the whole sum). Rounding errors are not
    kept. float16 has three bits more than bfloat16 but ends at 65504 and loses values below 6e-8:
    for small gradients use a `LossScaleOptimizer` or bfloat16.

    Args:
        dtype: "float16", "bfloat16", or None for the gradients' own dtype.
        factors: Whether gradients of Dense kernels may be sent as their factors, in their own
            dtype, if that is faster; see `dtk.exchange.factors`.

    Raises:
        ValueError: The dtype is another one, or the communicator cannot sum it (Horovod, and NCCL
            by TensorFlow's collectives: bfloat16).

    Example:
        >>> Dense("float16")
        Dense(dtype='float16', factors=True)
    """

    dtype: str | None = None
    factors: bool = True
    op = DenseOp

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(
                f"Dense(dtype={self.dtype!r}); expected {' or '.join(map(repr, _DTYPES))}, or None "
                "to send gradients as they are"
            )

    def check(self, communicator: Communicator) -> None:
        """See `Exchange.check`."""
        if self.dtype is not None and not communicator.adds_up(tf.as_dtype(self.dtype)):
            exchanges = [name for name, one in _NAMES.items() if communicator.adds_up(one)]
            instead = [f'exchange="{name}"' for name in exchanges]
            if communicator.gpu_transport is None:  # NCCL adds no more than this
                instead += ['communicator="mpi"', 'communicator="collective"']
            raise ValueError(
                f"{self}: {communicator.name} adds no {self.dtype} up, so whole floats would be "
                f"sent; use {' or '.join(instead)}"
            )
