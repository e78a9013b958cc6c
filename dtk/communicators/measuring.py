"""Measuring what a message, a byte and an operation take in a world: its `Costs`.

all-reduces of 128 kB, one after the other   ->  message   \\  Hockney's model: so many messages
one of a few megabytes                       ->  byte      /   and bytes as a ring needs
a product of two matrices                    ->  operation
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs, line

_FEW, _MANY = 1 << 17, 1 << 22  # bytes
_CHAIN = 8
_TURNS = 5
# Where a link is slow, so many seconds are enough for a turn.
_LONG = 0.1
# A product as `dtk.exchange.factors` has them: rows of a batch, and a kernel.
_ROWS, _SIDE = 64, 1024


def measure(communicator: Communicator, device: str) -> Costs:
    """Measure a world; all ranks call it together, and get the same numbers.

    Takes about half a second on a fast link, and 2 on one of 100 Mbit/s.

    Args:
        communicator: Of the world.
        device: Where this rank computes.
    """
    operation = _slowest(communicator, _time(_product(device))) / (2 * _ROWS * _SIDE**2)
    few = _allreduce_seconds(communicator, _FEW, _CHAIN)
    many = _MANY if few * _MANY / _FEW < _LONG else 2 * _FEW
    much = _allreduce_seconds(communicator, many, 1)
    message, byte = line(communicator.size, {_FEW: few, many: much})
    return Costs(communicator.size, message, byte, operation)


def _allreduce_seconds(communicator: Communicator, size: int, chain: int) -> float:
    with tf.device("CPU:0"):
        values = tf.zeros(size // 4)

    @tf.function(autograph=False, jit_compile=False)
    def sums() -> tf.Tensor:
        with communicator.sequence(f"costs/{size}"):
            value = values
            for _ in range(chain):
                value = communicator.allreduce(value)
            return value[0]

    return _slowest(communicator, _time(lambda: sums().numpy())) / chain


def _product(device: str) -> Callable[[], object]:
    with tf.device(device):
        left, right = tf.ones([_ROWS, _SIDE]), tf.ones([_ROWS, _SIDE])

    def multiply() -> object:
        with tf.device(device):
            return tf.matmul(left, right, transpose_a=True)[0, 0].numpy()

    return multiply


def _time(work: Callable[[], object]) -> float:
    """Median seconds of a few turns, after one that traces."""
    work()
    took = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def _slowest(communicator: Communicator, seconds: float) -> float:
    """Of all ranks, the number that all wait for."""
    return float(communicator.allreduce(tf.constant(seconds, tf.float64), "max"))
