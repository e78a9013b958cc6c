"""Protocols of what jobs see of the strategy and of the trainer, and the trainer of the strategy.

Strategies are a room above this one and construct what is here, so that they are known by these
protocols only: nothing is in them that is not used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import keras
import tensorflow as tf

from dtk.exchange import Downpour
from dtk.nests import Array
from dtk.parameter_server.consistency_models import Consistency
from dtk.parameter_server.gradient_buffers import Weight
from dtk.parameter_server.run_server import Chief
from dtk.parameter_server.worker_pool import WorkerPool
from dtk.trainer.contract import Strategy


class MaybeEvaluated(Protocol):
    """Strategy of a job that may have an evaluator."""

    has_evaluator: bool  # whether a process of the job evaluates checkpoints beside the training


class JobStrategy(Strategy, MaybeEvaluated, Protocol):
    """Strategy in any process of a job that comes back from its constructor."""

    exchange: Downpour | None  # type: ignore[assignment]  # it pushes, and is no Exchange


class ServerStrategy(JobStrategy, Protocol):
    """Strategy on the chief, a `ParameterServerStrategy`."""

    consistency: Consistency  # when a step may start
    workers: int  # number of workers, backup workers included
    pool: WorkerPool  # the workers, as threads that ask for work

    @property
    def slices(self) -> int:
        """Parts a global batch is cut into."""

    @property
    def placement(self) -> list[int]:
        """Bytes of weights on each parameter server."""

    def sum_over_slices(self, value: tf.Tensor) -> tf.Tensor:
        """Sum a value over a step's slices, where it is whole."""

    def note_traffic(self, worker: int, moved: Array, steps: int = 1) -> None:
        """Count the bytes that steps have pulled and pushed."""


class EvaluatorStrategy(JobStrategy, Protocol):
    """Strategy in the evaluator's process, a `ParameterServerStrategy`."""

    chief: Chief  # the chief, as this process sees it


class JobTrainer(Protocol):
    """Trainer of a model, as its jobs see it."""

    model: keras.Model  # the model that is trained, tested or predicted with
    tried: set[str]  # names of the steps that were tried on a few rows, see `self_test`

    @property
    def strategy(self) -> ServerStrategy:
        """Strategy on the chief."""

    def rng_state_variables(self) -> list[keras.Variable]:
        """Return the state variables of the model's random number generators."""

    def parts_of(self, variable: keras.Variable) -> list[Weight]:
        """Return a variable in a list, or its parts where servers hold it in parts."""

    def kinds_of(self, name: str) -> Mapping[str, str]:
        """Return what is known of the terms of a step's loss."""
