"""Measure what a message, a byte and an operation take in a world: its `Costs`.

all-reduces of 128 kB, one after the other   ->  message   \\  Hockney's model, with the messages
one of a few megabytes                       ->  byte      /   and bytes of a ring
a product of two matrices                    ->  operation

The shortest of several turns counts: other work on a machine makes turns longer, never shorter, and
the result is kept for later jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import tensorflow as tf

from dtk import placement
from dtk.communicators.base import Communicator
from dtk.communicators.costs import Costs, fit_allreduces

_FEW, _SOME, _MANY = 1 << 17, 1 << 20, 1 << 22  # bytes
# Least seconds of the messages of an all-reduce.
_LEAST = 1e-6
# All-reduces in a turn, so that the cost of calling it counts little for each.
_CHAIN = 4
_TURNS = 9
# If a short all-reduce takes longer, in seconds, the long one sends less, in fewer turns.
_SLOW = 5e-3
# A long all-reduce takes at least this times a short one: less could be chance.
_APART = 1.1
# A product like in `dtk.exchange.factors`: rows of a batch, and the side of a kernel.
_ROWS, _SIDE = 64, 1024


def measure(communicator: Communicator, device: str) -> Costs:
    """Measure a world; all ranks call it together, and get the same numbers.

    Takes about half a second on a fast link, and 2 on one of 100 Mbit/s.
    """
    operation = _slowest(communicator, _time(_product(device), _TURNS)) / (2 * _ROWS * _SIDE**2)
    short = _allreduces(communicator, _FEW)
    few = _slowest(communicator, _time(short, _TURNS)) / _CHAIN
    many, turns = (_MANY, _TURNS) if few < _SLOW else (_SOME, 1)
    much = _slowest(communicator, _time(_allreduces(communicator, many), turns)) / _CHAIN
    if few < _SLOW:
        few = min(few, _slowest(communicator, _time(short, _TURNS)) / _CHAIN)
    seconds = {_FEW: few, many: max(much, _APART * few)}
    message, byte = fit_allreduces(communicator.size, seconds, _LEAST)
    return Costs(communicator.size, message, byte, operation)


def _allreduces(communicator: Communicator, size: int) -> Callable[[], object]:
    with tf.device(placement.messages()):
        values = tf.zeros(size // 4)

    @tf.function(autograph=False, jit_compile=False)
    def sums() -> tf.Tensor:
        with communicator.sequence(f"costs/{size}"):
            value = values
            for _ in range(_CHAIN):
                value = communicator.allreduce(value)
            return value[0]

    return lambda: sums().numpy()


def _product(device: str) -> Callable[[], object]:
    with tf.device(device):
        left, right = tf.ones([_ROWS, _SIDE]), tf.ones([_ROWS, _SIDE])

    def multiply() -> object:
        with tf.device(device):
            return tf.matmul(left, right, transpose_a=True)[0, 0].numpy()

    return multiply


def _time(work: Callable[[], object], turns: int) -> float:
    """Return the seconds of the shortest of a few calls, after a first one that traces."""
    work()
    took = []
    for _ in range(turns):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return min(took)


def _slowest(communicator: Communicator, seconds: float) -> float:
    """Return the seconds of the slowest rank: all others wait for it."""
    return float(communicator.allreduce(tf.constant(seconds, tf.float64), "max"))
