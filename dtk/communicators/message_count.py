"""Which message between two ranks is which: counted on both ends, whenever one runs.

A message of the same key as the one before may reach the sender while that is still listed there:
"Second consumer arrived for key". Counting while a function is traced would not do: a message in a
loop is traced once, a body may be traced twice, and one end may trace again when the other does
not. The k-th message that one end sends under a tag is the k-th that the other receives, so both
count executions, and take keys in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.sequencer import lane

# An end starts a message when the one before is over on it, so the other has ended the one before
# that: two keys would do. Four leave room for what TensorFlow clears up after an op has ended.
KEYS_IN_TURN = 4


class MessageCount:
    """Messages so far in one direction under one tag.

    Args:
        device: Where the count is kept.
    """

    def __init__(self, device: str) -> None:
        self._handle = lane(device)
        with tf.init_scope(), tf.device(device):
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant([0, 0], tf.int64))

    def choose(self, keys: Sequence[int | tf.Tensor]) -> tf.Tensor:
        """Return the key of the next message, and count it.

        Args:
            keys: `KEYS_IN_TURN` of them, equal on both ends.
        """
        count = tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64)[0]
        tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=tf.constant([1, 0], tf.int64))
        return tf.stack([tf.cast(key, tf.int32) for key in keys])[count % KEYS_IN_TURN]
