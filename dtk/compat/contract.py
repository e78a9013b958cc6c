"""Protocols of what is given to the files here from above.

The extended objects see the strategies that contain them, and what is put in the places of Keras's
and TensorFlow's own functions has these signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import keras
import tensorflow as tf

from dtk.nests import Function, Nest

# Makes the pipeline of one of several processes or workers.
MakesDataset: TypeAlias = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class AllReduceContainer(Protocol):
    """A strategy of replicas whose values are all-reduced."""

    is_evaluator: bool


class ServerContainer(Protocol):
    """A strategy whose variables are on parameter servers."""

    def check_whole_step(self, what: str) -> None:
        """Refuse what would need workers to exchange numbers within a step."""

    def per_worker_dataset(self, dataset_fn: MakesDataset) -> tf.data.Dataset:
        """Return a dataset of pipelines that workers read themselves."""


# What is called in the place of Keras's own function, which comes as `original`.


class ScaleLoss(Protocol):
    """Function in the place of those of Keras that divide a loss by the replicas, or undo it."""

    def __call__(
        self, value: tf.Tensor, *, original: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """Scale a loss."""


class WeighLosses(Protocol):
    """Function in the place of Keras's that makes one loss of those of rows."""

    def __call__(
        self,
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        mask: tf.Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: tf.DType = None,
        *,
        original: Function[tf.Tensor],
    ) -> tf.Tensor:
        """Weigh and reduce losses."""


class UpdateMean(Protocol):
    """Function in the place of a metric's `update_state`."""

    def __call__(
        self,
        metric: keras.Metric,
        values: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        /,
        *,
        original: Function[object],
    ) -> object:
        """Count values in a metric."""


class Differentiate(Protocol):
    """Function in the place of `tf.GradientTape.gradient`."""

    def __call__(
        self,
        tape: tf.GradientTape,
        target: Nest,
        sources: Nest,
        output_gradients: Nest,
        *,
        original: Function[Nest],
        **more: object,
    ) -> Nest:
        """Differentiate what a tape has recorded."""


class Moments(Protocol):
    """Function in the place of Keras's that computes what synchronized layers normalize with."""

    def __call__(
        self,
        x: tf.Tensor,
        axes: int | Sequence[int],
        keepdims: bool,
        *,
        original: Function[tuple[tf.Tensor, tf.Tensor]],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute mean and variance."""
