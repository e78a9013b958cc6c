"""What the extended objects here use of the strategies that contain them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import tensorflow as tf


class AllReduceContainer(Protocol):
    """A strategy of replicas whose values are all-reduced."""

    is_evaluator: bool


class ServerContainer(Protocol):
    """A strategy whose variables are on parameter servers."""

    def check_whole_step(self, what: str) -> None:
        """Refuse what would need workers to exchange numbers within a step.

        Args:
            what: What needs it, for the message.

        Raises:
            ValueError: A step is cut over several workers.
        """

    def per_worker_dataset(
        self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    ) -> tf.data.Dataset:
        """Return a dataset of pipelines that workers read themselves.

        Args:
            dataset_fn: Makes a worker's pipeline.
        """
