"""What every communicator must do, checked on every rank against numpy.

A body runs on all ranks at once. Each rank makes the inputs of all ranks from their seeds, so it
can work out what numpy would have answered. Ranks are processes, or the devices of one.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import world

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.int32, tf.int64, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32)
DTYPES = (*FLOATS, *INTEGERS, tf.uint64, tf.bool)
GRAPH_DTYPES = (*FLOATS, tf.int32, tf.int64, tf.uint8, tf.bool)
# One of each way to travel: as it is, and packed into words.
WAYS = (tf.float32, tf.uint8)
SHAPES = ((5, 3), (7,), (), (0,), (4, 0, 2), (1, 1))
_NUMPY = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
_ROUNDING = {tf.float16: 4e-3, tf.bfloat16: 3e-2, tf.float32: 1e-6, tf.float64: 1e-14}


_replica = threading.local()


def communicator():
    """Of this process, or of the device whose thread this is."""
    return getattr(_replica, "communicator", None) or world.communicator()


def between_devices(body, count):
    """Run a body on every replica of one process, as a mirrored strategy's: in graphs only."""
    from dtk.communicators import collective

    devices = [f"/cpu:{index}" for index in range(count)]

    def replica(comm, device):
        _replica.communicator = comm
        with tf.device(device):
            globals()[body](True)

    group = collective.replicas(devices, group=id(devices))
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        list(threads.map(replica, group, devices))


def make(rank, shape, dtype, seed=0):
    """The input of one rank: as numpy, of the dtype's own type."""
    rng = np.random.default_rng([rank, seed, *shape])
    if dtype == tf.bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.is_floating:
        return rng.uniform(0.5, 2.0, shape).astype(dtype.as_numpy_dtype)
    info = np.iinfo(dtype.as_numpy_dtype)
    # Wide enough that a detour through float would lose digits, and sums wrap.
    return rng.integers(info.min, info.max, shape, dtype=dtype.as_numpy_dtype, endpoint=True)


def pairs(graph, shapes):
    """Every dtype in every shape. Tracing costs more than running, and what it does for a dtype and
    for a shape are separate: in a graph, every way to travel in every shape, and every dtype once.
    """
    if not graph:
        return [(dtype, shape) for dtype in DTYPES for shape in shapes]
    return [
        (dtype, shape)
        for dtype in GRAPH_DTYPES
        for shape in shapes
        if dtype in WAYS or shape is shapes[0]
    ]


def call(graph, function, *arguments):
    """Call eagerly, or as a `tf.function`."""
    return (tf.function(function) if graph else function)(*arguments)


def same(actual, expected, dtype=None, context=""):
    """Compare bit for bit, or within the rounding of `dtype`; shapes and dtypes too."""
    # numpy() first: a scalar bfloat16 tensor has no __array__ of its own
    actual = np.asarray(actual.numpy() if tf.is_tensor(actual) else actual)
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, f"{context}: {actual.shape} != {expected.shape}"
    assert actual.dtype == expected.dtype, f"{context}: {actual.dtype} != {expected.dtype}"
    if dtype in _ROUNDING:
        np.testing.assert_allclose(
            actual.astype(np.float64),
            expected.astype(np.float64),
            rtol=_ROUNDING[dtype],
            err_msg=context,
        )
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=context)


def reference(op, parts, dtype):
    """What numpy says, in the dtype itself (floats by way of float64)."""
    stacked = np.stack(parts)
    if dtype.is_floating:
        return _NUMPY[op](stacked.astype(np.float64), axis=0).astype(dtype.as_numpy_dtype)
    if dtype == tf.bool:
        return {"sum": np.any, "max": np.any, "min": np.all, "prod": np.all}[op](stacked, axis=0)
    keywords = {} if op in ("min", "max") else {"dtype": dtype.as_numpy_dtype}
    return np.asarray(_NUMPY[op](stacked, axis=0, **keywords), dtype.as_numpy_dtype)


def places():
    comm = communicator()
    assert world.communicator() is comm or comm.size == 1
    return comm.name, comm.rank, comm.size, comm.local_rank, comm.local_size, comm.hosts


def allreduce_every_dtype_and_shape(graph):
    comm = communicator()
    for op in ("sum", "mean", "min", "max", "prod"):
        cases = [
            (dtype, [make(r, shape, dtype) for r in range(comm.size)])
            for dtype, shape in pairs(graph, SHAPES if op == "sum" else SHAPES[:1])
            if dtype.is_floating or op != "mean"
            if dtype != tf.uint64 or op in ("sum", "prod")
        ]
        outputs = call(
            graph,
            lambda values, op=op: comm.allreduce(values, op),
            [tf.constant(parts[comm.rank], dtype) for dtype, parts in cases],
        )
        assert isinstance(outputs, list)
        for output, (dtype, parts) in zip(outputs, cases, strict=True):
            expected = reference(op, parts, dtype)
            same(output, expected, dtype, f"{op} {dtype.name} {parts[0].shape}")


def allreduce_single_and_constant(graph):
    comm = communicator()
    total = sum(range(1, comm.size + 1))
    same(call(graph, comm.allreduce, tf.constant(comm.rank + 1)), np.int32(total))
    # A constant must not be reduced while the graph is being optimized, on this rank alone.
    same(call(graph, lambda: comm.allreduce(tf.ones([3]))), np.full(3, comm.size, np.float32))
    same(call(graph, lambda: comm.allreduce(np.ones(3))), np.full(3, comm.size, np.float64))
    variable = tf.Variable([1.0, 2.0])
    same(call(graph, lambda: comm.allreduce(variable)), np.float32([1, 2]) * comm.size)
    assert call(graph, lambda: comm.allreduce([])) == []


def allreduce_keeps_static_shapes():
    comm = communicator()

    @tf.function
    def step(a, b):
        first, second = comm.allreduce([a, b])
        assert first.shape.as_list() == [2, 3]
        assert second.shape.as_list() == []
        broadcast = comm.broadcast(a)
        assert broadcast.shape.as_list() == [2, 3]
        assert comm.allgather(a).shape.as_list()[1:] == [3]
        return first, second

    step(tf.ones([2, 3]), tf.ones([]))


def allreduce_unknown_shape():
    comm = communicator()

    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec(None)])
    def step(a, b):
        return comm.allreduce([a, b, tf.ones([2])])

    for rows in (3, 0, 5, 3):
        a, b, c = step(tf.ones([rows, 2]), tf.ones([rows]))
        same(a, np.full([rows, 2], comm.size, np.float32))
        same(b, np.full([rows], comm.size, np.float32))
        same(c, np.full([2], comm.size, np.float32))


def allreduce_large(graph):
    comm = communicator()
    elements = 64 * 2**20 // 4
    value = tf.range(elements, dtype=tf.float32) % 1000 + comm.rank
    for _ in range(2):
        output = call(graph, comm.allreduce, value)
    expected = comm.size * (np.arange(elements, dtype=np.float32) % 1000) + sum(range(comm.size))
    same(output, expected)


def allreduce_many_tiny(graph):
    comm = communicator()
    values = [tf.fill([i % 7], float(i + comm.rank)) for i in range(300)]
    before = comm.bytes_sent
    outputs = call(graph, comm.allreduce, values)
    for i, output in enumerate(outputs):
        expected = comm.size * i + sum(range(comm.size))
        same(output, np.full(i % 7, expected, np.float32))
    payload = sum(4 * (i % 7) for i in range(300))
    assert comm.bytes_sent - before == (payload if comm.name != "local" else 0)


def allreduce_mixed_list(graph):
    comm = communicator()
    n = comm.size

    def step(dense, rows, flag):
        slices = tf.IndexedSlices(rows, tf.range(comm.rank + 1), tf.constant([9, 2]))
        return comm.allreduce([dense, slices, flag, dense * 2])

    rows = tf.fill([comm.rank + 1, 2], float(comm.rank))
    dense, slices, flag, twice = call(
        graph, step, tf.ones([3]), rows, tf.constant([comm.rank == 0, False])
    )
    same(dense, np.full(3, n, np.float32))
    same(twice, np.full(3, 2 * n, np.float32))
    same(flag, np.array([True, False]))
    assert isinstance(slices, tf.IndexedSlices)
    same(slices.values, np.concatenate([np.full([r + 1, 2], r, np.float32) for r in range(n)]))
    same(slices.indices, np.concatenate([np.arange(r + 1, dtype=np.int32) for r in range(n)]))
    same(slices.dense_shape, np.int32([9, 2]))


def indexed_slices_mean(graph):
    comm = communicator()
    n = comm.size

    def step(values, indices):
        return comm.allreduce(tf.IndexedSlices(values, indices, tf.constant([4])), "mean")

    count = 0 if comm.rank == 0 else 2  # rank 0 has no rows at all
    values = tf.fill([count], float(n))
    output = call(graph, step, values, tf.fill([count], np.int64(comm.rank)))
    dense = np.zeros(4)
    np.add.at(dense, np.asarray(output.indices), np.asarray(output.values))
    expected = np.zeros(4)
    expected[1:n] = 2.0
    np.testing.assert_allclose(dense, expected)


def allgather(graph):
    comm = communicator()
    cases = [
        (dtype, [make(r, (rows_of(r), *tail), dtype) for r in range(comm.size)])
        # ragged, with a rank that has no rows; equal; and rows of zero width
        for dtype, (rows_of, tail) in pairs(
            graph, [(lambda r: 2 * r, (3,)), (lambda r: 3, ()), (lambda r: r + 1, (0,))]
        )
    ]
    cases += [(tf.float32, [np.zeros([0, 2], np.float32)] * comm.size)]
    scalars = [
        (dtype, [make(r, (), dtype) for r in range(comm.size)])
        for dtype in (WAYS if graph else DTYPES)
    ]
    outputs = call(
        graph,
        lambda values: [comm.allgather(v) for v in values],
        [tf.constant(parts[comm.rank], dtype) for dtype, parts in cases + scalars],
    )
    for output, (dtype, parts) in zip(outputs, cases, strict=False):
        same(output, np.concatenate(parts), context=f"{dtype.name} {parts[0].shape}")
    for output, (dtype, parts) in zip(outputs[len(cases) :], scalars, strict=True):
        same(output, np.stack(parts), context=dtype.name)


def allgather_sizes_change():
    """One traced function, other row counts at every call."""
    comm = communicator()

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.uint8)])
    def step(value):
        return comm.allgather(value)

    for rows in (1, 4, 0, 1000, 4, 1):
        counts = [rows * (r % 2) + rows // 2 for r in range(comm.size)]
        output = step(tf.fill([counts[comm.rank], 2], np.uint8(comm.rank + 1)))
        same(
            output, np.concatenate([np.full([c, 2], r + 1, np.uint8) for r, c in enumerate(counts)])
        )


def alltoall(graph):
    comm = communicator()
    n, rank = comm.size, comm.rank
    # rank r sends (r + j) % 3 rows to rank j, so some blocks are empty
    splits = [[(r + j) % 3 for j in range(n)] for r in range(n)]
    starts = [np.cumsum([0, *splits[r]]) for r in range(n)]
    cases = [
        (dtype, [make(r, (sum(splits[r]), *tail), dtype) for r in range(n)])
        for dtype, tail in pairs(graph, ((2,), ()))
    ]
    outputs = call(
        graph,
        lambda values, splits: [comm.alltoall(v, splits) for v in values],
        [tf.constant(sent[rank], dtype) for dtype, sent in cases],
        tf.constant(splits[rank]),
    )
    for (output, received), (dtype, sent) in zip(outputs, cases, strict=True):
        blocks = [sent[r][starts[r][rank] : starts[r][rank + 1]] for r in range(n)]
        same(output, np.concatenate(blocks), context=dtype.name)
        same(received, np.int32([splits[r][rank] for r in range(n)]))
    output, received = call(graph, comm.alltoall, tf.fill([2 * n, 2], rank))
    same(output, np.repeat(np.arange(n, dtype=np.int32), 2)[:, None] * np.ones([1, 2], np.int32))
    same(received, np.full(n, 2, np.int32))
    output, received = call(graph, comm.alltoall, tf.zeros([0, 2]), [0] * n)
    same(output, np.zeros([0, 2], np.float32))


def reduce_scatter(graph):
    comm = communicator()
    n = comm.size
    for op in ("sum", "mean", "min", "max", "prod"):
        cases = [
            (dtype, [make(r, shape, dtype) for r in range(n)])
            for dtype, shape in pairs(graph, ((7, 2), (n,), (1,), (0, 3)))
            if dtype.is_floating or op != "mean"
            if dtype != tf.uint64 or op in ("sum", "prod")
            if op == "sum" or shape == (7, 2)
        ]
        outputs = call(
            graph,
            lambda values, op=op: [comm.reduce_scatter(v, op) for v in values],
            [tf.constant(parts[comm.rank], dtype) for dtype, parts in cases],
        )
        for output, (dtype, parts) in zip(outputs, cases, strict=True):
            blocks = np.array_split(reference(op, parts, dtype), n)
            same(output, blocks[comm.rank], dtype, f"{op} {dtype.name} {parts[0].shape}")


def broadcast(graph):
    comm = communicator()
    cases = pairs(graph, SHAPES)
    for root in range(comm.size):
        inputs = [tf.constant(make(comm.rank, *case[::-1], seed=1), case[0]) for case in cases]
        outputs = call(graph, lambda v, root=root: comm.broadcast(v, root), inputs)
        for output, (dtype, shape) in zip(outputs, cases, strict=True):
            expected = make(root, shape, dtype, seed=1)
            same(output, expected, context=f"{dtype.name} {shape} from {root}")
    bits = np.float32([np.nan, -0.0, np.inf, 1e-42])
    output = call(
        graph, comm.broadcast, tf.constant(bits if comm.rank == 0 else np.zeros_like(bits))
    )
    same(np.asarray(output).view(np.int32), bits.view(np.int32))


def send_and_recv(graph):
    comm = communicator()
    n, rank = comm.size, comm.rank
    comm.connect([(r, (r + 1) % n) for r in range(n)])
    for dtype in (tf.float32, tf.bfloat16, tf.uint8, tf.int64, tf.bool):
        for shape in ((3,), (), (2, 5), (0,)):
            sent = make(0, shape, dtype, seed=2)

            def ring(value, shape=shape, dtype=dtype):
                # 0 -> 1 -> ... -> 0: everyone but rank 0 receives before it sends
                if rank:
                    value = comm.recv(shape, dtype, rank - 1, tag=3)
                comm.send(value, (rank + 1) % n, tag=3)
                return value if rank else comm.recv(shape, dtype, n - 1, tag=3)

            output = call(
                graph, ring, tf.constant(sent if rank == 0 else np.zeros_like(sent), dtype)
            )
            same(output, sent, context=f"{dtype.name} {shape}")


def objects():
    comm = communicator()
    for root in range(comm.size):
        value = {"rank": comm.rank, "list": [1] * comm.rank, "text": "x" * 1000 * comm.rank}
        expected = {"rank": root, "list": [1] * root, "text": "x" * 1000 * root}
        assert comm.broadcast_object(value if comm.rank == root else None, root) == expected
    assert comm.allgather_object("r" * comm.rank) == ["r" * r for r in range(comm.size)]
    assert comm.allgather_object(None) == [None] * comm.size


def barrier_waits(graph):
    import time

    comm = communicator()
    call(graph, comm.barrier)
    if comm.rank == 0:
        time.sleep(0.3)
    arrived = time.time()
    call(graph, comm.barrier)
    left = time.time()
    return arrived, left


def split(color, key):
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
    for graph in (False, True):
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


def split_a_group():
    """TensorFlow's collectives only: groups of groups."""
    comm = communicator()
    group = comm.split(0, key=-comm.rank)
    pair = group.split(int(comm.rank == 1))
    if comm.rank != 1:
        assert pair.size == comm.size - 1
    same(pair.allreduce(tf.constant(1)), np.int32(pair.size))


def retrace_on_one_rank():
    """Rank 0 traces a second time between two steps; loops and conditionals included."""
    comm = communicator()

    @tf.function(reduce_retracing=False)
    def step(value, traces):
        del traces
        with comm.sequence("contract/step"):
            value = comm.allreduce(value)
            for _ in tf.range(3):
                value = comm.allreduce(value, "max")
            if tf.reduce_sum(value) > 0:
                value = comm.allreduce([value, value * 2])[1] / 2
            rows = comm.allgather(value[: comm.rank])
            comm.barrier()
        return value, rows

    value = tf.ones([4])
    expected = np.full(4, comm.size**2, np.float32)
    for traces in (0, 1, 2):
        output, rows = step(value, traces if comm.rank == 0 else 0)
        same(output, expected)
        assert rows.shape[0] == sum(range(comm.size))


def order_in_a_graph():
    """Independent collectives of one dtype and shape must not be exchanged for one another."""
    comm = communicator()

    @tf.function
    def step(values):
        if comm.rank == 0:  # what is ready first differs by rank
            tf.linalg.inv(tf.random.normal([200, 200]))
        outputs = [comm.allreduce(v) for v in tf.unstack(values)]
        gathered = comm.allgather(values[0][None])
        roots = [comm.broadcast(values[i], root=i % comm.size) for i in range(3)]
        return tf.stack(outputs), gathered, tf.stack(roots)

    for k in range(20):
        values = tf.range(8.0)[:, None] + tf.constant(float(comm.rank * k))
        outputs, gathered, roots = step(values)
        total = sum(range(comm.size)) * k
        same(outputs, comm.size * np.arange(8, dtype=np.float32)[:, None] + np.float32(total))
        same(gathered, np.float32([[[r * k]] for r in range(comm.size)])[:, :, 0])
        same(roots[:, 0], np.float32([i + i % comm.size * k for i in range(3)]))


def unused_results_still_take_part():
    """Nobody reads rank 0's result; the collective must run there all the same."""
    comm = communicator()

    @tf.function
    def step(value):
        reduced = comm.allreduce(value)
        received = comm.broadcast(value)
        return value if comm.rank == 0 else reduced + received

    for _ in range(3):
        step(tf.ones([4]))


def bytes_are_counted_per_execution():
    comm = communicator()
    step = tf.function(lambda v: comm.allreduce(v))
    value = tf.ones([10], tf.float64)
    step(value)
    before = comm.bytes_sent
    for _ in range(3):
        step(value)
    comm.allreduce(value)
    assert comm.bytes_sent - before == (4 * 80 if comm.name != "local" else 0)


def keys_do_not_pile_up():
    """Eager calls reuse what the transport remembers."""
    comm = communicator()
    if comm.name != "collective":
        return
    comm.allreduce(tf.ones([3]))
    before = len(comm._eager_keys)
    for _ in range(50):
        comm.allreduce(tf.ones([3]))
        comm.barrier()
    for size in range(1000, 1100):  # sizes a ragged gather rounds alike
        comm.allgather(tf.ones([size]))
    assert len(comm._eager_keys) <= before + 4


def rewritten():
    """Names under which a communicator's code ran while it was traced; AutoGraph has others."""
    from dtk.communicators.null import NullCommunicator

    names = []

    class Seen(NullCommunicator):
        def _reduce(self, flat, op, label):
            names.append(sys._getframe().f_code.co_name)
            return super()._reduce(flat, op, label)

    seen = Seen(0, 2)
    tf.function(lambda: seen.allreduce(tf.ones(2)))()
    return names


def null_keeps_shapes_and_dtypes(graph):
    """No peer exists, so whatever returns has sent nothing."""
    from dtk.communicators.null import NullCommunicator

    comm = NullCommunicator(rank=1, size=3)
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


def refuses():
    """Bad input raises ValueError on every rank, and leaves the world usable."""
    comm = communicator()
    one = tf.ones([2])
    cases = [
        (lambda: comm.allreduce(one, "median"), "unknown reduction 'median'; use one of sum"),
        (lambda: comm.allreduce(tf.constant([1]), "mean"), "the mean of int32"),
        (lambda: comm.allreduce(tf.constant("a")), "broadcast_object"),
        (lambda: comm.broadcast(one, root=comm.size), f"root={comm.size} is not a rank"),
        (lambda: comm.broadcast(one, root=-1), "root=-1 is not a rank"),
        (lambda: comm.reduce_scatter(tf.constant(1.0)), "reduce_scatter needs rows"),
        (lambda: comm.alltoall(tf.constant(1.0)), "alltoall needs rows"),
        (lambda: comm.alltoall(one, [1] * (comm.size + 1)), "got splits of shape"),
        (lambda: comm.alltoall(one, [9] * comm.size), "must add up to the rows"),
        (lambda: comm.send(one, comm.rank), "itself|nobody"),
        (lambda: comm.recv([2], tf.float32, comm.size), "is not a rank|nobody"),
        (
            lambda: comm.allreduce(tf.IndexedSlices(one, tf.constant([0, 1])), "max"),
            "only 'sum' and 'mean'",
        ),
    ]
    for function, message in cases:
        with pytest.raises(ValueError, match=message):
            function()
    same(comm.allreduce(one), np.full(2, comm.size, np.float32))


def horovod_needs_links():
    comm = communicator()
    from dtk.communicators.horovod import HorovodCommunicator, _Sets
    from dtk.errors import CommunicatorError

    fresh = HorovodCommunicator(comm.rank, comm.hosts, range(comm.size), _Sets())
    if comm.rank == 0:
        with pytest.raises(CommunicatorError, match=r"connect\(\[\(0, 2\)"):
            fresh.send(tf.ones([1]), 2)
    group = comm.split(int(comm.rank == 1))
    if comm.rank != 1:
        with pytest.raises(CommunicatorError, match="call split on the world communicator"):
            group.split(0)


def horovod_makes_groups_if_told_so():
    comm = communicator()
    from dtk.errors import CommunicatorError

    with pytest.raises(CommunicatorError, match="set HOROVOD_DYNAMIC_PROCESS_SETS=1 for every"):
        comm._sets.make([comm.rank])
