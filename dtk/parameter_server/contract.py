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
    """Strategy of a job that may have an evaluator.

    Attributes:
        has_evaluator: Whether a process of the job evaluates checkpoints beside the training.
    """

    has_evaluator: bool


class JobStrategy(Strategy, MaybeEvaluated, Protocol):
    """Strategy in any process of a job that comes back from its constructor.

    Attributes:
        exchange: What of the gradients is pushed, and how often; None pushes every gradient.
    """

    exchange: Downpour | None  # type: ignore[assignment]  # it pushes, and is no Exchange


class ServerStrategy(JobStrategy, Protocol):
    """Strategy on the chief, a `ParameterServerStrategy`.

    Attributes:
        consistency: When a step may start.
        workers: Number of workers, backup workers included.
        pool: The workers, as threads that ask for work.
    """

    consistency: Consistency
    workers: int
    pool: WorkerPool

    @property
    def slices(self) -> int:
        """Parts a global batch is cut into."""

    @property
    def placement(self) -> list[int]:
        """Bytes of weights on each parameter server."""

    def sum_over_slices(self, value: tf.Tensor) -> tf.Tensor:
        """Sum a value over a step's slices, where it is whole.

        Args:
            value: One slice's value, a scalar.

        Returns:
            The sum, a scalar.

        Raises:
            ValueError: A step is cut over workers, which cannot exchange numbers within a step.
        """

    def note_traffic(self, worker: int, moved: Array, steps: int = 1) -> None:
        """Count the bytes that steps have pulled and pushed.

        Args:
            worker: Index of the worker that has computed them.
            moved: Bytes pulled and bytes pushed, int64 of shape `[2]`.
            steps: How many steps they were.
        """


class EvaluatorStrategy(JobStrategy, Protocol):
    """Strategy in the evaluator's process, a `ParameterServerStrategy`.

    Attributes:
        chief: The chief, as this process sees it.
    """

    chief: Chief


class JobTrainer(Protocol):
    """Trainer of a model, as its jobs see it.

    Attributes:
        model: The model that is trained, tested or predicted with.
        tried: Names of the steps that were tried on a few rows, see `self_test`.
    """

    model: keras.Model
    tried: set[str]

    @property
    def strategy(self) -> ServerStrategy:
        """Strategy on the chief."""

    def rng_state_variables(self) -> list[keras.Variable]:
        """Return the state variables of the model's random number generators.

        Returns:
            Keras variables of shape `[2]`, uint32, in the order of the layers.
        """

    def parts_of(self, variable: keras.Variable) -> list[Weight]:
        """Return a variable in a list, or its parts where servers hold it in parts.

        Args:
            variable: The variable.

        Returns:
            One variable, or a `keras_variables.Part` for each part.
        """

    def kinds_of(self, name: str) -> Mapping[str, str]:
        """Return what is known of the terms of a step's loss.

        Args:
            name: "train" or "test".

        Returns:
            Name of a term -> its kind, see `dtk.trainer.tracing.loss_terms`.
        """
