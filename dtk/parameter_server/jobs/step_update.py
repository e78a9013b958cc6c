"""Update of a model by a complete training step: its weights, random states, metrics and logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dtk.nests import Array, Nest
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.functional_step import FunctionalStep
from dtk.parameter_server.job_context import JobTrainer
from dtk.parameter_server.jobs.batch_dispatch import SerialPhase
from dtk.parameter_server.jobs.gradient_commit import GradientCommit, NewLayout
from dtk.parameter_server.jobs.metric_sum import Counted, MetricSum
from dtk.parameter_server.jobs.rng_states import RngStates
from dtk.parameter_server.scheduler import Schedule


class TrainReport(Counted):
    """What a training step reports: tensors while it is traced, arrays when it has run."""

    moved: list[Array]  # by how much it moves statistics; see `GradientCommit.moved_by`
    rng_state: list[Array]  # states that random layers go on from, one of shape `[2]` per layer


class TrainOutputs(NamedTuple):
    """What a worker has computed of a training step."""

    report: TrainReport
    share: float  # the slice's part of the rows of its batch, 0 to 1
    buffer: gradient_buffers.GradientBuffer  # the buffer that its gradients lie in
    worker: int  # index of the worker
    batches: int = 1  # how many batches they are of


class NonFiniteStep(NamedTuple):
    """First step of a training whose loss or metrics were not finite."""

    step: int  # its number, from 1
    workers: tuple[int, ...]  # indices of the workers whose slices of it they were


class StepUpdate:
    """What training steps of either job report, and what the chief does with it."""

    def __init__(
        self,
        trainer: JobTrainer,
        serial_phase: SerialPhase,
        new_layout: NewLayout = gradient_buffers.BufferLayout,
    ):
        self._serial_phase = serial_phase
        self.commit = GradientCommit(trainer, new_layout)
        self.rng_states = RngStates(trainer.seed_states, draws=True)
        self.metrics = MetricSum(trainer.model)
        self.non_finite: NonFiniteStep | None = None

    def report(
        self,
        traced: FunctionalStep,
        data: Nest,
        given: Sequence[tuple[keras.Variable, tf.Tensor]],
    ) -> TrainReport:
        """Collect what is reported of a traced step, besides its gradients."""
        return {
            **self.metrics.count(traced, data),
            "moved": self.commit.moved_by(traced, given),
            "rng_state": self.rng_states.left_by(traced),
        }

    def apply(self, outputs: Sequence[TrainOutputs], schedule: Schedule) -> None:
        """Apply a complete step."""
        reports = [found.report for found in outputs]
        self.commit.apply(
            [found.buffer for found in outputs],
            [found.share for found in outputs],
            [report["moved"] for report in reports],
        )
        if not schedule.tau and reports[0]["rng_state"]:
            # One after the other, steps go on from where the last one stopped.
            self.rng_states.go_on_from(reports[0]["rng_state"])
        self.metrics.add(reports)
        if self.non_finite is None:
            self.non_finite = non_finite(outputs, schedule.finished + 1)
        rows = sum(int(report["rows"]) for report in reports)
        self._serial_phase.count(rows, sum(found.batches for found in outputs), schedule)
        if schedule.tau:
            statistics = schedule.statistics
            self.metrics.logs["staleness_mean"] = statistics.mean
            self.metrics.logs["staleness_max"] = float(statistics.max)


def non_finite(outputs: Sequence[TrainOutputs], step: int) -> NonFiniteStep | None:
    """Look whether what a step has counted is finite: at numbers that are here, and no gradient."""
    workers = {
        one.worker
        for one in outputs
        if not all(bool(np.all(np.isfinite(counted))) for counted in one.report["metrics"])
    }
    return NonFiniteStep(step, tuple(sorted(workers))) if workers else None
