"""The strategy and the trainer, as far as jobs see them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import keras
import tensorflow as tf

from dtk.compat import keras_variables, tf_replicas
from dtk.errors import check_number
from dtk.exchange import Downpour
from dtk.nests import Array
from dtk.parameter_server import served_optimizer
from dtk.parameter_server.consistency_models import Consistency
from dtk.parameter_server.run_server import Chief
from dtk.parameter_server.worker_pool import WorkerPool
from dtk.trainer.distributed_trainer import DistributedTrainer
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.strategy import Strategy

# A Keras variable, or a part of one that is partitioned over servers.
Weight: TypeAlias = keras.Variable | keras_variables.VariablePart
# Takes the evaluated model, the folder of checkpoints, the checkpoint's name, its numbers, and the
# numbers of the checkpoints that were evaluated before it.
Exporter: TypeAlias = Callable[
    [keras.Model, Path, str, Mapping[str, float], Sequence[Mapping[str, float]]], object
]


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """When the evaluator of a parameter-server job evaluates, on how much, and what it exports.

    Args:
        start_delay: Seconds from when the chief is there to the first evaluation.
        throttle: Least seconds between the starts of two evaluations. Of the checkpoints that
            appear meanwhile, only the newest is evaluated. 0: every checkpoint is.
        steps: Batches of an evaluation; None: `validation_steps` of `fit`, or all data.
        exporters: Such as `dtk.inference.BestExporter()`; called after each evaluation.

    Raises:
        ValueError: A number is negative, or there are no steps.

    Example:
        >>> EvaluatorConfig(start_delay=120, throttle=600, steps=100)
        EvaluatorConfig(start_delay=120, throttle=600, steps=100, exporters=())

    Source: `EvalSpec` of TensorFlow's `train_and_evaluate`.
    """

    start_delay: float = 0.0
    throttle: float = 0.0
    steps: int | None = None
    exporters: Sequence[Exporter] = ()

    def __post_init__(self) -> None:
        for name in ("start_delay", "throttle"):
            value = getattr(self, name)  # may be infinite
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{name}={value!r}; expected seconds, 0 or more")
        if self.steps is not None:
            expected = "batches, 1 or more, or None for all"
            check_number("steps", self.steps, expected, lambda n: n >= 1 and n.is_integer())


class WholeStepNeeded(ValueError):
    """A step needs all rows of its batch in one place."""


class JobStrategy(Strategy):
    """Strategy of a job with parameter servers, on the chief and in the evaluator."""

    exchange: Downpour | None = None  # type: ignore[assignment]  # it pushes, and is no Exchange
    consistency: Consistency  # when a step may start
    workers: int  # number of workers, backup workers included
    pool: WorkerPool  # the workers, as threads on the chief that ask for work
    evaluator: EvaluatorConfig
    chief: Chief  # the chief, as the evaluator's process sees it
    moved: Array  # bytes pulled, bytes pushed and steps of each worker, shape (workers, 3)

    @property
    def slices(self) -> int:
        """Number of parts a global batch is cut into: one per worker if synchronous, else one."""
        return self.consistency.slices(self.workers)

    def sum_over_slices(self, value: tf.Tensor) -> tf.Tensor:
        """Return a value as the sum over a step's slices, which must be a single one.

        Args:
            value: Any tensor.

        Returns:
            The value.

        Raises:
            ValueError: The batch is cut over workers.
        """
        self.check_whole_step("a loss that is a mean over masked or weighted rows")
        return value

    def check_whole_step(self, what: str) -> None:
        """Raise for a feature that needs all rows, if the batch of this step is cut over workers.

        Args:
            what: The feature, for the message.

        Raises:
            ValueError: The batch is cut over workers.
        """
        if self.workers > 1 and not tf_replicas.computes_as_one_replica():
            raise WholeStepNeeded(
                f"{what} needs workers to exchange numbers within a step, which workers of "
                f"parameter servers do not; a batch is cut over {self.workers}. Use "
                "AllReduceStrategy"
            )

    @property
    def placement(self) -> list[int]:
        """Bytes of variables on each parameter server; slot variables are not counted."""
        return list(self.extended.bytes_placed)

    def note_traffic(self, worker: int, moved: Array, steps: int = 1) -> None:
        """Count the bytes that steps of a worker pulled and pushed.

        Args:
            worker: Index of the worker.
            moved: Bytes pulled and bytes pushed, of shape (2,).
            steps: Number of steps.
        """
        self.moved[worker] += (*moved, steps)

    @property
    def traffic(self) -> list[dict[str, int]]:
        """Steps computed, and bytes pulled from and pushed to the parameter servers, per worker."""
        return [
            {"steps": int(steps), "pulled": int(pulled), "pushed": int(pushed)}
            for pulled, pushed, steps in self.moved
        ]


class JobTrainer(DistributedTrainer):
    """Trainer of a model with steps that run on workers."""

    strategy: JobStrategy

    def __init__(self, model: keras.Model, strategy: JobStrategy):
        super().__init__(model, strategy)
        self._parts: dict[int, list[Weight]] = {}

    @property
    def takes_over(self) -> bool:
        """True: even one worker is another process."""
        return True

    def bind_optimizers(self) -> None:
        """Let traced steps record their gradients instead of applying them."""
        for optimizer in shared_optimizer.optimizers_of(self.model):
            served_optimizer.take_over(optimizer, self.strategy, self.parts_of)

    def parts_of(self, variable: keras.Variable) -> list[Weight]:
        """Return the parts of a Keras variable; the variable alone if it is not partitioned."""
        shards = keras_variables.shards_of(keras_variables.stored(variable))
        if shards is None:
            return [variable]
        if id(variable) not in self._parts:  # optimizers tell the parts apart by identity
            self._parts[id(variable)] = [
                keras_variables.VariablePart(variable, shard, f"{variable.name}_part_{index}")
                for index, shard in enumerate(shards)
            ]
        return self._parts[id(variable)]
