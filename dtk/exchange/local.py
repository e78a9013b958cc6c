"""Local steps: workers train apart for a block of samples, then combine their weights.

    open      keep the weights all workers start from
    step      apply this worker's own gradients         (until the block has its samples)
    close     combine: every worker continues from the same weights

A block is closed early wherever weights must be the same on every worker: at the end of an epoch,
before an evaluation and before a checkpoint.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator, with_values
from dtk.exchange.base import BatchPart, Exchange, ExchangeOp, Gradient, Trained, Update
from dtk.exchange.state import ExchangeState


class LocalExchange(Exchange):
    """Base of the exchanges that send weights after a block of samples, and never gradients.

    Each worker applies its own gradients at the given learning rate: the mean over its rows, as if
    these were the whole batch. Steps must come from `fit` or `train_on_batch`, which count rows.
    """

    local = True

    @abc.abstractmethod
    def rows_in_block(self, size: int) -> int:
        """Return the number of rows, over all workers, that closes a block.

        Args:
            size: Number of workers.
        """

    @abc.abstractmethod
    def combine(self, block: LocalOp, start: Sequence[tf.Variable]) -> None:
        """Give all workers new weights, the same on all of them.

        Args:
            block: The block to close, with this worker's weights and counts.
            start: The weights at the start of the block.
        """

    def init(self, communicator: Communicator, state: ExchangeState, trained: Trained) -> LocalOp:
        """See `Exchange.init`."""
        rows = self.rows_in_block(communicator.size)
        return LocalOp(communicator, state, trained, rows, self.combine)


class LocalOp(ExchangeOp):
    """Counts rows, opens blocks and closes them."""

    def __init__(
        self,
        communicator: Communicator,
        state: ExchangeState,
        trained: Trained,
        rows: int,
        combine: Callable[[LocalOp, Sequence[tf.Variable]], None],
    ):
        super().__init__(communicator, state)
        self.trained = trained
        self._limit = rows
        self._combine = combine

    @property
    def rows(self) -> tf.Variable:
        """Rows of all workers in the open block; 0 when none is open."""
        return self.state.variable("block_rows", "same", (), tf.int64)

    @property
    def own_rows(self) -> tf.Variable:
        """Rows of this worker in the open block."""
        return self.state.variable("own_rows", "sum", (), tf.float32)

    def reduce(self, gradients: list[Gradient], part: BatchPart | None = None) -> list[Gradient]:
        """Return this worker's own gradients, as means over its rows."""
        if part is None:
            raise ValueError(
                "this exchange counts the rows of global batches, which only fit and "
                "train_on_batch know; in a loop of your own use Dense or Quantized"
            )
        return [_divided(g, part.example_weight) for g in gradients]

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """See `ExchangeOp.update`. The first step of a block keeps the weights before it."""
        own = self.reduce(gradients, part)
        self._open(self._start())
        return Update(own)

    def _start(self) -> list[tf.Variable]:
        # Not in checkpoints: a block is closed before a checkpoint is written.
        return [
            self.state.scratch(f"start_{i}", v.shape, v.dtype)
            for i, v in enumerate(self.trained.variables)
        ]

    def _open(self, start: list[tf.Variable]) -> None:
        def keep() -> bool:
            for kept, variable in zip(start, self.trained.variables, strict=True):
                kept.assign(variable)
            return True

        tf.cond(tf.equal(self.rows, 0), keep, lambda: False)

    def count(self, part: BatchPart | None) -> None:
        """Count a step, and close the block when it is full."""
        assert part is not None
        own = tf.cast(part.rows, part.example_weight.dtype) * part.example_weight
        self.own_rows.assign_add(tf.cast(own, tf.float32))
        rows = self.rows.assign_add(part.rows, read_value=True)

        def close() -> bool:
            self._close()
            return True

        tf.cond(rows >= self._limit, close, lambda: False)

    def count_exact(self, part: BatchPart) -> None:
        """See `ExchangeOp.count_exact`."""
        self._weight().assign(tf.cast(part.example_weight, tf.float32))

    def together(self) -> tf.Tensor | None:
        """See `ExchangeOp.together`."""
        return tf.equal(self.rows, 0)

    def averaging_weight(self) -> tf.Tensor | None:
        """Return this worker's part of the rows of the last closed block."""
        return self._weight().read_value()

    def _weight(self) -> tf.Variable:
        return self.state.scratch("share", (), tf.float32)

    def close(self) -> None:
        """See `ExchangeOp.close`. Called between steps, not inside one."""
        if int(self.rows):
            self._close()

    def _close(self) -> None:
        weight = tf.math.divide_no_nan(
            self.own_rows.read_value(), tf.cast(self.rows.read_value(), tf.float32)
        )
        self._weight().assign(weight)
        self._combine(self, self._start())
        self.rows.assign(0)
        self.own_rows.assign(0.0)

    def forget_momenta(self) -> None:
        """Zero the optimizer's momentum: it belongs to weights that no worker has any more."""
        for variable in self.trained.momenta:
            variable.assign(tf.zeros_like(variable))


def _divided(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    """Turn a mean over the whole batch into a mean over this worker's rows; zeros without rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, _divided(gradient.values, weight))
    return tf.math.divide_no_nan(gradient, tf.cast(weight, gradient.dtype))
