"""The names of `tf.distribute.cluster_resolver`: the launcher's job, however it was started."""

from __future__ import annotations

import os

import tensorflow as tf

from dtk import cluster, communicators
from dtk.cluster import tf_config
from dtk.errors import ReplacedError
from dtk.migrate.replaced_names import kept
from dtk.strategies.cluster_resolver import JobResolver, resolve

__all__ = ["SlurmClusterResolver", "TFConfigClusterResolver"]


def TFConfigClusterResolver(**arguments: object) -> JobResolver:  # noqa: N802
    """Describe the job and this task, of TF_CONFIG or of another launcher.

    Args:
        arguments: Must be empty: the launcher tells all that TensorFlow's could be given.

    Returns:
        A resolver with `task_type`, `task_id` and `cluster_spec()`.

    Raises:
        ReplacedError: An argument was given.
        ClusterError: The environment contradicts itself.

    Example:
        >>> from dtk.migrate import tf_distribute
        >>> tf_distribute.cluster_resolver.TFConfigClusterResolver().task_type is None
        True
    """
    if arguments:
        settings = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ReplacedError(
            f"a cluster resolver with {settings}: the launcher tells who takes part; leave it out"
        )
    config = tf_config.parse(os.environ.get("TF_CONFIG", ""))
    if config is not None:
        spec = tf.train.ClusterSpec(dict(config.cluster))
        return JobResolver(spec, task_type=config.role, task_id=config.index, rpc_layer="grpc")
    return resolve(communicators.create("null", cluster.detect()))


SlurmClusterResolver = TFConfigClusterResolver


def __getattr__(name: str) -> object:
    return kept(name, tf.distribute.cluster_resolver, "cluster_resolver.")
