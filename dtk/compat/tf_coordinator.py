"""Threads that TensorFlow keeps for the workers of a parameter-server job."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator, coordinator_context


def employ(strategy: tf.distribute.Strategy, work: Callable[[], None], count: int) -> None:
    """Run a Python function on the threads that TensorFlow keeps for its workers.

    TensorFlow calls it under the worker's device. When it raises because the worker is lost,
    TensorFlow waits until the worker is back, rebuilds its resources, and calls it again.
    """
    cluster = tf.distribute.coordinator.ClusterCoordinator(strategy)._cluster
    for _ in range(count):
        cluster.schedule(work, args=None, kwargs=None)


def silence_coordinator() -> None:
    """Keep TensorFlow's report of a lost worker, several pages long, out of the log.

    dtk names the lost worker in one line and raises errors that end the job.
    """

    def needed(record: logging.LogRecord) -> bool:
        return os.path.basename(record.pathname) != os.path.basename(cluster_coordinator.__file__)

    tf.get_logger().addFilter(needed)


def current_worker() -> int:
    """Return the index of this thread's worker; call it inside `work` of `employ`."""
    return int(coordinator_context.get_current_dispatch_context().worker_index)


def worker_is_lost(error: Exception) -> bool:
    """Return whether an error makes TensorFlow wait for a lost worker to return."""
    if isinstance(error, tf.errors.CancelledError) and "/job:" in str(error):
        return True
    return bool(cluster_coordinator._is_worker_failure(error))
