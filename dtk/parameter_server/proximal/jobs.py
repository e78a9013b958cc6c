"""Jobs of block descent: take a step of one block, and measure the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from dtk.compat import tf_servers
from dtk.nests import Array
from dtk.parameter_server.proximal.blocks import Blocks, Copy
from dtk.parameter_server.proximal.row_loss import RowLoss
from dtk.parameter_server.scheduler import Schedule
from dtk.parameter_server.task_queue import Result, Task


class BlockJob:
    """Job of block steps; a step's work is the index of its block. See `dispatch.WorkerJob`."""

    def __init__(
        self,
        loss: RowLoss,
        blocks: Blocks,
        copies: Sequence[Copy],
        rate: Array,
        l1: float,
        note_traffic: Callable[[int, Array], None],
    ):
        self._loss, self._blocks, self._copies = loss, blocks, copies
        self._rate, self._l1, self._note_traffic = rate, l1, note_traffic

    def compute(self, task: Task[int], worker: int, schedule: Schedule) -> Result[tf.Variable]:
        """Compute the gradient of a block over a part of the rows, and push it to its server."""
        del schedule
        block, copy = task.work, self._copies[worker]
        buffer = self._blocks.buffer(block)
        with copy.forgetting_on_error():
            # Constants made on the chief go along with the call; on the worker, each is a message.
            with tf.device(tf_servers.CHIEF):
                span = [tf.constant(bound) for bound in self._blocks.spans[block]]
            weights, rows = copy.weights(), copy.rows(task.part)
            pushed = self._loss.push(weights, rows, *span, buffer.handle).numpy()
            self._note_traffic(worker, np.array([copy.take_pulled(), pushed]))
        return Result(buffer)

    def apply(self, work: int, results: Sequence[Result[tf.Variable]], schedule: Schedule) -> None:
        """Have the block's server take the proximal step."""
        del schedule
        buffers = [result.outputs for result in results]
        self._blocks.apply(work, buffers, float(self._rate[work]), self._l1)


class MeasureJob:
    """A `dispatch.WorkerJob` that measures the loss once."""

    def __init__(self, loss: RowLoss, copies: Sequence[Copy], part_rows: Sequence[int]):
        self._loss, self._copies, self._part_rows = loss, copies, part_rows
        self.total = self.norm = np.nan

    def compute(self, task: Task[None], worker: int, schedule: Schedule) -> Result[Array]:
        """Compute the loss over a part of the rows."""
        del schedule
        copy = self._copies[worker]
        with copy.forgetting_on_error():
            return Result(self._loss.value(copy.weights(), copy.rows(task.part)).numpy())

    def apply(self, work: None, results: Sequence[Result[Array]], schedule: Schedule) -> None:
        """Add up the loss of all parts."""
        del work, schedule
        for rows, result in zip(self._part_rows, results, strict=True):
            values = result.outputs[1]
            if values != rows:
                raise ValueError(
                    f"loss(weights, *rows) returned {values:.0f} numbers for {rows} rows; "
                    "expected one number per row, for they are summed over all workers"
                )
        self.total = float(sum(result.outputs[0] for result in results))
        self.norm = float(results[0].outputs[2])
