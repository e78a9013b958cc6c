"""A communicator that packs and unpacks but sends nothing, to measure dtk's own overhead."""

from __future__ import annotations

import socket

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.packed import PackedCommunicator


class NullCommunicator(PackedCommunicator):
    """Claims any world, and behaves as if every other rank held nothing.

    A sum is the identity. A gather returns this rank's rows once per rank, so that shapes are the
    same as in a real world. An all-to-all returns this rank's own block once per rank, cut or
    filled up with zeros to the expected length. Every dtype but bool is native. `bytes_sent` counts
    the bytes that a real transport would have been given.
    """

    name = "null"

    moves = frozenset(
        {
            tf.bool,
            *(tf.int8, tf.int16, tf.int32, tf.int64),
            *(tf.uint8, tf.uint16, tf.uint32, tf.uint64),
            *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
        }
    )
    reduces = moves - {tf.bool}  # TensorFlow adds no bools up

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is not a rank of {size} (0 to {size - 1})")
        super().__init__(rank, (socket.gethostname(),) * size)

    def _reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        del op, label
        return [tf.identity(t) for t in flat]

    def _gather_sizes(self, sizes: tf.Tensor, label: str) -> tf.Tensor:
        del label
        return tf.tile(sizes[None], [self.size, 1])

    def _gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        del sizes, label, lane
        return [tf.identity(flat) for _ in range(self.size)]

    def _exchange(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        del label
        # For the block of every source, take the block that this rank would send to itself.
        mine = tf.split(flat, sizes[self.rank], num=self.size)[self.rank]
        return [_of_length(mine, sizes[source, self.rank]) for source in range(self.size)]

    def _broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        del root, label
        return [tf.identity(t) for t in flat]

    def _send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        del dest, tag
        return tf.identity(flat)

    def _receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        del source, tag
        return tf.identity(room)

    def split(self, color: int, key: int | None = None) -> Communicator:
        """Return the whole world, as if every rank had given `color`; see `Communicator.split`."""
        del color, key
        return NullCommunicator(self.rank, self.size)


def _of_length(flat: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    missing = tf.maximum(length - tf.size(flat, tf.int64), 0)
    return tf.pad(flat, [[0, missing]])[:length]
