"""Where tensors are: on which device a step computes, sends and keeps them.

    host        what Python reads, and what counts and measures: this process's CPU
    messages    what a backend sends and receives, and the variables that keep messages in order
    is_on_card  what ranks send from GPU to GPU, if their backend links the GPUs: gradients,
                weights, statistics and layers' activations, which are floats of 16 and 32 bits.
                Counts, sizes, shares of a batch and Python values are others, and stay on the host
    computing   a replica's step: the replica's GPU if it has one. A rank sees one GPU only, see
                `strategies.devices.pin`
    reducing    sums over replicas on GPUs, and over replicas of one process: beside the step
    keeping     what an exchange remembers between steps: beside the step

On GPUs TensorFlow sums by NCCL where the group's device is a GPU and the hint is "nccl"; ranks that
name another device for one group are refused. So every message names its device, eagerly too.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tensorflow as tf

_T = TypeVar("_T")

_CPU = "CPU:0"


def host() -> str:
    """Return the device of what Python reads, counts and measures."""
    return _CPU


def messages() -> str:
    """Return the device on which backends take and leave the tensors of messages."""
    return _CPU


def is_on_card(dtype: tf.DType) -> bool:
    """Return whether ranks send values of a dtype from GPU to GPU, where GPUs are linked."""
    return bool(dtype.is_floating) and dtype.size <= 4


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU.

    Example:
        >>> is_gpu("/gpu:0"), is_gpu("CPU:0")
        (True, False)
    """
    return "gpu:" in device.lower()


def computing(strategy: tf.distribute.Strategy) -> str:
    """Return the device on which this process's first replica computes its steps."""
    return strategy.extended.worker_devices[0]


def reducing(device: str) -> str:
    """Return the device on which a replica that computes on `device` sums with the others.

    If a rank has no GPU, all ranks sum where their `messages` are.
    """
    return device


def keeping(strategy: tf.distribute.Strategy) -> str:
    """Return the device on which exchanges keep what they remember between steps."""
    return computing(strategy)


def outside_graph(work: Callable[[], _T]) -> _T:
    """Run in a new thread, which is outside the traced graph, its device and its replica."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
