"""Communicators that send nothing: a world of one, and one that only claims to be larger."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.transport import Transport


class NullTransport(Transport):
    """Claims any world, and behaves as if every other rank held nothing: measures dtk's overhead.

    A sum is the identity. A gather returns this rank's rows once per rank, an all-to-all its own
    block; both are cut or filled up with zeros to the length that the other rank would send, so
    that shapes are the same as in a real world. Every dtype but bool is native.
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
    is_pretended = True

    def reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        return [tf.identity(t) for t in flat]

    def gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        return [_fitted(flat, sizes[source]) for source in range(self.size)]

    def alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        # For the block of every source, take the block that this rank would send to itself.
        mine = tf.split(flat, sizes[self.rank], num=self.size)[self.rank]
        return [_fitted(mine, sizes[source, self.rank]) for source in range(self.size)]

    def broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        return [tf.identity(t) for t in flat]

    def send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        return tf.identity(flat)

    def receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        return tf.identity(room)

    def group(
        self, ranks: Sequence[int], groups: Sequence[Sequence[int]], number: int
    ) -> Transport:
        return type(self)(ranks.index(self.rank), len(ranks))


class LocalTransport(NullTransport):
    """The group of this process alone: every collective is the identity, and costs nothing."""

    name = "local"


class NullCommunicator(Communicator):
    """A communicator over a `NullTransport`.

    `bytes_sent` counts the bytes that a real transport would have been given.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank={rank} is not a rank of {size} (0 to {size - 1})")
        super().__init__(NullTransport(rank, size), (socket.gethostname(),) * size)


class LocalCommunicator(Communicator):
    """The communicator of this process alone.

    It refuses what the other communicators refuse, so a script that runs here also runs on several
    ranks.

    Args:
        host: This host's name.
    """

    def __init__(self, host: str | None = None) -> None:
        super().__init__(LocalTransport(0, 1), [host or socket.gethostname()])


def _fitted(flat: tf.Tensor, length: tf.Tensor) -> tf.Tensor:
    """Cut a vector, or fill it up with zeros."""
    missing = tf.maximum(tf.cast(length, tf.int64) - tf.size(flat, tf.int64), 0)
    return tf.pad(flat, [[0, missing]])[:length]
