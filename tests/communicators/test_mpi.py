"""What only MPI has: memory that is used again, results that come late, ranks that leave early."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf

import world
from communicators.contract import communicator

two = pytest.mark.worlds(("mpi", 2))


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


@two
def test_memory_is_used_again_once_no_tensor_holds_it(pool):
    assert pool.run(addresses_of_memory) == [(True, True, True, True)] * 2


def late_results():
    from dtk.communicators.mpi.communicator import _Site

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
def test_a_result_that_a_failed_step_left_is_not_the_next_ones(pool):
    assert pool.run(late_results) == [([1, 0, 0, 1], [3.0])] * 2


def lanes_in_opposite_order():
    """Each rank's thread for graphs is kept in another lane for a while; neither may wait there."""
    comm = communicator()
    sleep = 0.3

    def after_a_while(value):
        def wait(given):
            import time

            time.sleep(sleep)
            return given

        return tf.ensure_shape(tf.numpy_function(wait, [value], tf.float32), value.shape)

    @tf.function(autograph=False)
    def both(value):
        with comm.sequence("opposite"):
            with comm.concurrent("one"):
                one = comm.allreduce(after_a_while(value) if comm.rank else value)
            with comm.concurrent("other"):
                other = comm.allreduce(value if comm.rank else after_a_while(value))
        return one, other

    return [[part.numpy().tolist() for part in both(tf.fill([3], 1.0 + i))] for i in range(5)]


@two
def test_lanes_do_not_wait_for_each_other(pool):
    expected = [[[2.0 + 2 * i] * 3] * 2 for i in range(5)]
    assert pool.run(lanes_in_opposite_order) == [expected] * 2


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


@pytest.mark.parametrize(
    "end, graph, elements",
    [
        ("sys.exit(0)", False, 8),
        pytest.param("raise ValueError('of the script')", True, 8, marks=pytest.mark.full),
        pytest.param("sys.exit(0)", True, 1 << 20, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_leaves_is_named(tmp_path, end, graph, elements):
    if reason := world.missing("mpi"):
        pytest.skip(reason)
    script = tmp_path / "leaves.py"
    script.write_text(textwrap.dedent(LEAVES.format(end=end, graph=graph, elements=elements)))
    (process,) = world._processes("mpi", 2, {})
    command = [*process.argv[: process.argv.index("-np")], "-np", "2", sys.executable, str(script)]
    import os

    done = subprocess.run(
        command, capture_output=True, text=True, timeout=90, env={**os.environ, **process.env}
    )
    assert done.returncode != 0
    assert "not reached" not in done.stdout
    assert "waits for rank 1, whose script has ended" in done.stderr
    assert "of the script" in done.stderr or "ValueError" not in end
