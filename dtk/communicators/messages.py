"""Collectives that run side by side, and keys that tell messages of two ranks apart.

Both ends count a message whenever it runs, and take keys in turn. With one key, a message may reach
the sender while the message before is still listed there: "Second consumer arrived for key".
Counting at trace time would fail: a message in a loop is traced once, a body may be traced twice,
and one end may trace again when the other does not. But the k-th message that one end sends under a
tag is always the k-th that the other end receives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from dtk.communicators.sequencer import CollectiveSequencer, lane


class CollectiveMessage(NamedTuple):
    """A collective about to run."""

    inputs: list[tf.Tensor]  # flat tensors, in dtypes the backend takes
    # takes the inputs and the message's first lane: how many inputs other messages have before it
    send: Callable[[list[tf.Tensor], int], list[tf.Tensor]]
    # turns the tensors from `send` into the result: a tensor, `tf.IndexedSlices`, or a list
    finish: Callable[[list[tf.Tensor]], tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]


def run_together(
    messages: Sequence[CollectiveMessage], sequencer: CollectiveSequencer
) -> list[tf.Tensor | tf.IndexedSlices | list[tf.Tensor]]:
    """Send messages side by side, each once its own values are ready.

    A backend may have few lanes; messages that share a lane wait for each other.
    """
    if not messages:
        return []
    lengths = []

    def send(flat: list[tf.Tensor]) -> list[tf.Tensor]:
        outputs: list[tf.Tensor] = []
        begin = 0
        for message in messages:
            end = begin + len(message.inputs)
            received = message.send(flat[begin:end], begin)
            lengths.append(len(received))
            outputs += received
            begin = end
        return outputs

    received = iter(sequencer.run([t for m in messages for t in m.inputs], send))
    return [
        message.finish(list(itertools.islice(received, length)))
        for message, length in zip(messages, lengths, strict=True)
    ]


# An end starts message k when its own k-1 is over, and then the other end has ended k-2: two keys
# would do. Four leave room for what TensorFlow clears up after an op has ended.
KEYS_IN_TURN = 4


class MessageCount:
    """Messages so far in one direction under one tag."""

    def __init__(self, device: str) -> None:
        self._handle = lane(device)
        with tf.init_scope(), tf.device(device):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant([0, 0], tf.int64))

    def choose(self, keys: Sequence[int | tf.Tensor]) -> tf.Tensor:
        """Return the key of the next message, and count it."""
        count = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)[0]
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=tf.constant([1, 0], tf.int64))
        return tf.stack([tf.cast(key, tf.int32) for key in keys])[count % KEYS_IN_TURN]
