"""A transport: what moves flat tensors between the ranks of a group, through one kind of memory.

A backend brings two sets of dtypes and what follows; `Communicator` makes all else of it.

    reduce              of tensors, by "sum", "min", "max" or "prod"
    gather              ragged: sizes differ by rank
    alltoall            ragged: a size for each peer
    broadcast
    send, receive       between two ranks
    group               the transport of some of the ranks
    scatter             an all-to-all, to be added up in rank order, if not overridden
    gather_sizes        a gather of equal sizes, if not overridden
    linked              from GPU to GPU, if the backend can
    connect             opens links of two ranks, if they do not open by themselves
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import tensorflow as tf

from dtk import placement
from dtk.communicators import determinism
from dtk.communicators.costs import Costs
from dtk.communicators.sequencer import CollectiveSequencer, Span


class Transport(abc.ABC):
    """Moves flat tensors between ranks.

    All call the same methods in the same order, but for `send` and `receive`.

    Args:
        rank: This process's index in the group.
        size: Number of ranks.
        device: Where messages are; `dtk.placement` says it when None.
    """

    name: str
    # The dtypes that it adds up, and the dtypes that it moves, as they are.
    reduces: frozenset[tf.DType]
    moves: frozenset[tf.DType]
    # Whether the other ranks do not exist.
    is_pretended = False

    @abc.abstractmethod
    def reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        """Reduce flat tensors of dtypes in `reduces` by "sum", "min", "max" or "prod"."""

    @abc.abstractmethod
    def gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        """Return one flat tensor per rank; all ranks know their `sizes` (int64, shape [size]).

        Gathers of other lanes may be under way.
        """

    def gather_sizes(self, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Gather vectors of equal length; a backend may know a shorter way."""
        lengths = tf.constant([sizes.shape[0]] * self.size, tf.int64)
        return self.gather(sizes, lengths, label, 0)

    @abc.abstractmethod
    def alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Send `sizes[rank, j]` elements to rank j; return the elements from each rank."""

    def scatter(self, flat: tf.Tensor, sizes: tf.Tensor, op: str, label: str) -> list[tf.Tensor]:
        """Return the parts that combine to this rank's block; all ranks cut into equal `sizes`."""
        del op
        return self.alltoall(flat, sizes, label)

    @abc.abstractmethod
    def broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        """Broadcast flat tensors of dtypes in `moves`."""

    @abc.abstractmethod
    def send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        """Send; return any tensor that becomes ready when the send is over."""

    @abc.abstractmethod
    def receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        """Receive a flat tensor with the shape and dtype of `room`."""

    @abc.abstractmethod
    def group(
        self, ranks: Sequence[int], groups: Sequence[Sequence[int]], number: int
    ) -> Transport:
        """Return the transport of this rank's group; all ranks know all `groups` and the number."""

    def linked(self, device: str) -> Transport | None:
        """Return the transport of the same ranks from GPU to GPU; None if there is none."""
        del device
        return None

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Open the links of pairs of ranks, where they do not open by themselves."""
        del pairs

    def __init__(self, rank: int, size: int, device: str | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = device or placement.messages()
        # Of what is concurrent now; "" is the order of all others, and the only one between GPUs.
        self.lane_name = ""
        self._costs: Costs | None = None
        # By lane's name. Each is made when it is needed: a world of one leaves TensorFlow alone.
        self._sequencers: dict[str, CollectiveSequencer] = {}

    @property
    def sequencer(self) -> CollectiveSequencer:
        """The order of what is sent now."""
        name = self.lane_name
        if name not in self._sequencers:
            self._sequencers[name] = CollectiveSequencer(self.device, not name, self._order())
        return self._sequencers[name]

    @property
    def bytes(self) -> int:
        """Bytes sent so far."""
        return sum(one.bytes for one in self._sequencers.values())

    @property
    def seconds(self) -> float:
        """Seconds in collectives so far, but for those that are concurrent."""
        return self._sequencers[""].seconds if "" in self._sequencers else 0.0

    @property
    def eager_seconds(self) -> float:
        """The part of `seconds` outside of graphs."""
        return self._sequencers[""].eager_seconds if "" in self._sequencers else 0.0

    def spans(self) -> list[Span]:
        """Return when each message of a graph was last sent, where `dtk run` asked for steps."""
        return [span for one in self._sequencers.values() for span in one.spans()]

    def _order(self) -> tf.Tensor | None:
        """Return the resource that orders the messages of all groups; None: each has its order."""
        return None

    @property
    def costs(self) -> Costs | None:
        """See `Communicator.costs`."""
        return None if determinism.is_asked_for() else self._costs

    @costs.setter
    def costs(self, costs: Costs | None) -> None:
        self._costs = costs
