"""Send every gradient whole in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.exchange.contract import (
    BatchPart,
    Exchange,
    ExchangeOp,
    ExchangeState,
    Gradient,
    Trained,
    Update,
)
from dtk.exchange.factors import Factored, reduce_products

_DTYPES = ("float16", "bfloat16")
_NAMES = {"fp16": tf.float16, "bf16": tf.bfloat16}


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
        ValueError: The dtype is another one, or the communicator cannot sum it (Horovod: bfloat16).

    Example:
        >>> Dense("float16")
        Dense(dtype='float16', factors=True)
    """

    dtype: str | None = None
    factors: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(
                f"Dense(dtype={self.dtype!r}); expected {' or '.join(map(repr, _DTYPES))}, or None "
                "to send gradients as they are"
            )

    def check(self, communicator: Communicator) -> None:
        """See `Exchange.check`."""
        adds = getattr(communicator, "reduces", ())
        if self.dtype is not None and adds and tf.as_dtype(self.dtype) not in adds:
            others = [f'exchange="{name}"' for name, dtype in _NAMES.items() if dtype in adds]
            instead = " or ".join([*others, 'communicator="mpi"', 'communicator="collective"'])
            raise ValueError(
                f"{self}: {communicator.name} adds no {self.dtype} up, so whole floats would be "
                f"sent; use {instead}"
            )

    def init(
        self, communicator: Communicator, state: ExchangeState, trained: Trained
    ) -> ExchangeOp:
        """See `Exchange.init`."""
        return DenseOp(communicator, state, self.dtype, self.factors)


class DenseOp(ExchangeOp):
    """An all-reduce, or an all-gather of a gradient's factors if that is faster; see `factors`.

    Rows of tables (`tf.IndexedSlices`) and factors keep their dtype: they are few.
    """

    def __init__(
        self,
        communicator: Communicator,
        state: ExchangeState,
        dtype: str | None,
        factors: bool = True,
    ):
        super().__init__(communicator, state)
        self._dtype = dtype
        # Every rank multiplies factors by itself: different processors may differ in the last bit.
        self.factors = factors and communicator.alike

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`."""
        # Last layers first: their gradients are ready first and are sent during the backward pass.
        backwards = range(len(gradients))[::-1]
        products = [i for i in backwards if isinstance(gradients[i], Factored)]
        others = [i for i in backwards if i not in products]
        results: list[Gradient] = list(gradients)
        with self.communicator.concurrent("rest") if products else contextlib.nullcontext():
            for i, total in zip(others, self._whole([gradients[i] for i in others]), strict=True):
                results[i] = total
        factored = [gradients[i] for i in products]
        sums = reduce_products(factored, self.communicator, lambda places, g: self._whole(g))
        for i, total in zip(products, sums, strict=True):
            results[i] = total
        return results, None

    def _whole(self, gradients: Sequence[Gradient]) -> list[tf.Tensor | tf.IndexedSlices]:
        narrow = [
            g if self._dtype is None or isinstance(g, tf.IndexedSlices) else tf.cast(g, self._dtype)
            for g in gradients
        ]
        return [
            r if isinstance(r, tf.IndexedSlices) else tf.cast(r, g.dtype)
            for r, g in zip(self.communicator.allreduce(narrow), gradients, strict=True)
        ]
