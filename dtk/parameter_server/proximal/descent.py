"""Steps of block descent: computed by workers, applied by parameter servers.

A step is one block. For every part of the rows, some worker computes the gradient with respect to
that block, at the weights this worker then has, and the servers apply the sum:

    main thread            apply step 0: block 0           apply step 1: block 1
                          /              \\               /
    worker 0   part 0 -- push block 0     pull block 0, part 0 -- push block 1
    worker 1   part 1 -- push block 0     pull block 0, part 1 -- push block 1

A worker keeps the rows of the parts it has computed, and every block; it pulls updated blocks
again. If it dies, they are sent to the worker that goes on. `dtk.parameter_server.scheduler`
decides which step may start, and `dtk.parameter_server.dispatch` takes the steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from dtk.even_division import even_bounds
from dtk.nests import Array, Function
from dtk.parameter_server.dispatch import Dispatcher, WorkerJob
from dtk.parameter_server.job_context import JobStrategy
from dtk.parameter_server.proximal.blocks import Blocks, Copy
from dtk.parameter_server.proximal.jobs import BlockJob, MeasureJob
from dtk.parameter_server.proximal.row_loss import RowLoss
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import OutputsT, TaskQueue, WorkT, own_part


class BlockCoordinateDescent:
    """Block coordinate descent with the workers of a strategy."""

    def __init__(
        self,
        strategy: JobStrategy,
        loss: Function[tf.Tensor],
        weights: Array,
        data: tuple[Array, ...],
        blocks: int,
    ):
        self._pool, self._note_traffic = strategy.pool, strategy.note_traffic
        self._count = min(strategy.workers, len(data[0]))
        self._blocks = Blocks(weights, blocks, len(strategy.placement), self._count)
        spans = [even_bounds(len(data[0]), part, self._count) for part in range(self._count)]
        parts = [tuple(array[begin:end] for array in data) for begin, end in spans]
        self._part_rows = [end - begin for begin, end in spans]
        self._copies = [Copy(self._blocks, parts) for _ in range(strategy.workers)]
        self._loss = RowLoss(loss, self._blocks, data)

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
        job = BlockJob(self._loss, self._blocks, self._copies, rate, l1, self._note_traffic)
        record(0)
        with contextlib.closing(
            self._dispatcher(job, tau, lambda schedule: record(schedule.finished))
        ) as dispatcher:
            dispatcher.run(order)
            return dispatcher.schedule

    def measure(self) -> tuple[float, float]:
        """Compute the sum of the loss over all rows, and |w|_1, at the current weights.

        Workers finish their work and then compute this; nothing is applied meanwhile.
        """
        job = MeasureJob(self._loss, self._copies, self._part_rows)
        with contextlib.closing(self._dispatcher(job, tau=0)) as dispatcher:
            dispatcher.run([None])
        return job.total, job.norm

    def _dispatcher(
        self,
        job: WorkerJob[WorkT, OutputsT],
        tau: float,
        on_applied: Callable[[Schedule], None] = lambda schedule: None,
    ) -> Dispatcher[WorkT, OutputsT]:
        def new_queue() -> TaskQueue[WorkT, OutputsT]:
            return TaskQueue(Schedule(tau, slices=self._count), choose_part=own_part)

        return Dispatcher(self._pool, new_queue, job, on_applied=on_applied)
