"""Horovod's engine, by its low-level ops only.

We do not use `horovod.keras` or Horovod's optimizers: on Keras 3 they reduce nothing. Horovod
matches ranks by op *name*. A name comes from a label, like the keys of TensorFlow's collectives, so
retracing on some ranks only changes nothing.

Sub-groups are Horovod's process sets. All ranks of the *world* take part in making one, so `split`
works on the world communicator only, and links for `send` (a pair is a set of two) are opened ahead
with `connect` when the world has more than two ranks. Both need HOROVOD_DYNAMIC_PROCESS_SETS=1 in
every rank's environment: it slows all reductions down, so it is not the default.

Horovod orders a set by world rank. If the keys of `split` order the group differently, this file
puts rows into the group's order.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, cast

import horovod.tensorflow as hvd
import tensorflow as tf

from dtk.cluster import progress
from dtk.cluster.place import Place
from dtk.communicators import startup
from dtk.communicators.base import Communicator
from dtk.communicators.local import LocalTransport
from dtk.communicators.transport import Transport
from dtk.errors import CommunicatorError, at_rank
from dtk.nests import Function

# Horovod adds process sets after start-up only if this is set before; then ranks also talk about
# sets in every cycle, and sometimes wait for each other for 20 ms.
_DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"

# Milliseconds between two looks for work; a small reduction waits for one. Horovod's default is 1.
_CYCLE = "0.2"


_PREFIX = "dtk_"  # of the names of the world's messages

_Given = ParamSpec("_Given")


@functools.cache  # a process has one runtime: a second strategy shares it
def start(place: Place) -> Communicator:
    """Initialise Horovod and check that it sees the world the launcher described."""
    if os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() == "mpi":  # over Gloo a look costs more
        os.environ.setdefault("HOROVOD_CYCLE_TIME", _CYCLE)
    # Open MPI's waiting thread must not keep others from computing.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    with progress.polling_threads():
        hvd.init()
    startup.check_world(
        place,
        hvd.rank(),
        hvd.size(),
        "Horovod",
        "start with the mpirun of the MPI that Horovod was built with (`dtk install-horovod` "
        "rebuilds it), or with `dtk run`",
    )
    transport = HorovodTransport(hvd.rank(), range(hvd.size()), _Sets())
    world = Communicator(transport, ("",) * hvd.size())
    world.set_hosts(world.allgather_object(socket.gethostname()))
    return world


class _Sets:
    """The process sets of this job, each made once: Horovod refuses a second one of equal ranks."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], hvd.ProcessSet] = {
            tuple(range(hvd.size())): hvd.global_process_set
        }

    def get(self, members: Iterable[int]) -> hvd.ProcessSet | None:
        """Return the set of these world ranks, in any order; None if it was not made."""
        return self._known.get(tuple(sorted(members)))

    def make(self, members: Iterable[int]) -> None:
        """Make a set; every rank of the world calls this, in the same order."""
        ranks = tuple(sorted(members))
        if ranks in self._known:
            return
        if os.environ.get(_DYNAMIC, "0").lower() in ("", "0", "false"):
            message = (
                f"a group of ranks {list(ranks)} of {hvd.size()}: Horovod makes groups only if "
                f"it was told so before the start; set {_DYNAMIC}=1 for every rank "
                f"(mpirun -x {_DYNAMIC}=1 ...), or use the collective communicator"
            )
            raise CommunicatorError(at_rank(hvd.rank(), message))
        self._known[ranks] = hvd.add_process_set(list(ranks))


def _by_name(method: Callable[_Given, list[tf.Tensor]]) -> Callable[_Given, list[tf.Tensor]]:
    """Let a transport of some ranks send by graphs, also outside of graphs.

    TensorFlow keeps an op that ran eagerly, with its name, for the next one of the same attributes:
    Horovod would take messages of two transports, in two threads, for one.
    """

    @functools.wraps(method)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> list[tf.Tensor]:
        own = cast(HorovodTransport, args[0])
        if not tf.executing_eagerly() or own.is_whole:
            return method(*args, **kwargs)
        if method.__name__ not in own.graphs:
            bound = functools.partial(cast("Function[list[tf.Tensor]]", method), own)
            own.graphs[method.__name__] = tf.function(bound, autograph=False, reduce_retracing=True)
        return own.graphs[method.__name__](*args[1:], **kwargs)

    return run


class HorovodTransport(Transport):
    """Ranks joined by Horovod."""

    name = "horovod"

    # Horovod would add 8-bit integers too, but Open MPI's vector instructions saturate: 200 + 100
    # is 255 there, and 44 everywhere else.
    reduces = frozenset({tf.int32, tf.int64, tf.float16, tf.float32, tf.float64})
    moves = reduces | {tf.bool, tf.uint8, tf.int8, tf.uint16, tf.int16}

    def __init__(
        self,
        rank: int,
        members: Sequence[int],
        sets: _Sets,
        prefix: str = _PREFIX,
        device: str | None = None,
    ) -> None:
        super().__init__(rank, len(members), device)
        self.graphs: dict[str, Function[list[tf.Tensor]]] = {}
        self._prefix = prefix
        self._members = tuple(members)
        self._sets = sets
        self._set = sets.get(members)
        ordered = sorted(self._members)
        self._slots = [ordered.index(member) for member in self._members]
        self._ranks = [self._members.index(member) for member in ordered]

    @property
    def is_whole(self) -> bool:
        """Whether this is the world's through the host."""
        return self._prefix == _PREFIX

    def _options(self, label: str) -> dict[str, object]:
        # Horovod takes a name up to its last slash as a scope; TensorFlow allows few characters.
        return {
            "name": self._prefix + re.sub(r"[^A-Za-z0-9_]", lambda m: f".{ord(m[0]):x}.", label),
            "ignore_name_scope": True,
            "process_set": self._set,
        }

    @_by_name
    def reduce(self, flat: list[tf.Tensor], op: str, label: str) -> list[tf.Tensor]:
        # One op for each bucket: a Horovod group would start only when its last bucket is ready.
        return [self._reduce_one(t, op, f"{label}/{i}/{t.dtype.name}") for i, t in enumerate(flat)]

    def _reduce_one(self, flat: tf.Tensor, op: str, label: str) -> tf.Tensor:
        if flat.shape.num_elements() == 0:
            return flat  # empty tensors do not survive Horovod's fusion
        ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "prod": hvd.Product}
        return hvd.allreduce(flat, op=ops[op], **self._options(label))

    @_by_name
    def gather(self, flat: tf.Tensor, sizes: tf.Tensor, label: str, lane: int) -> list[tf.Tensor]:
        rows = hvd.allgather(flat, **self._options(label))
        by_slot = tf.split(rows, tf.gather(sizes, self._ranks), num=self.size)
        return [by_slot[slot] for slot in self._slots]

    @_by_name
    def alltoall(self, flat: tf.Tensor, sizes: tf.Tensor, label: str) -> list[tf.Tensor]:
        blocks = tf.split(flat, sizes[self.rank], num=self.size)
        outgoing = tf.concat([blocks[rank] for rank in self._ranks], axis=0)
        splits = tf.cast(tf.gather(sizes[self.rank], self._ranks), tf.int32)
        rows, received = hvd.alltoall(outgoing, splits=splits, **self._options(label))
        by_slot = tf.split(rows, received, num=self.size)
        return [by_slot[slot] for slot in self._slots]

    @_by_name
    def broadcast(self, flat: list[tf.Tensor], root: int, label: str) -> list[tf.Tensor]:
        return [
            hvd.broadcast(t, self._members[root], **self._options(f"{label}/{root}/{i}"))
            for i, t in enumerate(flat)
        ]

    def _pair(self, source: int, dest: int, tag: int) -> dict[str, object]:
        pair = [self._members[source], self._members[dest]]
        process_set = self._sets.get(pair)
        if process_set is None:
            message = (
                f"no link between ranks {source} and {dest}: Horovod opens links ahead, so "
                f"call connect([({source}, {dest}), ...]) on every rank of the world first"
            )
            raise CommunicatorError(at_rank(self.rank, message))
        return {**self._options(f"pair/{pair[0]}/{pair[1]}/{tag}"), "process_set": process_set}

    def send(self, flat: tf.Tensor, dest: int, tag: int) -> tf.Tensor:
        return hvd.broadcast(flat, self._members[self.rank], **self._pair(self.rank, dest, tag))

    def receive(self, room: tf.Tensor, source: int, tag: int) -> tf.Tensor:
        return hvd.broadcast(room, self._members[source], **self._pair(source, self.rank, tag))

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """See `Communicator.connect`: on the world's, by every rank."""
        self._check_world("connect")
        for pair in pairs:
            self._sets.make(self._members[rank] for rank in pair)

    def group(
        self, ranks: Sequence[int], groups: Sequence[Sequence[int]], number: int
    ) -> Transport:
        if len(groups) > 1:
            self._check_world("split")
        for group in groups:
            if len(group) > 1:
                self._sets.make(self._members[rank] for rank in group)
        if len(ranks) == 1:
            return LocalTransport(0, 1)
        members = [self._members[rank] for rank in ranks]
        prefix = f"{self._prefix}{number}_"
        return HorovodTransport(ranks.index(self.rank), members, self._sets, prefix)

    def linked(self, device: str) -> Transport | None:
        """See `Transport.linked`: if Horovod was built with NCCL."""
        if not hvd.nccl_built():
            return None
        prefix = f"{self._prefix}cards_"
        return HorovodTransport(self.rank, self._members, self._sets, prefix, device)

    def _check_world(self, what: str) -> None:
        if self.size != hvd.size():
            message = (
                f"{what} on a group of {self.size} of {hvd.size()} ranks: Horovod needs the "
                f"whole world for it; call {what} on the world communicator"
            )
            raise CommunicatorError(at_rank(self.rank, message))
