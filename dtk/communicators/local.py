"""Communicators that send nothing: a world of one, and one that only claims to be larger."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import tensorflow as tf

from dtk.communicators.base import Communicator


class NullCommunicator(Communicator):
    """Claims any world, and behaves as if every other rank held nothing: measures dtk's overhead.

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
        return [tf.identity(t) for t in flat]

    def _gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        return [tf.identity(flat) for _ in range(self.size)]

    def _exchange(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        # For the block of every source, take the block that this rank would send to itself.
        mine = tf.split(flat, sizes[self.rank], num=self.size)[self.rank]
        lengths = [sizes[source, self.rank] for source in range(self.size)]
        missing = [tf.maximum(length - tf.size(mine, tf.int64), 0) for length in lengths]
        return [
            tf.pad(mine, [[0, more]])[:length]
            for length, more in zip(lengths, missing, strict=True)
        ]

    def _broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        return [tf.identity(t) for t in flat]

    def _send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        return tf.identity(flat)

    def _receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        return tf.identity(room)

    def _group(self, ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the whole world, as if every rank had wished for the same group."""
        return NullCommunicator(self.rank, self.size)


class LocalCommunicator(NullCommunicator):
    """The group of this process alone: every collective is the identity, and costs nothing.

    It refuses what the other communicators refuse, so a script that runs here also runs on several
    ranks.

    Args:
        host: This host's name.
    """

    name = "local"

    def __init__(self, host: str | None = None) -> None:
        super().__init__()
        self.set_hosts([host or self.hosts[0]])

    def _group(self, ranks: Sequence[int], groups: Sequence[Sequence[int]]) -> Communicator:
        return LocalCommunicator(self.hosts[0])
