"""Training over the devices of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from dtk import cluster, quiet
from dtk.communicators.local import LocalCommunicator
from dtk.compat import keras_variables, tf_datasets, tf_extended, tf_replicas
from dtk.nests import Function, Tree
from dtk.strategies import start
from dtk.strategies.devices import set_memory_growth, warn
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer.replica.self_test import is_wanted

_Made = TypeVar("_Made")


class MirroredStrategy(DtkStrategy, tf_extended.MirroredBase):
    """Synchronous data-parallel training over the devices of one process.

    Args:
        devices: A list of device names, or their number: GPUs if there are enough, else logical CPU
            devices. None takes every GPU, or the CPU if there is none.
        memory_growth: Whether TensorFlow allocates GPU memory as it needs it; None keeps
            TensorFlow's default, which takes most of it at once.
        self_test: As for `AllReduceStrategy`.

    Raises:
        ValueError: There are fewer devices than asked for, and TensorFlow has already started, so
            no logical devices can be added.

    Example:
        >>> import dtk
        >>> strategy = dtk.strategies.MirroredStrategy(devices=2)  # doctest: +SKIP
        >>> strategy.size  # doctest: +SKIP
        2
    """

    def __init__(
        self,
        devices: int | Sequence[str] | None = None,
        *,
        memory_growth: bool | None = None,
        self_test: bool | str = "auto",
    ):
        """Take the arguments that the class describes."""
        self.self_test = is_wanted(self_test)
        _warn_of_others()
        with quiet.device_start():
            # The setting must be the same for all visible GPUs, even unused ones.
            set_memory_growth(tf.config.get_visible_devices("GPU"), memory_growth)
            names = find_devices(devices)
        super().__init__(tf_extended.MirroredExtended(self, devices=names), LocalCommunicator())

    def _of_replica(self, fn: Function[_Made]) -> Function[_Made]:
        """In `tf.function` make each replica's call a separate function.

        In one graph TensorFlow runs stateful ops (such as Assert) in the order of tracing. The
        second replica's first stateful op would wait for the first replica's last, which waits for
        a reduction that the second replica has not reached.
        """
        if tf.executing_eagerly():
            return fn
        # dtk's own: a function of the script's would be traced into this graph, see `own_loops`.
        function = tf.function(lambda *args, **kwargs: fn(*args, **kwargs))
        at_once = keras_variables.created_at_once

        # TensorFlow would trace all replicas into one tf.function, so it gets this plain one.
        @tf.autograph.experimental.do_not_convert
        def call(*args: Tree, **kwargs: Tree) -> _Made:
            with at_once(lambda made: None):
                if not any(map(keras_variables.is_variable, tf.nest.flatten((args, kwargs)))):
                    return function(*args, **kwargs)
                # As arguments of a tf.function, variables of Keras would become tensors.
                return tf.function(lambda: fn(*args, **kwargs))()

        return call

    def local_ranks(self) -> Sequence[int]:
        """Return the ranks of all replicas: this process holds every one."""
        return range(self.num_replicas_in_sync)

    def local_index(self) -> int:
        """Return the index of the running replica."""
        return tf_replicas.replica_index()

    def per_replica(self, parts: tuple[Tree, ...]) -> Tree:
        """Return per-replica values of one part per device."""
        return tf_datasets.regroup(parts)

    def take_variables(self, variables: Sequence[keras.Variable]) -> None:
        """Mirror variables that were created outside the scope, keeping their values."""
        self.take_metric_state(variables)


def _warn_of_others() -> None:
    place = cluster.detect()
    if place.size == 1:
        start.tell_of_idle_tasks()
    if place.size > 1:
        message = (
            f"MirroredStrategy trains over the devices of this process alone, and the job has "
            f"{place.size} processes ({place.reason}), each of which will train a "
            "model of its own; use dtk.auto_strategy() or AllReduceStrategy() to train one"
        )
        warn(place.rank, message, 3)


def find_devices(devices: int | Sequence[str] | None) -> list[str]:
    """Find the devices to use; make logical CPU devices if there are too few."""
    if devices is None:
        kind = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
        return [device.name for device in tf.config.list_logical_devices(kind)]
    if not isinstance(devices, int) and len(devices) > 0:
        return _named(list(devices))
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise ValueError(f"devices={devices!r} is not a number of devices; use 1 or more")
    if len(tf.config.get_visible_devices("GPU")) >= devices:
        return [device.name for device in tf.config.list_logical_devices("GPU")[:devices]]
    cpus = tf.config.list_physical_devices("CPU")
    # Keep a script's request for more devices; after TensorFlow has started it is too late.
    asked = tf.config.get_logical_device_configuration(cpus[0]) or []
    if len(asked) < devices:
        with contextlib.suppress(RuntimeError):
            tf.config.set_logical_device_configuration(
                cpus[0], [tf.config.LogicalDeviceConfiguration()] * devices
            )
    logical_cpus = tf.config.list_logical_devices("CPU")
    if len(logical_cpus) < devices:
        raise ValueError(
            f"devices={devices}, but TensorFlow has already started with {len(logical_cpus)} CPU "
            "device(s) and cannot add more; make the strategy before anything else uses TensorFlow"
        )
    return [device.name for device in logical_cpus[:devices]]


def _named(names: list[str]) -> list[str]:
    known = {d.name.lower() for d in tf.config.list_logical_devices()}
    for name in names:
        if not any(k.endswith(name.lower().lstrip("/").removeprefix("device:")) for k in known):
            raise ValueError(
                f"device {name!r} does not exist; there are {', '.join(sorted(known))}"
            )
    if len({name.lower().rpartition("device:")[2].lstrip("/") for name in names}) < len(names):
        raise ValueError(f"devices={names!r} names a device twice; name each once")
    return names
