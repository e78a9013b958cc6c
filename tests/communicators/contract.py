"""What every communicator must do, checked on every rank against numpy.

The checks of collectives run one after the other in one round trip. Each compares after its last
collective: a rank that finds something wrong leaves no other waiting, and all that is wrong with a
communicator is told at once. They share no `tf.function`: what a graph costs grows faster than it.

Each rank makes the inputs of all ranks from their seeds, so it can work out what numpy would have
answered. Ranks are processes, or the devices of one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import traceback
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators import collective
from dtk.communicators.aligned_slices import AlignedSlices

from support import world

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
INTEGERS = (tf.int32, tf.int64, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32)
DTYPES = (*FLOATS, *INTEGERS, tf.uint64, tf.bool)
GRAPH_DTYPES = (tf.float32, tf.bfloat16, tf.int64, tf.uint8, tf.bool)
# One of each way to travel: as it is, and packed into words.
WAYS = (tf.float32, tf.uint8)
SHAPES = ((5, 3), (7,), (), (0,), (4, 0, 2), (1, 1))
_NUMPY = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
OPS = tuple(_NUMPY)
_ROUNDING = {tf.float16: 4e-3, tf.bfloat16: 3e-2, tf.float32: 1e-6, tf.float64: 1e-14}


_replica = threading.local()


def communicator():
    """Of this process, or of the device whose thread this is."""
    return getattr(_replica, "communicator", None) or world.communicator()


def failures(names, graph):
    """What checks find wrong on this rank, by name; all ranks give the same names.

    Args:
        names: Of functions in here.
        graph: Whether they call collectives in a `tf.function`.
    """
    found = {}
    for name in names:
        try:
            globals()[name](communicator(), graph)
        except AssertionError:  # noted; another error ends the world, and says in which check
            found[name] = traceback.format_exc()
        except Exception as error:
            error.add_note(f"in the check {name}")
            raise
    return found


def failures_between_devices(names, count):
    """The same on every replica of one process, as a mirrored strategy's: in graphs only."""
    devices = [f"/cpu:{index}" for index in range(count)]

    def replica(comm, device):
        _replica.communicator = comm
        with tf.device(device):
            return failures(names, graph=True)

    group = collective.replicas(devices, group=id(devices))
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        return list(threads.map(replica, group, devices))


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


def pairs(graph, shapes, dtypes=GRAPH_DTYPES):
    """Every dtype in every shape. Tracing costs more than running, and what it does for a dtype and
    for a shape are separate: in a graph, each of `dtypes` in one shape, and the others in one way.
    """
    if not graph:
        return [(dtype, shape) for dtype in DTYPES for shape in shapes]
    others = [(WAYS[i % 2], shape) for i, shape in enumerate(shapes[1:])]
    return [*((dtype, shapes[0]) for dtype in dtypes), *others]


def cases(comm, graph, shapes, op="sum", dtypes=GRAPH_DTYPES):
    """Dtypes that an op takes, with all ranks' inputs; a shape may depend on the rank."""
    return [
        (dtype, [make(r, s(r) if callable(s) else s, dtype) for r in range(comm.size)])
        for dtype, s in pairs(graph, shapes, dtypes)
        if dtype.is_floating or op != "mean"
        if dtype != tf.uint64 or op in ("sum", "prod")
    ]


def own(comm, cases):
    """This rank's inputs, of cases of a dtype and all ranks' values."""
    return [tf.constant(parts[comm.rank], dtype) for dtype, parts in cases]


def compare(comm, graph, runs, rounded=False):
    """Of each run: its cases, a function of this rank's inputs, and what numpy makes of all ranks'.

    What it makes are functions of a case's inputs and dtype.
    """
    outputs = [call(graph, function, own(comm, of_run)) for of_run, function, _ in runs]
    for found, (of_run, _, expected) in zip(outputs, runs, strict=True):
        assert isinstance(found, list)
        for output, (dtype, parts) in zip(found, of_run, strict=True):
            context = f"{expected} of {dtype.name} {parts[0].shape}"
            same(output, expected(parts, dtype), dtype if rounded else None, context)


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
        pair = actual.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_allclose(*pair, rtol=_ROUNDING[dtype], err_msg=context)
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


def allreduce_every_dtype_and_shape(comm, graph):
    runs = []
    for op in OPS[:3] if graph else OPS:
        of_op = cases(comm, graph, SHAPES if op == "sum" else SHAPES[:1], op)
        runs.append((of_op, partial(comm.allreduce, op=op), partial(reference, op)))
    compare(comm, graph, runs, rounded=True)


def allreduce_single_and_constant(comm, graph):
    variable = tf.Variable([1.0, 2.0])
    single, constant, array, assigned, nothing = call(
        graph,
        lambda value: (
            comm.allreduce(value),
            # A constant must not be reduced while the graph is being optimized, on this rank alone.
            comm.allreduce(tf.ones([3])),
            comm.allreduce(np.ones(3)),
            comm.allreduce(variable),
            comm.allreduce([]),
        ),
        tf.constant(comm.rank + 1),
    )
    same(single, np.int32(sum(range(1, comm.size + 1))))
    same(constant, np.full(3, comm.size, np.float32))
    same(array, np.full(3, comm.size, np.float64))
    same(assigned, np.float32([1, 2]) * comm.size)
    assert nothing == []


def allreduce_large(comm, graph):
    # A bucket by itself, which is cut into pieces.
    numbers = np.resize(np.arange(1000, dtype=np.float32), 20 * 2**20 // 4)
    value = tf.constant(numbers + np.float32(comm.rank))
    allreduce = tf.function(comm.allreduce) if graph else comm.allreduce
    for _ in range(2):
        output = allreduce(value)
    same(output, comm.size * numbers + np.float32(sum(range(comm.size))))


def allreduce_many_tiny(comm, graph):
    values = [tf.fill([i % 7], float(i + comm.rank)) for i in range(100)]
    before = comm.bytes_sent
    outputs = call(graph, comm.allreduce, values)
    sent = comm.bytes_sent - before
    for i, output in enumerate(outputs):
        expected = comm.size * i + sum(range(comm.size))
        same(output, np.full(i % 7, expected, np.float32))
    payload = sum(4 * (i % 7) for i in range(100))
    assert sent == (payload if comm.size > 1 else 0)


def allreduce_mixed_list(comm, graph):
    n = comm.size

    def step(dense, rows, flag):
        slices = tf.IndexedSlices(rows, tf.range(comm.rank + 1), tf.constant([9, 2]))
        return comm.allreduce([dense, slices, flag, dense * 2])

    rows = tf.fill([comm.rank + 1, 2], float(comm.rank))
    flags = tf.constant([comm.rank == 0, False])
    dense, slices, flag, twice = call(graph, step, tf.ones([3]), rows, flags)
    same(dense, np.full(3, n, np.float32))
    same(twice, np.full(3, 2 * n, np.float32))
    same(flag, np.array([True, False]))
    assert isinstance(slices, tf.IndexedSlices)
    same(slices.values, np.concatenate([np.full([r + 1, 2], r, np.float32) for r in range(n)]))
    same(slices.indices, np.concatenate([np.arange(r + 1, dtype=np.int32) for r in range(n)]))
    same(slices.dense_shape, np.int32([9, 2]))


def indexed_slices_mean(comm, graph):
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


def aligned_slices(comm, graph):
    """Slices of the same places are added up, also where a graph does not know how many."""
    n = comm.size

    def step(values, places, kept):
        slices = [AlignedSlices(values, places, tf.constant([4, 2]))]
        slices += [AlignedSlices(values[:kept], places[:kept], tf.constant([4, 2]))]
        return comm.allreduce(slices)

    values = tf.reshape(tf.range(6.0) + comm.rank, [3, 2])
    whole, fewer = call(graph, step, values, tf.constant([3, 0, 0]), tf.constant(2))
    total = n * np.arange(6, dtype=np.float32).reshape(3, 2) + sum(range(n))
    same(whole.values, total)
    same(whole.indices, np.int32([3, 0, 0]))
    same(fewer.values, total[:2])
    same(fewer.indices, np.int32([3, 0]))


def allgather(comm, graph):
    # ragged, with a rank that has no rows; equal; and rows of zero width
    rows = cases(comm, graph, [lambda r: (2 * r, 3), (3,), lambda r: (r + 1, 0)], dtypes=WAYS)
    rows += [(tf.float32, [np.zeros([0, 2], np.float32)] * comm.size)]
    scalars = [
        (dtype, [make(r, (), dtype) for r in range(comm.size)])
        for dtype in (WAYS[:1] if graph else DTYPES)
    ]

    def gather(values):
        return [comm.allgather(v) for v in values]

    joined = (rows, gather, lambda parts, _: np.concatenate(parts))
    compare(comm, graph, [joined, (scalars, gather, lambda parts, _: np.stack(parts))])


def alltoall(comm, graph):
    n, rank = comm.size, comm.rank
    # rank r sends (r + j) % 3 rows to rank j, so some blocks are empty
    splits = [[(r + j) % 3 for j in range(n)] for r in range(n)]
    starts = [np.cumsum([0, *splits[r]]) for r in range(n)]
    shapes = [lambda r: (sum(splits[r]), 2), lambda r: (sum(splits[r]),)]
    sent = cases(comm, graph, shapes, dtypes=WAYS)
    outputs = call(
        graph,
        lambda values, splits: [comm.alltoall(v, splits) for v in values],
        own(comm, sent),
        tf.constant(splits[rank]),
    )
    equal, of_each = call(graph, comm.alltoall, tf.fill([2 * n, 2], rank))
    empty, _ = call(graph, comm.alltoall, tf.zeros([0, 2]), [0] * n)
    for (output, received), (dtype, parts) in zip(outputs, sent, strict=True):
        blocks = [parts[r][starts[r][rank] : starts[r][rank + 1]] for r in range(n)]
        same(output, np.concatenate(blocks), context=dtype.name)
        same(received, np.int32([splits[r][rank] for r in range(n)]))
    same(equal, np.repeat(np.arange(n, dtype=np.int32), 2)[:, None] * np.ones([1, 2], np.int32))
    same(of_each, np.full(n, 2, np.int32))
    same(empty, np.zeros([0, 2], np.float32))


def reduce_scatter(comm, graph):
    runs = []
    for op in OPS[:2] if graph else OPS:
        shapes = ((7, 2), (comm.size,), (1,), (0, 3)) if op == "sum" else ((7, 2),)

        def scatter(values, op=op):
            return [comm.reduce_scatter(v, op) for v in values]

        def block(parts, dtype, op=op):
            return np.array_split(reference(op, parts, dtype), comm.size)[comm.rank]

        runs.append((cases(comm, graph, shapes, op, WAYS), scatter, block))
    compare(comm, graph, runs, rounded=True)


def broadcast(comm, graph):
    bits = np.float32([np.nan, -0.0, np.inf, 1e-42])
    told = call(graph, comm.broadcast, tf.constant(bits if comm.rank == 0 else np.zeros_like(bits)))
    given = cases(comm, graph, SHAPES)
    compare(
        comm,
        graph,
        [
            (given, partial(comm.broadcast, root=root), lambda parts, _, root=root: parts[root])
            for root in range(comm.size)
        ],
    )
    same(np.asarray(told).view(np.int32), bits.view(np.int32))


def send_and_recv(comm, graph):
    n, rank = comm.size, comm.rank
    comm.connect([(r, (r + 1) % n) for r in range(n)])
    cases = [
        (dtype, make(0, shape, dtype, seed=2))
        for dtype, shape in pairs(True, ((3,), (), (0,), (2, 5)))
    ]

    def ring(value):
        # 0 -> 1 -> ... -> 0: everyone but rank 0 receives before it sends
        shape, dtype = value.shape, value.dtype
        if rank:
            value = comm.recv(shape, dtype, rank - 1, tag=3)
        comm.send(value, (rank + 1) % n, tag=3)
        return value if rank else comm.recv(shape, dtype, n - 1, tag=3)

    outputs = [
        call(graph, ring, tf.constant(sent if rank == 0 else np.zeros_like(sent), dtype))
        for dtype, sent in cases
    ]
    for output, (dtype, sent) in zip(outputs, cases, strict=True):
        same(output, sent, context=f"{dtype.name} {sent.shape}")


def messages_of_one_kind(comm, graph):
    """Of one tag, dtype and size, many between a pair at once, alone and in loops.

    They arrive in the order in which they were sent. TensorFlow's collectives mistook one for
    another: "Second consumer arrived for key".
    """
    n, rank = comm.size, comm.rank
    comm.connect([(0, n - 1)])

    def several(value):
        if rank == 0:
            for i in range(4):
                comm.send(value + i, n - 1)
            return comm.recv([2], tf.int64, n - 1) + comm.recv([2], tf.int64, n - 1)
        received = tf.stack([comm.recv([2], tf.int64, 0) for _ in range(4)])
        comm.send(received[1], 0)
        comm.send(received[3], 0)
        return received

    def looped(value):
        received = tf.zeros([0, 2], tf.int64)
        for i in tf.range(tf.constant(3, tf.int64)):
            tf.autograph.experimental.set_loop_options(
                shape_invariants=[(received, tf.TensorShape([None, 2]))]
            )
            if rank == 0:
                comm.send(value + 2 * i, n - 1)
                comm.send(value + 2 * i + 1, n - 1)
            else:
                one, other = comm.recv([2], tf.int64, 0), comm.recv([2], tf.int64, 0)
                received = tf.concat([received, [one, other]], axis=0)
        return received

    def around(value):
        return several(value), looped(value), several(value + 100), looped(value + 100)

    if rank not in (0, n - 1):
        return
    start = np.array([5, 7], np.int64)
    function = tf.function(around) if graph else around
    for offset in (0, 1000):
        first, second, third, fourth = function(tf.constant(start + offset))
        for got, base in ((first, 0), (third, 100)):
            sent = start + offset + base + np.arange(4)[:, None]
            same(got, sent[1] + sent[3] if rank == 0 else sent)
        for got, base in ((second, 0), (fourth, 100)):
            if rank:
                same(got, start + offset + base + np.arange(6)[:, None])


def barrier_waits_for_the_last(comm, graph):
    call(graph, comm.barrier)
    if comm.rank == 0:
        time.sleep(0.3)
    arrived = time.time()
    call(graph, comm.barrier)
    left = time.time()
    assert left >= max(comm.allgather_object(arrived))


COLLECTIVES = (
    *("allreduce_every_dtype_and_shape", "allreduce_single_and_constant", "allreduce_large"),
    *("allreduce_many_tiny", "allreduce_mixed_list", "indexed_slices_mean", "aligned_slices"),
    *("allgather", "alltoall", "reduce_scatter", "broadcast"),
)


# Behaviours; most have graphs of their own.


def static_shapes_stay(comm, graph):
    @tf.function
    def step(a, b):
        first, second = comm.allreduce([a, b])
        shapes = [t.shape.as_list() for t in (first, second, comm.broadcast(a), comm.allgather(a))]
        assert shapes[:3] == [[2, 3], [], [2, 3]] and shapes[3][1:] == [3]
        return first, second

    step(tf.ones([2, 3]), tf.ones([]))


def shapes_may_be_unknown_and_change(comm, graph):
    """One traced function, other row counts at every call."""
    specs = tf.TensorSpec([None, 2], tf.uint8), tf.TensorSpec([None, None]), tf.TensorSpec(None)

    @tf.function(input_signature=specs)
    def step(rows, value, other):
        return comm.allgather(rows), *comm.allreduce([value, other, tf.ones([2])])

    for rows in (1, 4, 0, 1000, 4, 1):
        counts = [rows * (r % 2) + rows // 2 for r in range(comm.size)]
        mine = tf.fill([counts[comm.rank], 2], np.uint8(comm.rank + 1))
        gathered, total, other, two = step(mine, tf.ones([rows, 2]), tf.ones([rows]))
        parts = [np.full([c, 2], r + 1, np.uint8) for r, c in enumerate(counts)]
        same(gathered, np.concatenate(parts))
        same(total, np.full([rows, 2], comm.size, np.float32))
        same(other, np.full([rows], comm.size, np.float32))
        same(two, np.full([2], comm.size, np.float32))


def objects(comm, graph):
    for root in range(comm.size):
        value = {"rank": comm.rank, "list": [1] * comm.rank, "text": "x" * 1000 * comm.rank}
        expected = {"rank": root, "list": [1] * root, "text": "x" * 1000 * root}
        assert comm.broadcast_object(value if comm.rank == root else None, root) == expected
    assert comm.allgather_object("r" * comm.rank) == ["r" * r for r in range(comm.size)]
    assert comm.allgather_object(None) == [None] * comm.size


def retrace_on_one_rank(comm, graph):
    """Rank 0 traces a second time between two steps; loops and conditionals included.

    In a step of `fit`, which has a sequence, and in functions of a script, one inside the other.
    """
    inner = tf.function(lambda value: comm.allreduce(value, "max"))

    def step(value, traces, named):
        del traces
        with comm.sequence("contract/step") if named else contextlib.nullcontext():
            value = comm.allreduce(value)
            for _ in tf.range(3):
                value = inner(comm.allreduce(value, "max"))
            if tf.reduce_sum(value) > 0:
                value = comm.allreduce([value, value * 2])[1] / 2
            rows = comm.allgather(value[: comm.rank])
            comm.barrier()
        return value, rows

    value = tf.ones([4])
    expected = np.full(4, comm.size**2, np.float32)
    for named in (True, False):
        traced = tf.function(step, reduce_retracing=False)
        for traces in (0, 1):
            output, rows = traced(value, traces if comm.rank == 0 else 0, named)
            same(output, expected)
            assert rows.shape[0] == sum(range(comm.size))


def order_in_a_graph(comm, graph):
    """Independent collectives of one dtype and shape must not be exchanged for one another."""

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


def unused_results_still_take_part(comm, graph):
    """Nobody reads rank 0's result; the collective must run there all the same."""

    @tf.function
    def step(value):
        reduced = comm.allreduce(value)
        received = comm.broadcast(value)
        return value if comm.rank == 0 else reduced + received

    for _ in range(3):
        step(tf.ones([4]))


def bytes_are_counted_per_execution(comm, graph):
    step = tf.function(lambda v: comm.allreduce(v))
    value = tf.ones([10], tf.float64)
    step(value)
    before = comm.bytes_sent
    for _ in range(3):
        step(value)
    comm.allreduce(value)
    assert comm.bytes_sent - before == (4 * 80 if comm.size > 1 else 0)


def keys_do_not_pile_up(comm, graph):
    """Eager calls reuse what the transport remembers."""
    if comm.name != "collective":
        return
    comm.allreduce(tf.ones([3]))
    before = len(comm.host_transport._eager_keys)
    for _ in range(10):
        comm.allreduce(tf.ones([3]))
        comm.barrier()
    for size in range(1000, 1020):  # sizes a ragged gather rounds alike
        comm.allgather(tf.ones([size]))
    assert len(comm.host_transport._eager_keys) <= before + 4


def refuses(comm, graph):
    """Bad input raises ValueError on every rank, and leaves the world usable."""
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
        (lambda: comm.send(one, comm.rank), "itself|no other rank"),
        (lambda: comm.recv([2], tf.float32, comm.size), "is not a rank|no other rank"),
        (lambda: comm.allreduce(tf.IndexedSlices(one, [0, 1]), "max"), "only 'sum' and 'mean'"),
    ]
    for function, message in cases:
        with pytest.raises(ValueError, match=message):
            function()
    same(comm.allreduce(one), np.full(2, comm.size, np.float32))


def refuses_slices_of_other_places(comm, graph):
    """On every rank, when the graph runs; some look up one place more, or another one."""
    if comm.size == 1:
        return

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None], tf.int32)])
    def step(values, places):
        return comm.allreduce(AlignedSlices(values, places, tf.constant([9]))).values

    same(step(tf.ones([2]), tf.range(2)), np.full(2, comm.size, np.float32))
    for places in (tf.range(2 + comm.rank), tf.range(2) + comm.rank):
        with pytest.raises(tf.errors.InvalidArgumentError, match="other places on another rank"):
            step(tf.ones(tf.shape(places)), places)
    # A graph that knows how many there are sends no indices; so does a script's own constant.
    for op in ("sum", "mean"):
        known = tf.function(
            lambda places, op=op: comm.allreduce(
                AlignedSlices(tf.ones([2]), tf.ensure_shape(places, [2]), tf.constant([9])), op
            ).values
        )
        same(known(tf.range(2)), np.full(2, comm.size if op == "sum" else 1, np.float32))
        with pytest.raises(tf.errors.InvalidArgumentError, match="other places on another rank"):
            known(tf.range(2) + comm.rank)
    same(comm.allreduce(tf.ones([2])), np.full(2, comm.size, np.float32))


BEHAVIOURS = (
    *("static_shapes_stay", "shapes_may_be_unknown_and_change", "objects", "order_in_a_graph"),
    *("unused_results_still_take_part", "bytes_are_counted_per_execution", "keys_do_not_pile_up"),
    *("retrace_on_one_rank", "refuses", "refuses_slices_of_other_places"),
)
