"""Delayed proximal gradient: sparse linear models, block by block, on parameter servers.

Minimises, over weights w cut into blocks w_1, ..., w_B, a smooth loss summed over rows plus an L1
norm:

    F(w) = sum over rows of loss(w; row) + l1 * |w|_1

Step t takes a block b = b(t), sums its gradient g over all rows, and applies the proximal operator
of the L1 norm, which is soft thresholding:

    w_b <- argmin_x  rate * l1 * |x|_1 + 1/2 |x - (w_b - rate * g)|^2
         = soft_threshold(w_b - rate * g, rate * l1)

The gradient may be late: step t starts once every step before t - tau is applied. The rate must be
small enough. Let the loss be convex, let L_b bound the curvature of the sum of losses in block b,
and let d_t be the change of step t. An undelayed step lowers F by at least (1/rate - L_b/2)
|d_t|^2. A step s at most tau before or after t costs at most sqrt(L_b L_c) |d_t| |d_s| <= (L_b
|d_t|^2 + L_c |d_s|^2) / 2, if the later of the two has a gradient without the change of the other;
each pair costs once, and there are 2 tau pairs with t. So the sum of all steps lowers F if 1/rate >
(1/2 + tau) L_b, for which the rate of the paper is enough:

    rate_b <= 1 / ((1 + tau) L_b + epsilon)

For every part of the rows, some worker computes the gradient with respect to a step's block, at the
weights this worker then has, and the servers apply the sum:

    main thread            apply step 0: block 0           apply step 1: block 1
                          /              \\               /
    worker 0   part 0 -- push block 0     pull block 0, part 0 -- push block 1
    worker 1   part 1 -- push block 0     pull block 0, part 1 -- push block 1

A worker keeps the rows of the parts it has computed, and every block; it pulls updated blocks
again. If it dies, they are sent to the worker that goes on.

Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI'14,
Algorithm 3, without its diagonal second-order term and its filter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from dtk.compat import tf_servers
from dtk.even_division import even_bounds
from dtk.nests import Array, Function, Numbers
from dtk.parameter_server.dispatcher import (
    Apply,
    Compute,
    Dispatcher,
    OutputsT,
    Result,
    Task,
    TaskQueue,
    WorkT,
)
from dtk.parameter_server.job_context import JobStrategy
from dtk.parameter_server.scheduler import Schedule


def soft_threshold(values: Numbers, threshold: Numbers) -> tf.Tensor:
    """Apply the proximal operator of `threshold * |x|_1`: argmin over x of |x - v|^2 / 2 + t |x|_1.

    Example:
        >>> soft_threshold(np.array([3.0, -0.5, -2.0]), 1.0).numpy().tolist()
        [2.0, 0.0, -1.0]
    """
    values = tf.convert_to_tensor(values)
    threshold = tf.convert_to_tensor(threshold, values.dtype)
    return values - tf.clip_by_value(values, -threshold, threshold)


def least_squares_smoothness(features: Numbers, blocks: int = 1) -> Array:
    """Return L_b of the loss (x . w - y)^2 / 2: the largest eigenvalue of X_b^T X_b.

    Without the factor 1/2 in the loss it is twice that.

    Args:
        features: X, of shape (rows, entries).
        blocks: Number of blocks of entries that X is cut into.

    Returns:
        L, of shape (blocks,).

    Raises:
        ValueError: X is not a matrix, or has fewer entries than there are blocks.

    Example:
        >>> least_squares_smoothness([[3.0, 0.0], [0.0, 2.0]], blocks=2)
        array([9., 4.])
    """
    features = np.asarray(features)
    if features.ndim != 2:
        raise ValueError(f"features of shape {features.shape}; expected (rows, entries)")
    check_blocks(blocks, features.shape[1])
    spans = _spans(features.shape[1], blocks)
    return np.array([np.linalg.norm(features[:, begin:end], 2) ** 2 for begin, end in spans])


def rate_bound(smoothness: Numbers, tau: int, epsilon: float = 1e-6) -> Array:
    """Return the largest rate with which delayed block steps are known to converge.

    Args:
        smoothness: L_b, which bounds the curvature of the sum of losses in block b; a number, or
            one per block.
        tau: How many steps a gradient may be late.
        epsilon: Added to the denominator, as a part of the largest L, so that a block without
            curvature, L_b = 0, has a rate, too.

    Returns:
        1 / ((1 + tau) L + epsilon max L), of the shape of `smoothness`.

    Raises:
        ValueError: tau < 0, or no L above 0.

    Example:
        >>> rate_bound([9.0, 4.0], tau=1, epsilon=0).tolist()
        [0.05555555555555555, 0.125]
    """
    check_tau(tau)
    smoothness = np.asarray(smoothness, np.float64)
    if not (np.all(np.isfinite(smoothness)) and np.all(smoothness >= 0) and np.any(smoothness)):
        raise ValueError(f"smoothness={smoothness.tolist()}; expected numbers above 0")
    return 1 / ((1 + tau) * smoothness + epsilon * np.max(smoothness))


def check_blocks(blocks: int, entries: int) -> None:
    """Raise unless weights of so many entries can be cut into so many blocks."""
    if not is_whole(blocks) or not 1 <= blocks <= entries:
        raise ValueError(
            f"blocks={blocks!r} for weights of {entries} entries along the first axis; expected "
            f"1 to {entries}"
        )


def check_tau(tau: int) -> None:
    """Raise unless `tau` is a whole number of 0 or more."""
    if not is_whole(tau) or tau < 0:
        raise ValueError(f"tau={tau!r}; expected 0 or more: the steps a gradient may be late")


def is_whole(number: object) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _spans(length: int, count: int) -> list[tuple[int, int]]:
    return [even_bounds(length, index, count) for index in range(count)]


class Blocks:
    """Weights on the servers, cut along their first axis."""

    def __init__(self, weights: Array, count: int, servers: int, parts: int):
        self.spans = _spans(len(weights), count)
        self.dtype = tf.as_dtype(weights.dtype)
        self.variables = []
        for block, (begin, end) in enumerate(self.spans):
            with tf.device(tf_servers.server_device(block % servers)):
                self.variables.append(tf.Variable(weights[begin:end], trainable=False))
        # Number of updates of each block; only the main thread changes it.
        self.updates = [0] * count
        self._free: list[list[tf.Variable]] = [[] for _ in range(count)]
        # Traced here: TensorFlow tells every task of a function, and later a task may be slow.
        self._commits = {
            device: self._commit_on(device, parts)
            for device in {variable.device for variable in self.variables}
        }

    def whole(self) -> Array:
        """Return all of the weights, read from the servers."""
        return np.concatenate([variable.numpy() for variable in self.variables])

    def buffer(self, block: int) -> tf.Variable:
        """Return a variable for a gradient of a block, on the block's server.

        The buffer of a lost worker is never reused: the worker may come back and write to it.
        """
        try:
            return self._free[block].pop()
        except IndexError:
            variable = self.variables[block]
            with tf.device(variable.device):
                return tf.Variable(tf.zeros(variable.shape, self.dtype), trainable=False)

    def apply(self, block: int, buffers: Sequence[tf.Variable], rate: float, l1: float) -> None:
        """Set w to soft_threshold(w - rate * sum g, rate * l1), on the block's server."""
        variable = self.variables[block]
        numbers = [tf.constant(number, self.dtype) for number in (rate, rate * l1)]
        handles = [buffer.handle for buffer in buffers]
        self._commits[variable.device](variable.handle, handles, *numbers)
        self.updates[block] += 1
        self._free[block].extend(buffers)

    def _commit_on(self, device: str, parts: int) -> tf.types.experimental.ConcreteFunction:
        def read(handle: tf.Tensor) -> tf.Tensor:
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=self.dtype)

        def commit(
            weights: tf.Tensor, buffers: list[tf.Tensor], rate: tf.Tensor, threshold: tf.Tensor
        ) -> None:
            with tf.device(device):
                gradient = tf.add_n([read(buffer) for buffer in buffers])
                new = soft_threshold(read(weights) - rate * gradient, threshold)
                tf.raw_ops.AssignVariableOp(resource=weights, value=new)

        handle, number = tf.TensorSpec([], tf.resource), tf.TensorSpec([], self.dtype)
        function = tf.function(commit, autograph=False)
        return function.get_concrete_function(handle, [handle] * parts, number, number)


class Copy:
    """A worker's copy of weights and rows, as tensors on the worker; only its thread uses it."""

    def __init__(self, blocks: Blocks, parts: Sequence[tuple[Array, ...]]):
        self._blocks, self._parts = blocks, parts
        self.copied = 0  # bytes of rows
        self._forget()

    def _forget(self) -> None:
        self._weights: list[tf.Tensor] = [None] * len(self._blocks.spans)
        self._updates = [-1] * len(self._blocks.spans)
        self._rows: dict[int, list[tf.Tensor]] = {}
        self._pulled = 0

    def call(self, function: Function[tf.Tensor], part: int, *more: tf.Tensor) -> Array:
        """Call a function of weights and a part of the rows, on the worker; return its numbers."""
        try:
            return function(self._newest_weights(), self._rows_of(part), *more).numpy()
        except BaseException:
            self._forget()  # the worker may be lost
            raise

    def _newest_weights(self) -> list[tf.Tensor]:
        """Return every block; pull the updated ones again."""
        for block, updates in enumerate(self._blocks.updates):
            # The count is older than the value: at worst a block is pulled once too often.
            if self._updates[block] < updates:
                variable = self._blocks.variables[block]
                self._weights[block] = variable.read_value()
                self._updates[block] = updates
                self._pulled += variable.shape.num_elements() * self._blocks.dtype.size
        return list(self._weights)

    def _rows_of(self, part: int) -> list[tf.Tensor]:
        """Return the rows of a part; the first call sends them."""
        if part not in self._rows:
            arrays = self._parts[part]
            self._rows[part] = [tf.constant(array) for array in arrays]
            self.copied += sum(array.nbytes for array in arrays)
        return self._rows[part]

    def take_pulled(self) -> int:
        """Return the bytes pulled since the last call."""
        pulled, self._pulled = self._pulled, 0
        return pulled


class BlockDescent:
    """Block coordinate descent with the workers of a strategy."""

    def __init__(
        self,
        strategy: JobStrategy,
        loss: Function[tf.Tensor],
        weights: Array,
        data: tuple[Array, ...],
        blocks: int,
    ):
        self._strategy, self._loss = strategy, loss
        self._parts = _spans(len(data[0]), min(strategy.workers, len(data[0])))
        self._blocks = Blocks(weights, blocks, len(strategy.placement), len(self._parts))
        parts = [tuple(array[begin:end] for array in data) for begin, end in self._parts]
        self._copies = [Copy(self._blocks, parts) for _ in range(strategy.workers)]

        whole = [tf.TensorSpec(v.shape, v.dtype) for v in self._blocks.variables]
        rows = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data]
        bound, handle = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)
        # Traced here, so that a mistake in the loss raises on the main thread.
        function = tf.function(self._sums, autograph=False)
        self._sum = function.get_concrete_function(whole, rows)
        function = tf.function(self._gradient, autograph=False)
        self._push = function.get_concrete_function(whole, rows, bound, bound, handle)

    @property
    def weights(self) -> Array:
        """Current weights, read from the servers."""
        return self._blocks.whole()

    @property
    def copied(self) -> list[int]:
        """Bytes of rows sent to each worker."""
        return [copy.copied for copy in self._copies]

    def run(
        self,
        order: Sequence[int],
        tau: int,
        rate: Array,
        l1: float,
        record: Callable[[int], None],
    ) -> Schedule:
        """Take the steps of `order`, one block each."""

        def apply(block: int, buffers: Sequence[tf.Variable], schedule: Schedule) -> None:
            self._blocks.apply(block, buffers, float(rate[block]), l1)
            record(schedule.finished + 1)

        record(0)
        return self._dispatch(order, tau, self._push_gradient, apply)

    def measure(self) -> tuple[float, float]:
        """Compute the sum of the loss over all rows, and |w|_1, at the current weights.

        Workers finish their work and then compute this; nothing is applied meanwhile.
        """
        sums: list[Array] = []

        def measure(task: Task[None], worker: int, schedule: Schedule) -> Result[Array]:
            return Result(self._copies[worker].call(self._sum, task.part))

        def collect(work: None, outputs: Sequence[Array], schedule: Schedule) -> None:
            sums.extend(outputs)

        self._dispatch([None], 0, measure, collect)
        for (begin, end), (_, losses, _) in zip(self._parts, sums, strict=True):
            if losses != end - begin:
                raise ValueError(
                    f"loss(weights, *rows) returned {losses:.0f} numbers for {end - begin} rows; "
                    "expected one number per row, for they are summed over all workers"
                )
        return float(sum(total for total, *_ in sums)), float(sums[0][2])

    def _dispatch(
        self,
        works: Sequence[WorkT],
        tau: float,
        compute: Compute[WorkT, OutputsT],
        apply: Apply[WorkT, OutputsT],
    ) -> Schedule:
        """Take one step for each of `works`; a worker computes its own part of the rows."""

        def new_queue() -> TaskQueue[WorkT, OutputsT]:
            return TaskQueue(Schedule(tau, slices=len(self._parts)), own_parts=True)

        dispatcher = Dispatcher(self._strategy.pool, new_queue, compute, apply)
        with contextlib.closing(dispatcher):
            for work in works:
                dispatcher.submit(work, ahead=math.inf)
            dispatcher.drain()
            return dispatcher.schedule

    def _push_gradient(
        self, task: Task[int], worker: int, schedule: Schedule
    ) -> Result[tf.Variable]:
        """Compute the gradient of a block over a part of the rows, and push it to its server."""
        buffer, copy = self._blocks.buffer(task.work), self._copies[worker]
        # Constants made on the chief go along with the call; on the worker, each is a message.
        with tf.device(tf_servers.CHIEF):
            span = [tf.constant(bound) for bound in self._blocks.spans[task.work]]
        pushed = copy.call(self._push, task.part, *span, buffer.handle)
        self._strategy.note_traffic(worker, np.array([copy.take_pulled(), pushed]))
        return Result(buffer)

    # Functions of all weights and some rows; traced, run on workers.

    def _sums(self, weights: list[tf.Tensor], rows: list[tf.Tensor]) -> tf.Tensor:
        """Return the sum of the loss over some rows, the number of losses, and |w|_1."""
        whole = tf.concat(weights, 0)
        values = self._losses(whole, rows)
        numbers = [tf.reduce_sum(values), tf.size(values), tf.reduce_sum(tf.abs(whole))]
        return tf.stack([tf.cast(number, tf.float64) for number in numbers])

    def _gradient(
        self,
        weights: list[tf.Tensor],
        rows: list[tf.Tensor],
        begin: tf.Tensor,
        end: tf.Tensor,
        buffer: tf.Tensor,
    ) -> tf.Tensor:
        """Put the gradient of one block into a gradient buffer; return the bytes sent."""
        whole = tf.concat(weights, 0)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(whole)
            total = tf.reduce_sum(self._losses(whole, rows))
        gradient = tape.gradient(total, whole)
        if gradient is None:
            raise ValueError(
                "loss(weights, *rows) has no gradient with respect to the weights; compute it from "
                "them with TensorFlow's functions"
            )
        content = tf.convert_to_tensor(gradient)[begin:end]
        tf.raw_ops.AssignVariableOp(resource=buffer, value=content)
        return tf.size(content, tf.int64) * content.dtype.size

    def _losses(self, weights: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        values = tf.convert_to_tensor(self._loss(weights, *rows))
        if values.shape.rank != 1:
            raise ValueError(
                f"loss(weights, *rows) returned shape {values.shape}; expected one number per row, "
                "of shape (rows,), for they are summed over all workers"
            )
        return values
