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
    """Report of a training step: tensors while it is traced, arrays when it has run."""

    moved: list[Array]  # changes of statistics; see `GradientCommit.moved_by`
    rng_state: list[Array]  # states of random layers after the step, one of shape `[2]` per layer


class TrainOutputs(NamedTuple):
    """A worker's outputs for its slice of a training step."""

    report: TrainReport
    share: float  # the slice's part of the rows of its batch, 0 to 1
    buffer: gradient_buffers.GradientBuffer  # holds the gradients
    worker: int  # index of the worker
    batches: int = 1  # number of batches


class NonFiniteStep(NamedTuple):
    """First training step with a loss or metric that is not finite."""

    step: int  # number of the step, from 1
    workers: tuple[int, ...]  # indices of the workers that computed these slices


class StepUpdate:
    """Reports of training steps, and the chief's update by a complete step, for both jobs."""

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
        """Collect the report of a traced step; gradients go another way."""
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
            # A serial step goes on where the step before has stopped.
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
    """Return the step if a count is not finite, else None; gradients, on servers, are not read."""
    workers = {
        one.worker
        for one in outputs
        if not all(bool(np.all(np.isfinite(counted))) for counted in one.report["metrics"])
    }
    return NonFiniteStep(step, tuple(sorted(workers))) if workers else None
