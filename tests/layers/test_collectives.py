"""Gradients through collectives are those of one process that holds the values of all ranks."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.shard import Shard
from dtk.even_division import even_sizes
from dtk.layers import collectives, regions

from support.world import communicator

only_in_full = [
    pytest.param(world, marks=pytest.mark.full)
    for world in (("horovod-gloo", 2), ("mpi-wheel", 2), ("mpi-wheel", 3))
]

ROWS = [3, 1, 2]  # of each rank, where they may differ


def draw(seed, shape):
    return tf.constant(np.random.default_rng(seed).normal(size=shape))


def weights(like, seed):
    """Some numbers of the shape of a tensor, which need not be known."""
    count = tf.cast(tf.range(tf.size(like)), like.dtype)
    return tf.reshape(tf.sin(1.7 * count + seed), tf.shape(like))


def matrix(n):
    return [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]


def exchanged(values, n, splits=None):
    parts = [tf.split(v, splits[i] if splits else n) for i, v in enumerate(values)]
    return [tf.concat([parts[i][j] for i in range(n)], 0) for j in range(n)]


def unevenly_exchanged(values, n):
    return exchanged(values, n, matrix(n))


def shares(value, n):
    return tf.split(value, even_sizes(len(value), n))


# name -> rows that rank r of n puts in, the collective, and what all ranks get of all values
CASES = {
    "allreduce": (
        lambda r, n: 4,
        lambda x, c: collectives.allreduce(x, c),
        lambda v, n: [tf.add_n(v)] * n,
    ),
    "mean": (
        lambda r, n: 4,
        lambda x, c: collectives.allreduce(x, c, "mean"),
        lambda v, n: [tf.add_n(v) / n] * n,
    ),
    "allgather": (
        lambda r, n: ROWS[r],
        lambda x, c: collectives.allgather(x, c),
        lambda v, n: [tf.concat(v, 0)] * n,
    ),
    "allgather, rows known": (
        lambda r, n: ROWS[r],
        lambda x, c: collectives.allgather(x, c, ROWS[: c.size]),
        lambda v, n: [tf.concat(v, 0)] * n,
    ),
    "reduce-scatter": (
        lambda r, n: 5,
        lambda x, c: collectives.reduce_scatter(x, c),
        lambda v, n: shares(tf.add_n(v), n),
    ),
    "mean-scatter": (
        lambda r, n: 5,
        lambda x, c: collectives.reduce_scatter(x, c, "mean"),
        lambda v, n: shares(tf.add_n(v) / n, n),
    ),
    "alltoall": (
        lambda r, n: 2 * n,
        lambda x, c: collectives.alltoall(x, c)[0],
        exchanged,
    ),
    "alltoall, own splits": (
        lambda r, n: sum(matrix(n)[r]),
        lambda x, c: collectives.alltoall(x, c, matrix(c.size)[c.rank])[0],
        unevenly_exchanged,
    ),
    "alltoall, all splits": (
        lambda r, n: sum(matrix(n)[r]),
        lambda x, c: collectives.alltoall(x, c, matrix(c.size))[0],
        unevenly_exchanged,
    ),
    "broadcast": (
        lambda r, n: 4,
        lambda x, c: collectives.broadcast(x, c, c.size - 1),
        lambda v, n: [v[n - 1]] * n,
    ),
    "reduce": (
        lambda r, n: 4,
        lambda x, c: collectives.reduce(x, c, c.size - 1),
        lambda v, n: [tf.zeros_like(v[0])] * (n - 1) + [tf.add_n(v)],
    ),
    "scatter, rows given": (
        lambda r, n: sum(ROWS[:n]),
        lambda x, c: collectives.scatter(x, c, 0, ROWS[: c.size]),
        lambda v, n: tf.split(v[0], ROWS[:n]),
    ),
    "scatter, of the root's rows": (
        lambda r, n: [5, 2, 7][r],
        lambda x, c: collectives.scatter(x, c, c.size - 1),
        lambda v, n: shares(v[n - 1], n),
    ),
    "gather": (
        lambda r, n: ROWS[r],
        lambda x, c: collectives.gather(x, c),
        lambda v, n: [tf.concat(v, 0)] + [v[0][:0]] * (n - 1),
    ),
    "gather, rows known": (
        lambda r, n: ROWS[r],
        lambda x, c: collectives.gather(x, c, 0, ROWS[: c.size]),
        lambda v, n: [tf.concat(v, 0)] + [v[0][:0]] * (n - 1),
    ),
}


def derivatives(function, xs, seed):
    """The gradients of a loss of `function(xs)`, and of a function of these gradients."""
    with tf.GradientTape() as outer:
        outer.watch(xs)
        with tf.GradientTape() as inner:
            inner.watch(xs)
            outputs = function(xs)
            # Another loss on each rank: they add up
            losses = [
                tf.reduce_sum(tf.cos(y) * weights(y, seed + rank)) for rank, y in outputs.items()
            ]
            loss = tf.add_n(losses)
        first = inner.gradient(loss, xs, unconnected_gradients="zero")
        again = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in first])
    second = outer.gradient(again, xs, unconnected_gradients="zero")
    return list(outputs.values()), first, second


def against_one_process(names, graph):
    comm = communicator()
    for seed, name in enumerate(names):
        rows, collective, reference = CASES[name]
        n = comm.size
        values = [draw([seed, 0, rank], (rows(rank, n), 2)) for rank in range(n)]
        outputs, first, second = derivatives(
            lambda xs, f=reference, n=n: dict(enumerate(f(xs, n))), values, seed
        )

        def mine(x, f=collective, seed=seed):
            got = derivatives(lambda xs: {comm.rank: f(xs[0], comm)}, [x], seed)
            return got[0][0], got[1][0], got[2][0]

        got = (tf.function(mine) if graph else mine)(values[comm.rank])
        for what, value, expected in zip(
            ("output", "gradient", "second"), got, (outputs, first, second), strict=True
        ):
            np.testing.assert_allclose(
                value, expected[comm.rank], rtol=1e-10, atol=1e-12, err_msg=f"{name}: {what}"
            )


@pytest.mark.full_but("collective-2-eager", why="the same over every transport")
@pytest.mark.worlds(
    ("local", 1), ("collective", 2), ("horovod-mpi", 2), ("collective", 3), *only_in_full
)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_gradients_are_those_of_one_process(pool, graph):
    """And so are gradients of gradients."""
    pool.run(against_one_process, tuple(CASES), graph, timeout=120)


def regions_against_one_process(graph):
    """The loss is computed alike on every rank, and counts once."""
    comm = communicator()
    whole = draw([9], (2, 5))
    shard = Shard.evenly(5, 1, comm)

    def computed(x, parts):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                if parts:
                    part = regions.scatter_to_group(tf.sin(x), shard)
                    y = regions.gather_from_group(part**2, shard)
                    shared = regions.copy_to_group(x, comm)
                    own = shard.part(tf.ones_like(x) * tf.range(1, 6, dtype=x.dtype))
                    summed = regions.reduce_from_group(tf.reduce_sum(own) * tf.exp(shared), comm)
                else:
                    y, summed = tf.sin(x) ** 2, 30.0 * tf.exp(x)
                loss = tf.reduce_sum(tf.cos(y) + tf.sin(summed))
            first = inner.gradient(loss, x)
            again = tf.reduce_sum(tf.sin(first))
        return loss, first, outer.gradient(again, x)

    expected = computed(whole, False)
    got = (tf.function(computed) if graph else computed)(whole, True)
    for value, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.full_but("collective-2", why="the same over every transport")
@pytest.mark.worlds(
    ("local", 1), ("collective", 2), ("horovod-mpi", 2), ("collective", 3), *only_in_full
)
def test_regions_count_a_common_loss_once(pool):
    pool.run(regions_against_one_process, False)
    pool.run(regions_against_one_process, True)


def one_rank_depends_on_nothing(graph):
    """Only the root's value, or only another's, depends on what is differentiated by."""
    comm = communicator()

    def gradient(x, collective, watched):
        with tf.GradientTape() as tape:
            if watched:
                tape.watch(x)
            loss = tf.reduce_sum(collective(x, comm) ** 2)
        return tape.gradient(loss, x, unconnected_gradients="zero")

    for collective in (collectives.broadcast, collectives.allreduce, collectives.reduce_scatter):
        for rank in range(comm.size):

            def one(x, f=collective, rank=rank):
                return gradient(x, f, comm.rank == rank)

            got = (tf.function(one) if graph else one)(tf.ones([4, 2], tf.float64))
            full = {
                collectives.broadcast: 2.0 * comm.size if rank == 0 else 0.0,
                collectives.allreduce: 2.0 * comm.size**2,
                collectives.reduce_scatter: 2.0 * comm.size,
            }[collective]
            np.testing.assert_allclose(got, tf.fill([4, 2], full if comm.rank == rank else 0.0))


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))
def test_a_rank_whose_value_depends_on_nothing_takes_part(pool):
    """It left the others waiting in the backward pass."""
    pool.run(one_rank_depends_on_nothing, False)
    pool.run(one_rank_depends_on_nothing, True)


def pipeline(graph):
    """y = (x a + x)^2 b, summed: the first and the last rank hold one weight each."""
    comm = communicator()
    comm.connect([(0, comm.size - 1)])
    last = comm.size - 1
    x, a, b = draw([1], (4, 3)), draw([2], (3, 3)), draw([3], (3,))
    with tf.GradientTape() as tape:
        tape.watch([a, b])
        loss = tf.reduce_sum((x @ a + x) ** 2 * b) + tf.reduce_sum(a)
    expected = dict(zip((0, last), tape.gradient(loss, [a, b]), strict=True))

    def step(x, a, b):
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            if comm.rank == 0:
                # two messages, and a loss of its own
                token = collectives.send(x @ a, comm, last)
                value = collectives.pseudo_connect(token, tf.reduce_sum(a))
                other = collectives.send(x + tf.zeros_like(x @ a), comm, last)
                return tape.gradient(collectives.pseudo_connect(other, value), a)
            if comm.rank == last:
                first = collectives.recv([4, 3], tf.float64, comm, 0)
                second = collectives.recv(tf.shape(x), tf.float64, comm, 0, token=first[0, 0])
                return tape.gradient(tf.reduce_sum((first + second) ** 2 * b), b)
            return tf.constant(0.0)

    for _ in range(2):
        got = (tf.function(step) if graph else step)(x, a, b)
        if comm.rank in expected:
            np.testing.assert_allclose(got, expected[comm.rank], rtol=1e-12)


def second_gradient_by_messages():
    comm = communicator()
    x = tf.ones([2])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            if comm.rank == 0:
                target = collectives.send(x, comm, 1)
            else:
                received = collectives.recv([2], tf.float32, comm, 0)
                target = tf.reduce_sum(received**2)
        gradient = inner.gradient(target, x)
        if comm.rank == 0:
            again = tf.reduce_sum(gradient**2)
    if comm.rank == 0:
        with pytest.raises(NotImplementedError, match="rank 0: .* use alltoall, allgather or"):
            outer.gradient(again, x)


@pytest.mark.full_but("collective-2", why="the same over every transport")
@pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2), ("collective", 3), *only_in_full)
def test_gradients_come_back_by_send_and_recv(pool):
    pool.run(pipeline, False)
    pool.run(pipeline, True)
    if pool.size == 2:
        pool.run(second_gradient_by_messages)


def refusals():
    comm = communicator()
    with pytest.raises(ValueError, match="rank 0: allreduce with a gradient got op='max'"):
        collectives.allreduce(tf.ones(2), comm, "max")
    with pytest.raises(ValueError, match="a number of rows that is known"):
        collectives.reduce_scatter(tf.ones([]), comm)
    with pytest.raises(ValueError, match="rank 0: alltoall got splits .* must add up to the rows"):
        collectives.alltoall(tf.ones([3]), comm, [2])
    for collective in (collectives.scatter, collectives.gather):
        with pytest.raises(ValueError, match="rank 0: .* got a scalar .* expected rows"):
            collective(tf.ones([]), comm)
        with pytest.raises(ValueError, match=r"got rows=\[1, 2\], .* for each of 1 ranks"):
            collective(tf.ones([3]), comm, rows=[1, 2])


def rows_of_running_graphs(wrong):
    """What is said of rows fits them also where only the running graph knows how many there are."""
    comm = communicator()
    called = {
        "splits": lambda x: comm.alltoall(x, [1] * comm.size)[0],
        "no splits": lambda x: comm.alltoall(x)[0],
        "rows": lambda x: comm.allgather(x, [2] * comm.size),
        "gather": lambda x: collectives.gather(x, comm, rows=[2] * comm.size),
    }[wrong]
    run = tf.function(called, input_signature=[tf.TensorSpec([None, 2])])
    run(tf.ones([2, 2]))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(tf.ones([3, 2]))
    return str(caught.value)


@pytest.mark.worlds(("collective", 2), ("mpi-wheel", 2))
@pytest.mark.parametrize(
    "wrong, told",
    [
        ("splits", "alltoall got splits that do not add up to the rows"),
        ("no splits", "alltoall of rows that 2 does not divide: pass splits"),
        ("rows", "allgather got rows=[2, 2], which says other rows of this rank"),
        ("gather", "alltoall got splits that do not add up to the rows"),
    ],
)
def test_a_graph_sends_no_memory_behind_its_rows(pool, wrong, told):
    for rank, said in enumerate(pool.run(rows_of_running_graphs, wrong)):
        assert f"rank {rank}: {told}" in said


@pytest.mark.worlds(("local", 1))
def test_what_is_refused(pool):
    pool.run(refusals)
