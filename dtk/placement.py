"""Where tensors are: the one place that answers with the name of a device.

    host        what Python reads, and what counts and measures: this process's CPU
    messages    what a backend sends and receives, and the variables that keep messages in order
    reduction   what is computed of messages that have come: sums of blocks and of rows
    computing   a replica's step: the replica's GPU if it has one
    keeping     what an exchange remembers between steps: beside the gradients

A backend that takes tensors of a GPU needs another answer here, and nowhere else.
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


def reduction() -> str:
    """Return the device that adds up what messages bring."""
    return messages()


def computing(strategy: tf.distribute.Strategy) -> str:
    """Return the device on which this process's first replica computes its steps."""
    return strategy.extended.worker_devices[0]


def keeping(strategy: tf.distribute.Strategy) -> str:
    """Return the device on which exchanges keep what they remember between steps."""
    return computing(strategy)


def outside_graph(work: Callable[[], _T]) -> _T:
    """Run in a new thread, which is outside the traced graph, its device and its replica."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
