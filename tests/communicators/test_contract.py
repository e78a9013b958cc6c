"""Every communicator keeps the contract of `dtk/communicators/base.py`.

What all must do alike is in contract.py, which compares with numpy on every rank; here is where it
runs, and what depends on the world.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.base import Communicator
from dtk.communicators.local import NullCommunicator, NullTransport
from dtk.errors import CommunicatorError

from communicators import contract
from communicators.contract import SHAPES, call, communicator, make, pairs, same
from support import world

BACKENDS = ("collective", "horovod-gloo", "horovod-mpi", "mpi-wheel")
# "nccl" is the collectives of a machine that pretends to have GPUs.
WORLDS = [("local", 1), ("nccl", 2), *((b, n) for b in BACKENDS for n in (1, 2, 3))]
# Horovod is one engine over two transports: every size runs by default, on one of them.
FULL = {("horovod-gloo", 1), ("horovod-gloo", 3), ("horovod-mpi", 3)}
FULL |= {("mpi-wheel", 1), ("mpi-wheel", 3)}


def worlds(wanted):
    marked = [pytest.param(w, marks=pytest.mark.full) if w in FULL else w for w in WORLDS]
    return pytest.mark.worlds(*(m for w, m in zip(WORLDS, marked, strict=True) if wanted(*w)))


# One process under "collective" has the same LocalCommunicator as under "local": test_places shows
# it, and the others run on the latter.
every_world = worlds(lambda backend, size: (backend, size) != ("collective", 1))
several_ranks = worlds(lambda backend, size: size > 1)
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def name_of(pool):
    return "collective" if pool.backend == "nccl" else pool.backend.split("-")[0]


def places():
    comm = communicator()
    assert world.communicator() is comm or comm.size == 1
    return comm.name, comm.rank, comm.size, comm.local_rank, comm.local_size, comm.hosts


@pytest.mark.full("the same over every wire: one of each kind")
@worlds(lambda backend, size: True)
def test_places(pool):
    found = pool.run(places)
    name = name_of(pool)
    # TensorFlow's collectives need no runtime for one process
    assert {f[0] for f in found} == {"local" if (name, pool.size) == ("collective", 1) else name}
    assert [f[1:5] for f in found] == [(r, pool.size, r, pool.size) for r in range(pool.size)]
    assert len({f[5] for f in found}) == 1
    assert len(found[0][5]) == pool.size


def check(subtests, names, found):
    """A subtest for each check: what ranks, or replicas, found wrong."""
    for name in names:
        with subtests.test(name):
            wrong = [f"rank {rank}: {on[name]}" for rank, on in enumerate(found) if name in on]
            assert not wrong, "\n".join(wrong)


@pytest.mark.full_but(
    "collective-3-graph",
    "local-1-eager",
    "local-1-graph",
    "mpi-wheel-2-eager",
    "nccl-2-eager",
    why="the same over every wire: one of each kind",
)
@every_world
@both_modes
def test_collectives(pool, graph, subtests):
    names = contract.COLLECTIVES
    check(subtests, names, pool.run(contract.failures, names, graph, timeout=240))


@pytest.mark.full("test_collectives has it between processes")
@pytest.mark.worlds(("local", 1))
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.full)])
def test_collectives_between_the_devices_of_one_process(pool, count, subtests):
    names = contract.COLLECTIVES
    (found,) = pool.run(contract.failures_between_devices, names, count, timeout=240)
    check(subtests, names, found)


@pytest.mark.full("the same over every wire: one of each kind")
@both_modes
def test_null_keeps_shapes_and_dtypes(graph):
    """No peer exists, so whatever returns has sent nothing."""
    comm = NullCommunicator(rank=1, size=3)
    assert comm.broadcast_object(["own"]) == ["own"], "fit shares rank 0's findings by it"
    cases = [(dtype, make(1, shape, dtype)) for dtype, shape in pairs(graph, SHAPES)]
    values = [tf.constant(value, dtype) for dtype, value in cases]
    for outputs in (call(graph, comm.allreduce, values), call(graph, comm.broadcast, values)):
        for output, (dtype, value) in zip(outputs, cases, strict=True):
            same(output, value, context=f"{dtype.name} {value.shape}")

    def others(values):
        rows = [value for value in values if value.shape.rank]
        return (
            [comm.allgather(value) for value in values],
            [comm.reduce_scatter(value) for value in rows],
            [comm.alltoall(value, [0, value.shape[0], 0]) for value in rows],
            [comm.recv(value.shape, value.dtype, 0) for value in values],
        )

    gathered, scattered, exchanged, received = call(graph, others, values)
    for output, (_, value) in zip(gathered, cases, strict=True):
        same(output, np.concatenate([np.reshape(value, value.shape or (1,))] * 3))
    rows = [value for _, value in cases if value.shape]
    for output, value in zip(scattered, rows, strict=True):
        block = np.array_split(value, 3)[1]
        assert (output.shape, output.dtype.as_numpy_dtype) == (block.shape, block.dtype)
    for (output, counts), value in zip(exchanged, rows, strict=True):
        same(output, np.concatenate([value] * 3))
        same(counts, np.full(3, len(value), np.int32))
    for output, value in zip(received, values, strict=True):
        assert (output.shape, output.dtype) == (value.shape, value.dtype)
    slices = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([0, 5]), tf.constant([9, 4]))
    same(call(graph, comm.allreduce, slices).values, np.ones([6, 4], np.float32))
    call(graph, comm.barrier)
    call(graph, lambda: comm.send(tf.ones([2]), 0))
    assert comm.allgather_object("x") == ["x"] * 3


def test_autograph_rewrites_no_communicator():
    """Nor one that dtk knows nothing of: it would run under another name."""
    names = []

    class Seen(NullTransport):
        def reduce(self, flat, op, label):
            names.append(sys._getframe().f_code.co_name)
            return super().reduce(flat, op, label)

    seen = Communicator(Seen(0, 2), ("host",) * 2)
    tf.function(lambda: seen.allreduce(tf.ones(2)))()
    assert names == ["reduce"]


@pytest.mark.full_but(
    "collective-2", "horovod-mpi-2", "local-1", why="the same over every wire: one of each kind"
)
@every_world
def test_behaviour(pool, subtests):
    names = contract.BEHAVIOURS
    check(subtests, names, pool.run(contract.failures, names, True, timeout=120))


@pytest.mark.full_but(
    "collective-3-eager",
    "horovod-mpi-2-eager",
    "mpi-wheel-2-eager",
    "nccl-2-eager",
    why="the same over every wire: one of each kind",
)
@several_ranks
@both_modes
def test_send_and_recv(pool, graph, subtests):
    names = ("send_and_recv", "messages_of_one_kind", "barrier_waits_for_the_last")
    check(subtests, names, pool.run(contract.failures, names, graph))


def split(color, key, modes=(False, True)):
    """`color` and `key` hold a value per rank."""
    comm = communicator()
    group = comm.split(color[comm.rank], None if key is None else key[comm.rank])
    order = key or list(range(comm.size))
    members = sorted(
        (r for r in range(comm.size) if color[r] == color[comm.rank]), key=lambda r: (order[r], r)
    )
    assert group.size == len(members)
    assert members[group.rank] == comm.rank
    assert group.hosts == tuple(comm.hosts[r] for r in members)
    for graph in modes:
        # Each group works by itself: only the first one does the extra round.
        for _ in range(2 if comm.rank in (0, members[0]) or 0 in members else 1):
            same(
                call(graph, group.allreduce, tf.constant(comm.rank + 1)),
                np.int32(sum(members) + len(members)),
            )
        rows = call(graph, group.allgather, tf.fill([comm.rank], comm.rank))
        same(rows, np.repeat(np.int32(members), members))
        same(call(graph, group.broadcast, tf.constant(comm.rank)), np.int32(members[0]))
        swapped, counts = call(graph, group.alltoall, tf.fill([group.size], comm.rank))
        same(swapped, np.int32(members))
        same(counts, np.ones(group.size, np.int32))
        mine = call(graph, group.reduce_scatter, tf.range(group.size))
        same(mine, np.int32([group.rank * group.size]))
    assert group.allgather_object(comm.rank) == members
    # The world still works, and a group can be left alone.
    same(comm.allreduce(tf.constant(1)), np.int32(comm.size))
    return group.name


@pytest.mark.full_but("collective-2", "local-1", why="the same over every wire: one of each kind")
@every_world
def test_split_of_one_color_and_of_all_colors(pool):
    n = pool.size
    assert set(pool.run(split, [0] * n, None)) <= {"local", name_of(pool)}
    assert set(pool.run(split, list(range(n)), None)) == {"local"}


@worlds(lambda backend, size: size == 3)
def test_split_in_three(pool):
    name = pool.backend.split("-")[0]
    assert pool.run(split, [0, 1, 0], None, [False]) == [name, "local", name]
    assert pool.run(split, [0, 1, 0], [2, 0, 1]) == [name, "local", name]
    assert pool.run(split, [5, 5, 5], [1, 2, 0], [False]) == [name] * 3


def split_a_group():
    comm = communicator()
    group = comm.split(0, key=-comm.rank)
    pair = group.split(int(comm.rank == 1))
    if comm.rank != 1:
        assert pair.size == comm.size - 1
    same(pair.allreduce(tf.constant(1)), np.int32(pair.size))


@pytest.mark.worlds(("collective", 3))
def test_split_of_a_group(pool):
    pool.run(split_a_group)


def horovod_needs_links():
    comm = communicator()
    from dtk.communicators.horovod import HorovodTransport, _Sets

    fresh = Communicator(HorovodTransport(comm.rank, range(comm.size), _Sets()), comm.hosts)
    if comm.rank == 0:
        with pytest.raises(CommunicatorError, match=r"connect\(\[\(0, 2\)"):
            fresh.send(tf.ones([1]), 2)
    group = comm.split(int(comm.rank == 1))
    if comm.rank != 1:
        with pytest.raises(CommunicatorError, match="call split on the world communicator"):
            group.split(group.rank)


@pytest.mark.full("the same over every wire: one of each kind")
@pytest.mark.worlds(("horovod-mpi", 3))
def test_horovod_says_what_it_cannot_open_by_itself(pool):
    pool.run(horovod_needs_links)


def horovod_makes_groups_if_told_so():
    comm = communicator()
    with pytest.raises(CommunicatorError, match="set HOROVOD_DYNAMIC_PROCESS_SETS=1 for every"):
        comm.host_transport._sets.make([comm.rank])


@pytest.mark.full("the same over every wire: one of each kind")
@pytest.mark.worlds(("horovod-gloo", 2))
def test_horovod_makes_groups_only_if_told_so(pool):
    pool.run(horovod_makes_groups_if_told_so)
