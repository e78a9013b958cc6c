"""What only MPI has: memory that is used again, results that come late, ranks that leave early."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import tensorflow as tf

from dtk.errors import CommunicatorError

from communicators.contract import communicator
from support import world

two = pytest.mark.worlds(("mpi-wheel", 2))


def addresses_of_memory():
    from dtk.communicators.mpi.requests import Buffers

    buffers = Buffers()
    shape = 100_000, np.dtype(np.float32)

    def place(array):
        return array.ctypes.data

    first, second = buffers.take(*shape), buffers.take(*shape)
    distinct = place(first) != place(second)
    known = place(first)
    tensor = tf.experimental.dlpack.from_dlpack(first.__dlpack__())
    del first
    used_by_tensor = place(buffers.take(*shape)) != known
    del tensor
    again = place(buffers.take(*shape)) == known
    graph = tf.function(lambda: tf.numpy_function(lambda: buffers.take(*shape), [], tf.float32))
    result = graph()
    known = place(np.asarray(memoryview(result)))
    used_by_graph = place(buffers.take(*shape)) != known
    return distinct, used_by_tensor, again, used_by_graph


def late_results():
    from dtk.communicators.mpi.transport import _Site

    site = _Site(tf.float32, "CPU:0")
    waiting = []

    def deliver(turn, number):
        site.deliver(turn, np.full(16, number, np.float32)[:1].copy())
        waiting.append(int(site.queue.size()))

    failed = site.begin()
    deliver(failed, 1)  # the step failed before it took this
    following = site.begin()
    waiting.append(int(site.queue.size()))
    deliver(failed, 2)
    deliver(following, 3)
    return waiting, site.queue.dequeue().numpy().tolist()


@two
def test_memory_is_used_again_and_results_that_a_failed_step_left_are_not_the_next_ones(pool):
    """Memory, once no tensor holds it."""
    assert pool.run(addresses_of_memory) == [(True, True, True, True)] * 2
    assert pool.run(late_results) == [([1, 0, 0, 1], [3.0])] * 2


def fewer_than_room():
    """What rank 1 is told where rank 0 sends it less than it has made room for."""
    comm = communicator()

    def message():
        if comm.rank == 0:
            comm.send(tf.ones([3]), 1)
            return tf.zeros([])
        return comm.recv([5], tf.float32, 0)

    told = []
    # In a graph, whose collectives do not meet first.
    unlike = tf.function(lambda: comm.broadcast(tf.ones([4 + 2 * comm.rank])))
    for function in (message, unlike):
        if function is unlike and comm.rank == 1:
            # Once rank 0 has sent: what comes later is for a thread that ends the process.
            comm.recv([1], tf.float32, 0)
        try:
            function()
        except (CommunicatorError, tf.errors.OpError) as error:
            told.append(str(error))
        if function is unlike and comm.rank == 0:
            comm.send(tf.ones([1]), 1)
    return told, comm.allreduce(1.0).numpy()


@two
def test_no_memory_is_returned_that_nobody_sent(pool):
    (nothing, total), ((message, broadcast), _) = pool.run(fewer_than_room)
    assert (nothing, total) == ([], 2.0)
    assert "rank 1: a message from rank 0: 3 elements came, 5 were expected" in message
    assert "4 elements came, 6 were expected" in broadcast


def sums_of_halves(dtype, graph):
    """Bits and bytes of sums, of which each number is that of float32, rounded once."""
    comm = communicator()
    bits, sent = [], []
    for elements in (1, 2, 1000, 100_003):
        values = [
            tf.cast(np.random.default_rng([rank, elements]).normal(size=elements), dtype)
            for rank in range(comm.size)
        ]
        expected = tf.cast(tf.add_n([tf.cast(value, tf.float32) for value in values]), dtype)
        before = comm.bytes_sent
        reduce = tf.function(comm.allreduce) if graph else comm.allreduce
        (got,) = reduce([values[comm.rank]])
        sent.append(comm.bytes_sent - before)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)
        bits.append(np.asarray(tf.bitcast(got, tf.uint16)).tobytes())
    largest = comm.allreduce(tf.cast([comm.rank, -comm.rank], dtype), "max")
    assert tf.cast(largest, tf.int32).numpy().tolist() == [comm.size - 1, 0]
    return bits, sent


@pytest.mark.worlds(("mpi-wheel", 2), pytest.param(("mpi-wheel", 3), marks=pytest.mark.full))
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_halves_are_sent_as_halves_and_summed_in_float32(pool, graph):
    for dtype in ("float16", "bfloat16"):
        results = pool.run(sums_of_halves, dtype, graph)
        for bits, sent in results:
            assert bits == results[0][0], "all ranks end with the same bits"
            assert sent == [2 * elements for elements in (1, 2, 1000, 100_003)]


class Late:
    """A tensor that is there a while after a graph begins, and keeps no thread until then."""

    def __init__(self):
        self._queue = tf.queue.FIFOQueue(1, [tf.bool])

    def __call__(self, value):
        with tf.control_dependencies([self._queue.dequeue()]):
            return tf.identity(value)

    def start(self):
        threading.Timer(0.3, lambda: self._queue.enqueue(True)).start()


def lanes_in_opposite_order():
    """Half of the lanes are late on each rank: more than it has threads for graphs are left."""
    comm = communicator()
    late = {i: Late() for i in range(6) if (i < 3) != bool(comm.rank)}

    @tf.function(autograph=False)
    def every(value):
        found = []
        with comm.sequence("opposite"):
            for i in range(6):
                given = value * 10.0**i
                with comm.concurrent(f"lane {i}"):
                    found.append(comm.allreduce(late[i](given) if i in late else given))
        return found

    results = []
    for i in range(2):
        for one in late.values():
            one.start()
        results.append([part.numpy().tolist() for part in every(tf.fill([2], 1.0 + i))])
    return results


def buckets_ready_in_opposite_order():
    comm = communicator()
    late, limit = Late(), comm.bucket_bytes
    comm.bucket_bytes = 4
    late.start()

    @tf.function(autograph=False)
    def total(values):
        last = 8 if comm.rank else 0  # the first and the ninth share a communicator of MPI's
        values = [late(v) if i == last else v for i, v in enumerate(values)]
        with comm.sequence("buckets"):
            return comm.allreduce(values)

    try:
        return [one.numpy().tolist() for one in total([tf.fill([2], i + 1.0) for i in range(9)])]
    finally:
        comm.bucket_bytes = limit


@two
def test_lanes_and_buckets_meet_however_they_become_ready(pool):
    expected = [[[2.0 * (1 + i) * 10.0**lane] * 2 for lane in range(6)] for i in range(2)]
    assert pool.run(lanes_in_opposite_order) == [expected] * 2
    assert pool.run(buckets_ready_in_opposite_order) == [[[2.0 + 2 * i] * 2 for i in range(9)]] * 2


LEAVES = """
    import sys
    from dtk.communicators import create
    comm = create("mpi")
    import tensorflow as tf
    comm.barrier()
    if comm.rank == 1:
        {end}
    add = tf.function(comm.allreduce) if {graph} else comm.allreduce
    add(tf.ones([{elements}]))
    print("not reached")
"""


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize(
    "end, graph, elements",
    [
        ("sys.exit(0)", False, 8),
        pytest.param("raise ValueError('of the script')", True, 8, marks=pytest.mark.full),
        pytest.param("sys.exit(0)", True, 1 << 20, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_leaves_is_named(tmp_path, end, graph, elements):
    if reason := world.missing("mpi-wheel"):
        pytest.skip(reason)
    script = tmp_path / "leaves.py"
    script.write_text(textwrap.dedent(LEAVES.format(end=end, graph=graph, elements=elements)))
    (process,) = world._processes("mpi-wheel", 2, {})
    command = [*process.argv[: process.argv.index("-np")], "-np", "2", sys.executable, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ, **process.env}
    )
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "waits for rank 1, whose script has ended" in done.stderr
    assert "of the script" in done.stderr or "ValueError" not in end
