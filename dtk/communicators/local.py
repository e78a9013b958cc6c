"""A world of one: every collective is the identity, and costs nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import tensorflow as tf

from dtk.communicators import wire
from dtk.communicators.base import Communicator


class LocalCommunicator(Communicator):
    """The group of this process alone.

    It refuses what the other communicators refuse, so a script that runs here also runs on several
    ranks.

    Args:
        host: This host's name.
    """

    name = "local"

    def __init__(self, host: str | None = None) -> None:
        self.rank, self.size = 0, 1
        self.local_rank, self.local_size = 0, 1
        self.hosts = (host or socket.gethostname(),)

    @property
    def bytes_sent(self) -> int:
        """Nothing leaves this process."""
        return 0

    def allreduce(
        self, value: tf.Tensor | Sequence[tf.Tensor], op: str = "sum"
    ) -> tf.Tensor | list[tf.Tensor]:
        """See `Communicator.allreduce`."""
        if isinstance(value, (list, tuple)):
            return [self.allreduce(item, op) for item in value]
        if isinstance(value, tf.IndexedSlices):
            wire.check(value.dtype, op)
            if op not in ("sum", "mean"):
                raise ValueError(f"op {op!r} on IndexedSlices; only 'sum' and 'mean' make sense")
            return value
        return self._checked(value, op)

    def allgather(self, value: tf.Tensor, rows: Sequence[int] | None = None) -> tf.Tensor:
        """See `Communicator.allgather`."""
        del rows
        value = self._checked(value)
        return tf.reshape(value, [1]) if value.shape.rank == 0 else value

    def reduce_scatter(self, value: tf.Tensor, op: str = "sum") -> tf.Tensor:
        """See `Communicator.reduce_scatter`."""
        value = self._checked(value, op)
        if value.shape.rank == 0:
            raise ValueError("reduce_scatter needs rows, got a scalar")
        return value

    def alltoall(
        self, value: tf.Tensor, splits: Sequence[int] | tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Communicator.alltoall`."""
        value = self._checked(value)
        if value.shape.rank == 0:
            raise ValueError("alltoall needs rows to send, got a scalar")
        rows = tf.shape(value)[:1]
        if splits is not None:
            given = tf.cast(tf.convert_to_tensor(splits), tf.int32)
            if given.shape == [1, 1]:
                given = given[0]
            if given.shape != [1]:
                raise ValueError(
                    f"alltoall got splits of shape {tuple(given.shape)}, expected (1,)"
                )
            if tf.executing_eagerly() and int(given[0]) != int(rows[0]):
                raise ValueError(
                    f"alltoall got splits {given.numpy().tolist()} for {int(rows[0])} rows: "
                    "they must add up to the rows"
                )
        return value, rows

    def broadcast(
        self, value: tf.Tensor | Sequence[tf.Tensor], root: int = 0
    ) -> tf.Tensor | list[tf.Tensor]:
        """See `Communicator.broadcast`."""
        if root != 0:
            raise ValueError(f"root={root} is not a rank of 1 (0 to 0)")
        if isinstance(value, (list, tuple)):
            return [self._checked(item) for item in value]
        return self._checked(value)

    def send(self, value: tf.Tensor, dest: int, tag: int = 0) -> None:
        """Raise: there is no other rank. See `Communicator.send`."""
        del value, tag
        raise ValueError(f"dest={dest}: a world of one has no other rank to send to")

    def recv(
        self, shape: Sequence[int], dtype: tf.DType | str, source: int, tag: int = 0
    ) -> tf.Tensor:
        """Raise: there is no other rank. See `Communicator.recv`."""
        del shape, dtype, tag
        raise ValueError(f"source={source}: a world of one has no other rank to receive from")

    def barrier(self) -> None:
        """See `Communicator.barrier`."""

    def split(self, color: int, key: int | None = None) -> Communicator:
        """See `Communicator.split`."""
        del color, key
        return LocalCommunicator(self.hosts[0])

    @contextlib.contextmanager
    def sequence(self, name: str) -> Iterator[None]:
        """Do nothing; see `Communicator.sequence`."""
        del name
        yield

    @staticmethod
    def _checked(value: tf.Tensor, op: str = "sum") -> tf.Tensor:
        tensor = tf.convert_to_tensor(value)
        wire.check(tensor.dtype, op)
        return tensor
