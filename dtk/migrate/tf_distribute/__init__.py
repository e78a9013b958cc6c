"""The names of `tf.distribute` that scripts of Keras use, over dtk's strategies.

    from dtk.migrate import tf_distribute          # in place of: tf.distribute
    strategy = tf_distribute.MultiWorkerMirroredStrategy()

dtk's strategies are `tf.distribute.Strategy`s: `scope`, `run`, `reduce`, `num_replicas_in_sync`,
`experimental_distribute_dataset`, `cluster_resolver` and the like are used as before. Names that
dtk has nothing for raise AttributeError, which says what to write.
"""

from __future__ import annotations

import importlib

import tensorflow as tf

from dtk import strategies
from dtk.errors import ReplacedError
from dtk.migrate.replaced_names import kept
from dtk.migrate.tf_distribute import cluster_resolver
from dtk.strategies.cluster_resolver import JobResolver
from dtk.trainer.strategy import tell

# `experimental` uses the names above it.
__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "cluster_resolver",
]


class MirroredStrategy(strategies.MirroredStrategy):
    """`dtk.strategies.MirroredStrategy`, with TensorFlow's arguments.

    Args:
        devices: Names of devices; None takes every GPU, or the CPU if there is none.
        cross_device_ops: How TensorFlow would sum gradients. It changes nothing: the sum is the
            same, and dtk prints so.
    """

    def __init__(
        self,
        devices: list[str] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
    ):
        """Take the arguments that the class describes."""
        super().__init__(devices)
        if cross_device_ops is not None:
            tell(self, f"MirroredStrategy(cross_device_ops={cross_device_ops!r}) changes nothing")


class MultiWorkerMirroredStrategy(strategies.AllReduceStrategy):
    """`dtk.strategies.AllReduceStrategy`, with TensorFlow's arguments.

    Args:
        cluster_resolver: One of `tf_distribute.cluster_resolver`, or None: the launcher tells which
            ranks there are.
        communication_options: How TensorFlow would send gradients. It changes nothing: the sum is
            the same, and dtk prints so.

    Raises:
        ReplacedError: The resolver names another cluster than the launcher.
    """

    def __init__(
        self,
        cluster_resolver: JobResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
    ):
        """Take the arguments that the class describes."""
        _check_resolver(cluster_resolver)
        super().__init__()
        if communication_options is not None:
            tell(self, "MultiWorkerMirroredStrategy(communication_options=) changes nothing")


class ParameterServerStrategy(strategies.ParameterServerStrategy):
    """An asynchronous `dtk.strategies.ParameterServerStrategy`, with TensorFlow's arguments.

    Workers and servers stay in the constructor, so the script needs no `tf.distribute.Server`.

    Args:
        cluster_resolver: One of `tf_distribute.cluster_resolver`, or None: the launcher tells which
            tasks there are.
        variable_partitioner: Cuts large variables into parts on several servers.

    Raises:
        ReplacedError: The resolver names another cluster than the launcher.
    """

    def __init__(
        self,
        cluster_resolver: JobResolver | None = None,
        variable_partitioner: tf.distribute.experimental.partitioners.Partitioner | None = None,
    ):
        """Take the arguments that the class describes."""
        _check_resolver(cluster_resolver)
        super().__init__("async", variable_partitioner)


def _check_resolver(resolver: object) -> None:
    if resolver is not None and not isinstance(resolver, JobResolver):
        raise ReplacedError(
            f"cluster_resolver={type(resolver).__name__}: the launcher tells who takes part; leave "
            "it out, and start by `dtk run`, mpirun, srun or with TF_CONFIG"
        )


def __getattr__(name: str) -> object:
    if name == "experimental":
        return importlib.import_module("dtk.migrate.tf_distribute.experimental")
    return kept(name, tf.distribute)
