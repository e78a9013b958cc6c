"""Steps of block descent: computed by workers, applied by parameter servers.

A step is one block. Every part of the rows has its gradient with respect to that block computed by
some worker, at the weights this worker then has, and the servers apply the sum:

    main thread            apply step 0: block 0           apply step 1: block 1
                          /              \\               /
    worker 0   part 0 -- push block 0     pull block 0, part 0 -- push block 1
    worker 1   part 1 -- push block 0     pull block 0, part 1 -- push block 1

A worker keeps what it was sent: the rows of the parts it has computed, and every block, of which it
pulls again those that were updated since. When it dies, all of that is gone with it, and sent again
to the worker that goes on. Which step may start is decided in `dtk.parameter_server.scheduler`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from dtk.compat import tf_servers
from dtk.input import slicing
from dtk.parameter_server.contract import ServerStrategy
from dtk.parameter_server.proximal.blocks import Blocks, Copy
from dtk.parameter_server.scheduler import Piece, Schedule


class Task(NamedTuple):
    """Piece of a step, and the part of the rows it is computed on."""

    piece: Piece
    part: int


class BlockSteps:
    """Queue of steps over all parts of the rows; see `worker_pool.Work`.

    The schedule says that a worker may compute one more piece of a step. Which part of the rows
    that is, is said here: the worker's own if no other worker has it, for it has these rows
    already.

    Args:
        schedule: Whose steps have as many slices as there are parts.
        parts: Parts of the rows.
    """

    def __init__(self, schedule: Schedule, parts: int):
        self.schedule = schedule
        self._parts = parts
        self._given: dict[int, dict[int, int]] = {}  # step -> slice -> part
        self._results: dict[int, dict[int, tf.Variable | np.ndarray]] = {}  # step -> part -> result
        self._complete: collections.deque[int] = collections.deque()

    def take(self, worker: int) -> Task | None:
        """Hand out the next piece for a worker. A piece that was lost keeps its part.

        Args:
            worker: Index of the worker.

        Returns:
            The piece and its part of the rows; None if nothing may start yet.
        """
        piece = self.schedule.take(worker)
        if piece is None:
            return None
        given = self._given.setdefault(piece.step, {})
        if piece.slice not in given:
            free = set(range(self._parts)).difference(given.values())
            given[piece.slice] = worker if worker in free else min(free)
        return Task(piece, given[piece.slice])

    def finished(self, task: Task, worker: int, result: tf.Variable | np.ndarray) -> None:
        """Take the result of a piece.

        Args:
            task: The piece, as `take` returned it.
            worker: Index of the worker that has computed it.
            result: What the worker's function returned.
        """
        step = task.piece.step
        if self.schedule.returned(task.piece, worker):
            self._results.setdefault(step, {})[task.part] = result
            if self.schedule.complete(step):
                self._complete.append(step)

    def lost(self, task: Task, worker: int) -> None:
        """Hand a piece out again, whose worker was lost with it.

        Args:
            task: The piece, as `take` returned it.
            worker: Index of the lost worker.
        """
        self.schedule.lost(task.piece, worker)

    def next_complete(self) -> tuple[int, list] | None:
        """Remove and return a step whose parts are all computed.

        Returns:
            The step's number and the results in the order of parts; None if no step is complete.
        """
        if not self._complete:
            return None
        step = self._complete.popleft()
        del self._given[step]
        return step, [result for _, result in sorted(self._results.pop(step).items())]


class Descent:
    """Block coordinate descent with the workers of a strategy.

    Args:
        strategy: A `ParameterServerStrategy`, on the chief.
        loss: Called as `loss(weights, *rows)` inside a graph; one number per row.
        weights: Their first values, of shape (entries, ...).
        data: Arrays with the same number of rows.
        blocks: How many blocks the weights are cut into.

    Raises:
        ValueError: `loss` returns something else than one number per row, or has no gradient.
    """

    def __init__(
        self,
        strategy: ServerStrategy,
        loss: Callable[..., tf.Tensor],
        weights: np.ndarray,
        data: tuple[np.ndarray, ...],
        blocks: int,
    ):
        self._pool, self._note_traffic = strategy.pool, strategy.note_traffic
        self._loss = loss
        self._count = min(strategy.workers, len(data[0]))
        self._blocks = Blocks(weights, blocks, len(strategy.placement), self._count)
        spans = [slicing.bounds(len(data[0]), part, self._count) for part in range(self._count)]
        parts = [tuple(array[begin:end] for array in data) for begin, end in spans]
        self._part_rows = [end - begin for begin, end in spans]
        self._copies = [Copy(self._blocks, parts) for _ in range(strategy.workers)]
        specs = [tf.TensorSpec(v.shape, v.dtype) for v in self._blocks.variables]
        rows = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in data]
        bound, handle = tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.resource)
        # Traced here, so that a mistake in the loss is an error of the main thread.
        value = tf.function(self._values, autograph=False)
        self._value = value.get_concrete_function(specs, rows)
        push = tf.function(self._gradient, autograph=False)
        self._push = push.get_concrete_function(specs, rows, bound, bound, handle)

    @property
    def weights(self) -> np.ndarray:
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
        rate: np.ndarray,
        l1: float,
        record: Callable[[int], None],
    ) -> Schedule:
        """Take steps, and apply them.

        Args:
            order: The block of each step.
            tau: Step t may start once every step before t - tau is applied.
            rate: One per block.
            l1: Weight of |w|_1.
            record: Called on the main thread between steps, as `record(steps applied)`.

        Returns:
            The schedule that decided, with the staleness seen.
        """
        schedule = Schedule(tau, slices=self._count)
        steps = BlockSteps(schedule, self._count)
        for _ in order:
            schedule.offer()
        record(0)
        with self._pool.working(steps, functools.partial(self._compute, order)):
            while schedule.unfinished:
                step, buffers = self._pool.wait(steps.next_complete)
                block = order[step]
                with self._pool.asking_servers():
                    self._blocks.apply(block, buffers, float(rate[block]), l1)
                self._pool.offer(functools.partial(schedule.applied, step))
                record(schedule.finished)
        return schedule

    def measure(self) -> tuple[float, float]:
        """Compute the sum of the loss over all rows, and |w|_1, at the weights as they are.

        Workers finish what they compute, and compute this next; nothing is applied meanwhile.

        Returns:
            The sum of the loss, and |w|_1.

        Raises:
            ValueError: The loss gives another number of values than there are rows.
        """
        schedule = Schedule(tau=0, slices=self._count)
        steps = BlockSteps(schedule, self._count)
        schedule.offer()
        with self._pool.working(steps, self._measure_part):
            _, results = self._pool.wait(steps.next_complete)
        for rows, (_, values, _) in zip(self._part_rows, results, strict=True):
            if values != rows:
                raise ValueError(
                    f"loss(weights, *rows) returned {values:.0f} numbers for {rows} rows; "
                    "expected one number per row, for they are summed over all workers"
                )
        return float(sum(result[0] for result in results)), float(results[0][2])

    # On the workers.

    def _measure_part(self, task: Task, worker: int) -> np.ndarray:
        with self._copy_of(worker) as copy:
            return self._value(copy.weights(), copy.rows(task.part)).numpy()

    def _compute(self, order: Sequence[int], task: Task, worker: int) -> tf.Variable:
        block = order[task.piece.step]
        buffer = self._blocks.buffer(block)
        with self._copy_of(worker) as copy:
            # Made on the chief, they go along with the call; made on the worker, each is a message.
            with tf.device(tf_servers.CHIEF):
                span = [tf.constant(bound) for bound in self._blocks.spans[block]]
            weights, rows = copy.weights(), copy.rows(task.part)
            pushed = self._push(weights, rows, *span, buffer.handle).numpy()
            self._note_traffic(worker, np.array([copy.take_pulled(), pushed]))
        return buffer

    @contextlib.contextmanager
    def _copy_of(self, worker: int) -> Iterator[Copy]:
        copy = self._copies[worker]
        try:
            yield copy
        except BaseException:
            copy.forget()
            raise

    def _values(self, weights: list[tf.Tensor], rows: list[tf.Tensor]) -> tf.Tensor:
        """Sum the loss over some rows, with the count of its numbers, and |w|_1; traced."""
        whole = tf.concat(weights, 0)
        values = self._loss_of(whole, rows)
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
        """Put the gradient of one block into a gradient buffer; traced. Returns the bytes sent."""
        whole = tf.concat(weights, 0)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(whole)
            total = tf.reduce_sum(self._loss_of(whole, rows))
        gradient = tape.gradient(total, whole)
        if gradient is None:
            raise ValueError(
                "loss(weights, *rows) has no gradient with respect to the weights; compute it from "
                "them with TensorFlow's functions"
            )
        content = tf.convert_to_tensor(gradient)[begin:end]
        tf.raw_ops.AssignVariableOp(resource=buffer, value=content)
        return tf.size(content, tf.int64) * self._blocks.dtype.size

    def _loss_of(self, weights: tf.Tensor, rows: Sequence[tf.Tensor]) -> tf.Tensor:
        values = tf.convert_to_tensor(self._loss(weights, *rows))
        if values.shape.rank != 1:
            raise ValueError(
                f"loss(weights, *rows) returned shape {values.shape}; expected one number per row, "
                "of shape (rows,), for they are summed over all workers"
            )
        return values
