"""Choose the strategy that the environment asks for."""

from __future__ import annotations

import os

from dtk import cluster, quiet
from dtk.cluster import tf_config
from dtk.strategies.allreduce import AllReduceStrategy
from dtk.strategies.devices import set_memory_growth
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.strategies.mirrored import MirroredStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy


def auto_strategy(
    *, memory_growth: bool | None = None, self_test: bool | str = "auto"
) -> DtkStrategy:
    """Choose a strategy from the environment.

    A TF_CONFIG with parameter servers gets an asynchronous `ParameterServerStrategy`; one process
    with several GPUs gets a `MirroredStrategy`; everything else gets an `AllReduceStrategy`, which
    is plain Keras for one process.

    Args:
        memory_growth: Whether TensorFlow allocates GPU memory as it needs it; None keeps
            TensorFlow's own setting.
        self_test: As for `AllReduceStrategy`.

    Returns:
        The strategy, ready for use.

    Raises:
        ClusterError: The environment contradicts itself.

    Example:
        >>> import dtk
        >>> dtk.auto_strategy().size
        1
    """
    import tensorflow as tf

    place = cluster.detect()
    config = tf_config.parse(os.environ.get("TF_CONFIG", ""))
    if place.kind == "tf_config" and config is not None and config.cluster.get("ps"):
        set_memory_growth(tf.config.get_visible_devices("GPU"), memory_growth)
        return ParameterServerStrategy(self_test=self_test)
    if place.size == 1:
        with quiet.device_start():
            gpus = tf.config.get_visible_devices("GPU")
        if len(gpus) > 1:
            return MirroredStrategy(memory_growth=memory_growth, self_test=self_test)
    return AllReduceStrategy(memory_growth=memory_growth, self_test=self_test)
