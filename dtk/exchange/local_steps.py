"""Local steps: workers train apart for a block of samples, then combine their weights.

    open      keep the weights all workers start from
    step      apply this worker's own gradients         (until the block has its samples)
    close     combine: every worker continues from the same weights

A block is closed early wherever weights must be the same on every worker: at the end of an epoch,
before an evaluation and before a checkpoint.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from dtk.communicators.aligned_slices import with_values
from dtk.communicators.base import Communicator
from dtk.errors import check_number
from dtk.exchange.contract import BatchPart, Exchange, ExchangeOp, Gradient, Update, run_if


class LocalOp(ExchangeOp):
    """The open block: counts rows, and closes the block when it is full."""

    exchange: LocalExchange

    def prepare(self) -> None:
        """See `ExchangeOp.prepare`."""
        self.block = self

    @property
    def rows(self) -> tf.Variable:
        """Rows of all workers in the open block; 0 when none is open."""
        return self.state.variable("block_rows", "same", (), tf.int64)

    @property
    def _own_rows(self) -> tf.Variable:
        return self.state.variable("own_rows", "sum", (), tf.float64)

    @property
    def weight(self) -> tf.Variable:
        """This worker's part of the rows of the last closed block: its weight in a mean."""
        return self.state.variable("share", "scratch", (), tf.float64)

    @property
    def _start(self) -> list[tf.Variable]:
        # Not in checkpoints: a block is closed before a checkpoint is written.
        return [
            self.state.variable(f"start_{i}", "scratch", v.shape, v.dtype)
            for i, v in enumerate(self.trained.variables)
        ]

    def update(self, gradients: list[Gradient], part: BatchPart | None = None) -> Update:
        """Return this worker's own gradients, as means over its rows.

        The first step of a block keeps the weights before it.
        """
        if part is None:
            raise ValueError(
                "this exchange counts the rows of global batches, which only fit and "
                "train_on_batch know; in a loop of your own use Dense or Quantized"
            )
        start = self._start

        def keep() -> None:
            for kept, variable in zip(start, self.trained.variables, strict=True):
                kept.assign(variable)

        run_if(tf.equal(self.rows, 0), keep)
        return [_divided(g, part.example_weight) for g in gradients], None

    def count(self, part: BatchPart | None) -> None:
        """Count a step, and close the block when it is full."""
        assert part is not None
        own = tf.cast(part.rows, part.example_weight.dtype) * part.example_weight
        self._own_rows.assign_add(tf.cast(own, tf.float64))
        rows = self.rows.assign_add(part.rows, read_value=True)
        run_if(rows >= self.exchange.rows_in_block(self.communicator.size), self._close)

    def count_exact(self, part: BatchPart) -> None:
        """Count a step whose gradients another op has summed, in place of `count`."""
        self.weight.assign(tf.cast(part.example_weight, tf.float64))

    def is_closed(self) -> tf.Tensor:
        """Return whether all ranks hold the same weights now."""
        return tf.equal(self.rows, 0)

    def close(self) -> None:
        """Make all ranks hold the same weights, between steps. All ranks call it together."""
        if int(self.rows):
            self._close()

    def _close(self) -> None:
        own, all_rows = self._own_rows.read_value(), tf.cast(self.rows.read_value(), tf.float64)
        self.weight.assign(tf.math.divide_no_nan(own, all_rows))
        self.exchange.combine(self, self._start)
        self.rows.assign(0)
        self._own_rows.assign(0.0)

    def forget_momenta(self) -> None:
        """Zero the optimizer's momentum: it belongs to weights that no worker has any more."""
        for variable in self.trained.momenta:
            variable.assign(tf.zeros_like(variable))


class LocalExchange(Exchange):
    """Base of the exchanges that send weights after a block of samples, and never gradients.

    Each worker applies its own gradients at the given learning rate: the mean over its rows, as if
    these were the whole batch. Steps must come from `fit` or `train_on_batch`, which count rows.
    """

    op = LocalOp
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


def _divided(gradient: Gradient, weight: tf.Tensor) -> Gradient:
    """Turn a mean over the whole batch into a mean over this worker's rows; zeros without rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return with_values(gradient, _divided(gradient.values, weight))
    return tf.math.divide_no_nan(gradient, tf.cast(weight, gradient.dtype))


@dataclass(frozen=True)
class BlockMomentum(LocalExchange):
    """Take local steps for a block of samples, then move all workers by a filtered sum of changes.

    With K workers, a block of n rows, weights W at its begin and W_k at its end, and the momentum
    eta of a whole block of B rows:

        eta_n = eta ^ (n/B)
        G = sum_k (W - W_k)
        V = eta_n V + (1 - eta_n) rate G
        W = W - V                     and, with Nesterov's momentum, W = W - eta_n V once more

    So a block's change goes into the weights over several blocks. If all blocks are whole, block j
    after it (j = 0 is itself) moves the weights by a part (1 - eta) eta^j of rate G, in total by

        rate G              without Nesterov's momentum: the sum of the workers' changes
        rate (1 + eta) G    with it, for W keeps the look-ahead: 2 - 1/K times as much

    With `rate=1 / (1 + eta)`, K / (2 K - 1) for the default eta, Nesterov's total is G as well.

    Communication falls to one exchange of weights per block. The end of an epoch closes the last
    block, whole or not. The change of a shorter block counts less: if whole blocks follow, by the
    factor (1 - eta_n) / (1 - eta). If an epoch has few blocks, choose a `block_size` that divides
    the rows of an epoch.

    Args:
        block_size: B, rows of all workers together.
        momentum: eta of a whole block; None is 1 - 1/K. For CNTK's time constant tau it is
            `dtk.schedules.momentum_from_time_constant(tau, block_size)`.
        rate: The block learning rate.
        nesterov: Whether to look ahead, as CNTK does; this moves weights 1 + eta times as far.
        reset_local_momentum: Whether to zero the optimizer's momentum after each block, since it
            belongs to weights that no worker has any more. Second moments and step counts stay.
            Adam corrects its momentum by the step count, so after a reset it takes smaller steps
            at first; with Adam, use False.

    Raises:
        ValueError: An argument is out of range, or a block has less than a row for each worker.

    Example:
        >>> BlockMomentum(block_size=2048).momentum_of(2048, workers=4)
        0.75

    Source: Chen and Huo 2016, "Scalable Training of Deep Learning Machines by Incremental Block
    Training with Intra-Block Parallel Optimization and Blockwise Model-Update Filtering" (BMUF);
    CNTK's `BlockMomentumDistributedLearner`, which also closes a block early at checkpoints.
    """

    block_size: int
    momentum: float | None = None
    rate: float = 1.0
    nesterov: bool = True
    reset_local_momentum: bool = True

    def __post_init__(self) -> None:
        check_rows("BlockMomentum(block_size", self.block_size)
        if self.momentum is not None:
            expected = "0.0 or more and below 1.0, or None for 1 - 1/workers"
            name = "BlockMomentum: momentum"
            check_number(name, self.momentum, expected, lambda part: 0.0 <= part < 1.0)
        check_number("BlockMomentum: rate", self.rate, "a positive number", lambda rate: rate > 0.0)

    def check(self, communicator: Communicator) -> None:
        """See `Exchange.check`."""
        size = communicator.size
        if self.block_size < size:
            raise ValueError(
                f"BlockMomentum(block_size={self.block_size}) has less than a row for each of "
                f"{size} workers; block_size counts the rows of all workers, use some thousands"
            )

    def rows_in_block(self, size: int) -> int:
        """See `LocalExchange.rows_in_block`."""
        return self.block_size // size * size

    def momentum_of(self, rows: float | tf.Tensor, workers: int) -> float | tf.Tensor:
        """Return eta for a block with this many rows.

        Args:
            rows: Rows of all workers in the block, a number or a floating point tensor.
            workers: Number of workers, K.

        Returns:
            eta ^ (rows / block_size): a float, or a tensor for a tensor.
        """
        full = 1.0 - 1.0 / workers if self.momentum is None else self.momentum
        return full ** (rows / self.block_size)

    def combine(self, block: LocalOp, start: Sequence[tf.Variable]) -> None:
        """Close a block: see the equations above."""
        communicator = block.communicator
        weights = block.trained.variables
        changes = [before - now for before, now in zip(start, weights, strict=True)]
        of_block = self.momentum_of(tf.cast(block.rows, tf.float64), communicator.size)
        for i, change in enumerate(communicator.allreduce(changes)):
            wide = tf.float64 if change.dtype == tf.float64 else tf.float32
            momentum = block.state.variable(f"block_momentum_{i}", "same", change.shape, wide)
            eta = tf.cast(of_block, wide)
            moved = momentum.assign(
                eta * momentum + (1.0 - eta) * self.rate * tf.cast(change, wide),
                read_value=True,
            )
            step = moved * (1.0 + eta) if self.nesterov else moved
            weights[i].assign(start[i] - tf.cast(step, start[i].dtype))
        if self.reset_local_momentum:
            block.forget_momenta()


@dataclass(frozen=True)
class ModelAveraging(LocalExchange):
    """Take local steps for some samples, then continue from the mean of all workers' weights.

        W = sum_k (n_k / sum n) W_k        n_k: rows worker k has seen

    The mean moves only as far as one worker does, so the learning rate is usually multiplied by the
    number of workers. Each worker keeps its own optimizer state.

    Args:
        period: Rows each worker trains on between two means. CNTK's default is 40,000.

    Raises:
        ValueError: `period` is not a number of rows.

    Example:
        >>> ModelAveraging(period=40_000).rows_in_block(4)
        160000

    Sources: McDonald et al. 2010; CNTK's `ModelAveragingSGD`.
    """

    period: int = 40_000

    def __post_init__(self) -> None:
        check_rows("ModelAveraging(period", self.period)

    def rows_in_block(self, size: int) -> int:
        """See `LocalExchange.rows_in_block`."""
        return self.period * size

    def combine(self, block: LocalOp, start: Sequence[tf.Variable]) -> None:
        """Close a block: see the equation above."""
        del start
        weights = block.trained.variables
        part = block.weight.read_value()
        parts = [weight * tf.cast(part, weight.dtype) for weight in weights]
        for weight, mean in zip(weights, block.communicator.allreduce(parts), strict=True):
            weight.assign(mean)


def check_rows(what: str, rows: object) -> None:
    """Refuse what is no number of rows."""
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"{what}={rows!r}); expected a number of rows, 1 or more")
