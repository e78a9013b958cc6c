"""TensorFlow's own collectives: nothing to install, one gRPC server per rank.

Constructing `tf.distribute.MultiWorkerMirroredStrategy` is the public way to start the runtime.
The strategy is then only kept alive: it owns the thread that notices dead peers and turns a wait
for them into an error. We call the ops with group and instance keys of our own:

    group key     which ranks take part; a group forms when `size` ranks have named the same key
    instance key  which collective of the group this is; ranks that name the same one are matched

An instance key may be used again once its first use is over on this rank: a rank leaves a
collective only after its peers have taken every buffer it offered, and the sequencer keeps the
order. But TensorFlow remembers the *shape* of a key's first use for ever, and aborts on another
shape. So a key belongs to a label ("in/train_step/3") and a size. Sizes that vary (ragged gathers)
are rounded up to three significant bits, to bound what TensorFlow remembers. Inside graphs keys are
hashes, computed when the graph runs if the size is only known then: ranks agree without counting
together, and a rank that traces a function twice finds the same keys again. Eager calls come in the
same order on every rank, so their keys are numbers.

A group has one device kind. `link` makes a second group, of the ranks' GPUs and with the hint
"nccl", for what `dtk.placement` puts there. NCCL adds side by side by itself, but two of its
collectives at once may wait for each other: there are no pieces, no lanes and no concurrent
messages, and one resource on the GPU orders them all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from dtk import placement
from dtk.cluster import stop_requests
from dtk.cluster.place import Place
from dtk.communicators import startup
from dtk.communicators.base import LOCAL_REDUCE, Communicator
from dtk.communicators.costs import ONE_HOP_MOST
from dtk.communicators.local import LocalTransport
from dtk.communicators.sequencer import counters
from dtk.communicators.transport import Transport
from dtk.errors import CommunicatorError, at_rank

_MERGE = {"sum": "Add", "min": "Min", "max": "Max", "prod": "Mul"}

# The strategy that starts the runtime numbers its own keys from 1. Our keys count from _FIRST_KEY
# (eager calls) or are hashes from _FIRST_HASH on (graphs, groups).
_FIRST_KEY = 1 << 20
_FIRST_HASH = 1 << 28
_SPAN = (1 << 31) - _FIRST_HASH
_MIX = 1_103_515_245  # odd and below 2^31: the product stays within int64

# One op adds on one core; four at once measured twice as fast at 100 MB.
_PIECES = 4
_PIECE_BYTES = 1 << 20

# An end starts message k when its own k-1 is over, and then the other end has ended k-2: two keys
# would do. Four leave room for what TensorFlow clears up after an op has ended.
_KEYS_IN_TURN = 4

# What orders the messages of a GPU. TensorFlow sends those of all groups through one stream of
# NCCL: in another order than on another rank, one group's message would wait behind another's.
_ORDERS: dict[str, tf.Tensor] = {}

# A process has one runtime: a second strategy shares it.
_STARTED: dict[Place, Communicator] = {}


def start(
    place: Place,
    prepare: Callable[[int], None] | None = None,
    addresses: Sequence[str] = (),
) -> Communicator:
    """Start TensorFlow's collective runtime over all ranks of a job, at addresses told to all."""
    if place in _STARTED:
        return _STARTED[place]
    rank, size, timeout = place.rank, place.size, startup.limit()
    addresses = tuple(addresses or startup.gather(place).addresses)
    with startup.at_most(timeout), startup.quiet(), stop_requests.sigterm_kept():
        if prepare is not None:
            prepare(size)
        runtime = _bring_up(rank, addresses)
        transport = CollectiveTransport(rank, range(size), _FIRST_KEY, runtime)
        world = Communicator(transport, ("",) * size)
        hosts = place.hosts
        # The first collective also proves that every peer has started, within the time limit.
        # Containers may all have one name; Slurm's nodes have not.
        own = os.environ.get("SLURMD_NODENAME") if place.kind == "slurm" else None
        names = world.allgather_object(hosts[rank] if hosts else own or socket.gethostname())
    world.set_hosts(names)
    world.place = dataclasses.replace(place, addresses=addresses)
    _STARTED[place] = world
    return world


def started(place: Place) -> Communicator | None:
    """Return the communicator of this process, if its runtime has started there."""
    return _STARTED.get(place)


def _bring_up(rank: int, addresses: Sequence[str]) -> tf.distribute.Strategy:
    # gRPC would send even loopback traffic through a proxy named in the environment.
    direct = {address.rpartition(":")[0] for address in addresses}
    known = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    os.environ["no_grpc_proxy"] = ",".join([*filter(None, known.split(",")), *sorted(direct)])
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="worker", task_id=rank, rpc_layer="grpc"
    )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        message = (
            "TensorFlow has already run an operation, and its collectives must be set up "
            "before the first: make the strategy at the top of the script, before any tensor, "
            "variable, layer or dataset"
        )
        raise CommunicatorError(at_rank(rank, message)) from None


class CollectiveTransport(Transport):
    """Ranks joined by TensorFlow's collective ops."""

    name = "collective"

    reduces = frozenset({tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})
    # Dtypes that gather, broadcast and all-to-all all take.
    moves = frozenset({tf.float16, tf.float32, tf.float64, tf.int32, tf.int64})

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        group_key: int,
        runtime: tf.distribute.Strategy | None,
        device: str | None = None,
    ) -> None:
        super().__init__(rank, len(members), device)
        self._by_nccl = placement.is_gpu(self.device)
        if self._by_nccl:
            self.reduces = self.reduces - {tf.bfloat16}
        self._lanes = 1 if self._by_nccl else _PIECES
        self._members = tuple(members)
        self._group_key = group_key
        self._runtime = runtime
        self._messages: dict[tuple[int, int, int], tf.Tensor] = {}  # how many so far
        self._eager_keys: dict[tuple[str, int], int] = {}
        self._parallel = tf.function(self._reduce_in_graph)
        # TensorFlow orders a group by device name, where task:10 comes before task:2.
        names = sorted(self._members, key=lambda member: f"task:{member}/")
        self._slots = [names.index(member) for member in self._members]

    def _order(self) -> tf.Tensor | None:
        if self._by_nccl and self.device not in _ORDERS:
            _ORDERS[self.device] = counters(placement.host())
        return _ORDERS[self.device] if self._by_nccl else None

    def _group_keys(self, label: str, size: int | tf.Tensor) -> dict[str, int | str | tf.Tensor]:
        """Return the keys of one collective; `size` is the part of its shape that varies."""
        if tf.executing_eagerly():
            key = self._eager_keys.setdefault(
                (label, int(size)), _FIRST_KEY + len(self._eager_keys)
            )
        else:
            key = _graph_key(self._group_key, label, size)
        return self._group_of(self.size, self._group_key, key)

    def _group_of(
        self, size: int, group_key: int, instance_key: int | tf.Tensor
    ) -> dict[str, int | str | tf.Tensor]:
        hint = "nccl" if self._by_nccl else "auto"  # which is the ring, on GPUs too
        keys = {"group_size": size, "group_key": group_key, "instance_key": instance_key}
        return {**keys, "communication_hint": hint}

    def reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        if not tf.executing_eagerly():
            return self._reduce_in_graph(flat, op, label)
        if sum(_elements(t) * t.dtype.size for t in flat) < 2 * _PIECE_BYTES:
            return [self._reduce_one(t, op, f"{label}/{i}") for i, t in enumerate(flat)]
        # Eager ops run one at a time; a graph runs the pieces side by side.
        return self._parallel(flat, op, label)

    def _reduce_in_graph(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        return [self._reduce_pieces(t, op, f"{label}/{i}", i) for i, t in enumerate(flat)]

    def _reduce_pieces(self, flat: tf.Tensor, op: str, label: str, lane: int) -> tf.Tensor:
        elements = flat.shape.num_elements()
        pieces = 1
        if elements is not None:
            pieces = min(self._lanes, elements * flat.dtype.size // _PIECE_BYTES)
        if pieces <= 1:
            return self._reduce_one(flat, op, label, lane)
        ends = [elements * i // pieces for i in range(pieces + 1)]
        parts = [
            self._reduce_one(flat[a:b], op, f"{label}/{i}", lane + i)
            for i, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        return tf.concat(parts, axis=0)

    def _token(self, lane: int = 0) -> list[tf.Tensor]:
        """Return the resource by which a graph orders an op.

        Without one, the graph would run all its collectives one after the other: the pieces of a
        bucket, and the replicas of a mirrored strategy, which wait for each other.
        """
        return [] if tf.executing_eagerly() else [self.sequencer.lane(lane % self._lanes)]

    def _reduce_one(self, flat: tf.Tensor, op: str, label: str, lane: int = 0) -> tf.Tensor:
        elements = flat.shape.num_elements()
        most = self.costs.one_hop if self.costs else ONE_HOP_MOST
        small = elements is not None and 0 < elements * flat.dtype.size <= most
        if small and not self._by_nccl and flat.dtype in self.moves:
            return self._reduce_small(flat, op, label, lane)
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            **self._group_keys(f"{label}/{flat.dtype.name}", _elements(flat)),
            ordering_token=self._token(lane),
            merge_op=_MERGE[op],
            final_op="Id",
        )

    def _reduce_small(self, flat: tf.Tensor, op: str, label: str, lane: int) -> tf.Tensor:
        """Send to every rank and add up in rank order: one hop, where a ring has 2(n-1)."""
        rows = tf.raw_ops.CollectiveAllToAllV2(
            input=tf.tile(flat[None], [self.size, 1]),
            **self._group_keys(f"{label}/small/{flat.dtype.name}", _elements(flat)),
            ordering_token=self._token(lane),
        )
        return tf.ensure_shape(LOCAL_REDUCE[op](rows, axis=0), flat.shape)

    def gather_sizes(self, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        keys = self._group_keys(label, _elements(sizes)) | {"ordering_token": self._token()}
        if self._by_nccl:
            rows = tf.raw_ops.CollectiveGatherV2(input=sizes[None], **keys)
        else:  # one hop, where the ring of a gather has n-1
            every = tf.tile(sizes[None], [self.size, 1])
            rows = tf.raw_ops.CollectiveAllToAllV2(input=every, **keys)
        return [rows[slot] for slot in self._slots]

    def gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        longest = _longest(sizes)
        rows = tf.raw_ops.CollectiveGatherV2(
            input=_padded(flat, longest)[None],
            **self._group_keys(label, longest),
            ordering_token=self._token(lane),
        )
        return self._rows_of(rows, sizes)

    def _rows_of(self, rows: tf.Tensor, sizes: tf.Tensor) -> list[tf.Tensor]:
        """Return each rank's row up to its size; a GPU would copy what it cuts by to the host."""
        with tf.device(placement.host()):
            cuts = [
                (tf.constant([slot, 0], tf.int64), tf.stack([1, tf.cast(sizes[rank], tf.int64)]))
                for rank, slot in enumerate(self._slots)
            ]
        return [tf.reshape(tf.slice(rows, *cut), [-1]) for cut in cuts]

    def alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        if self._by_nccl:
            return self._alltoall_by_gather(flat, sizes, label)
        longest = _longest(sizes)
        blocks = tf.split(flat, sizes[self.rank], num=self.size)
        padded = [_padded(block, longest) for block in blocks]
        by_slot = [padded[self._slots.index(slot)] for slot in range(self.size)]
        rows = tf.raw_ops.CollectiveAllToAllV2(
            input=tf.stack(by_slot),
            **self._group_keys(label, longest),
            ordering_token=self._token(),
        )
        with tf.device(placement.host()):
            received = sizes[:, self.rank]
        return self._rows_of(rows, received)

    def _alltoall_by_gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        """Gather all blocks and keep this rank's: `size` times the bytes, but the right ones.

        TensorFlow's all-to-all over NCCL goes through the GPUs of its own process only, so that
        with one GPU each rank gets its own blocks back.
        """
        begins = tf.cumsum(sizes, axis=1, exclusive=True)[:, self.rank]
        rows = self.gather(flat, tf.reduce_sum(sizes, axis=1), label, 0)
        return [
            row[begins[rank] : begins[rank] + sizes[rank, self.rank]]
            for rank, row in enumerate(rows)
        ]

    def scatter(self, flat: tf.Tensor, sizes: tf.Tensor, op: str, label: str) -> list[tf.Tensor]:
        if not self._by_nccl:
            return super().scatter(flat, sizes, op, label)
        # TensorFlow's reduce-scatter works within one process only: the process that matches
        # messages is not told the hint, and looks for a ring, of which there is none.
        with tf.device(placement.host()):
            blocks = sizes[self.rank]
            cut = [tf.reduce_sum(blocks[: self.rank])], [blocks[self.rank]]
            begin, size = map(tf.stack, cut)
        return [tf.slice(self._reduce_one(flat, op, label), begin, size)]

    def broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        outputs: list[tf.Tensor] = []
        for i, tensor in enumerate(flat):
            label_of = f"{label}/{root}/{i}/{tensor.dtype.name}"
            group = self._group_keys(label_of, _elements(tensor))
            # A broadcast takes no token by which a graph could order it.
            with tf.control_dependencies(outputs[-1:] if self._by_nccl else []):
                outputs.append(self._cast(tensor, root == self.rank, group))
        return outputs

    @staticmethod
    def _cast(
        tensor: tf.Tensor, sending: bool, group: dict[str, int | str | tf.Tensor]
    ) -> tf.Tensor:
        # The broadcast of an empty tensor divides by zero and ends the process.
        filled = tf.pad(tensor, [[0, tf.cast(tf.equal(tf.size(tensor), 0), tf.int32)]])
        if sending:
            output = tf.raw_ops.CollectiveBcastSendV2(input=filled, **group)
        else:
            # tf.shape would be a constant, and the op would not wait for what orders messages.
            shape = tf.raw_ops.Shape(input=filled)
            output = tf.raw_ops.CollectiveBcastRecvV2(shape=shape, T=tensor.dtype, **group)
        return tf.ensure_shape(output[: tf.size(tensor)], tensor.shape)

    def _pair(
        self, source: int, dest: int, tag: int, flat: tf.Tensor
    ) -> dict[str, int | str | tf.Tensor]:
        """Return the keys of a pair's group: one for each direction, so that both can run.

        Both ends count a message whenever it runs, and take keys in turn. With one key, a message
        may reach the sender while the message before is still listed there: "Second consumer
        arrived for key". Counting at trace time would fail: a message in a loop is traced once, a
        body may be traced twice, and one end may trace again when the other does not. But the k-th
        message that one end sends under a tag is always the k-th that the other end receives.
        """
        key = _hash(f"{self._group_key}/pair/{source}/{dest}")
        if (source, dest, tag) not in self._messages:
            self._messages[source, dest, tag] = counters(placement.host())
        counted = self._messages[source, dest, tag]
        label = f"{tag}/{flat.dtype.name}"
        with tf.device(placement.host()):
            number = tf.raw_ops.ReadVariableOp(resource=counted, dtype=tf.int64)[0]
            tf.raw_ops.AssignAddVariableOp(resource=counted, value=tf.constant([1, 0], tf.int64))
            keys = [_graph_key(key, f"{label}/{i}", _elements(flat)) for i in range(_KEYS_IN_TURN)]
            chosen = tf.stack([tf.cast(one, tf.int32) for one in keys])[number % _KEYS_IN_TURN]
        return self._group_of(2, key, chosen)

    def send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        return self._cast(flat, True, self._pair(self.rank, dest, tag, flat))

    def receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        return self._cast(room, False, self._pair(source, self.rank, tag, room))

    def group(
        self, ranks: Sequence[int], groups: Sequence[Sequence[int]], number: int
    ) -> Transport:
        if len(ranks) == 1:
            return LocalTransport(0, 1)
        members = [self._members[rank] for rank in ranks]
        key = _hash(f"{self._group_key}/split/{number}/{members}")
        return CollectiveTransport(ranks.index(self.rank), members, key, self._runtime)

    def linked(self, device: str) -> Transport:
        key = _hash(f"{self._group_key}/cards")
        return CollectiveTransport(self.rank, self._members, key, self._runtime, device)


def _elements(flat: tf.Tensor) -> int | tf.Tensor:
    """Return the length of a flat tensor: an int when the shape is static, else int64."""
    count = flat.shape.num_elements()
    return tf.size(flat, tf.int64) if count is None else count


def _padded(block: tf.Tensor, length: int | tf.Tensor) -> tf.Tensor:
    if not tf.is_tensor(length) and block.shape.num_elements() == length:
        return block
    size = tf.size(block, tf.int64)
    with tf.device(placement.host()):
        paddings = tf.stack([[0, length - size]])
    return tf.pad(block, paddings)


def _longest(sizes: tf.Tensor) -> int | tf.Tensor:
    """Return the length to which blocks of these sizes are padded.

    Where no graph knows it, it is rounded up to three significant bits (at most a fifth more): so
    TensorFlow has few sizes, and few keys, to remember.
    """
    known = None if tf.executing_eagerly() else tf.get_static_value(sizes)
    if known is not None:
        return max(1, int(known.max()))
    with tf.device(placement.host()):
        size = tf.maximum(tf.reduce_max(sizes), 1)
        bits = tf.cast(tf.math.log(tf.cast(size, tf.float64)) / np.log(2.0), tf.int64)
        unit = tf.bitwise.left_shift(tf.ones_like(size), tf.maximum(bits - 2, 0))
        return -(-size // unit) * unit


def _hash(text: str) -> int:
    """Return a key from a text, the same on every rank."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return _FIRST_HASH + int.from_bytes(digest, "big") % _SPAN


def _graph_key(group_key: int, label: str, size: int | tf.Tensor) -> int | tf.Tensor:
    """Return the key of a label and a size: an int, or a tensor if the size is one."""
    base = _hash(f"{group_key}/{label}") - _FIRST_HASH
    if not tf.is_tensor(size):
        return _FIRST_HASH + (base + size % _SPAN * _MIX) % _SPAN
    with tf.device(placement.host()):
        mixed = tf.cast(size, tf.int64) % _SPAN * _MIX
        return tf.cast(_FIRST_HASH + (base + mixed) % _SPAN, tf.int32)


def replicas(devices: Sequence[str], group: int) -> list[Communicator]:
    """Make communicators between devices of this process, for use in graphs only."""
    count = len(devices)
    key = _hash(f"replicas/{group}/{count}")
    return [
        Communicator(
            CollectiveTransport(rank, range(count), key, None, device), ("localhost",) * count
        )
        for rank, device in enumerate(devices)
    ]
