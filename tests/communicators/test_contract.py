"""Every communicator keeps the contract of `dtk/communicators/base.py`.

The bodies (contract_bodies.py) compare with numpy on every rank; here is only where they run.
"""

from __future__ import annotations

import pytest

from communicators import contract_bodies as bodies

WORLDS = [
    ("local", 1),
    *((b, n) for b in ("collective", "horovod-gloo", "horovod-mpi") for n in (1, 2, 3)),
]
# Horovod is one engine over two transports: every size runs by default, on one of them.
ONLY_IN_FULL = {("horovod-gloo", 1), ("horovod-gloo", 3), ("horovod-mpi", 3)}


def worlds(wanted):
    return pytest.mark.worlds(
        *(
            pytest.param(w, marks=pytest.mark.full) if w in ONLY_IN_FULL else w
            for w in WORLDS
            if wanted(*w)
        )
    )


# One process under "collective" has the same LocalCommunicator as under "local": test_places shows
# it, and the others run on the latter.
every_world = worlds(lambda backend, size: (backend, size) != ("collective", 1))
several_ranks = worlds(lambda backend, size: size > 1)
both_modes = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


@worlds(lambda backend, size: True)
def test_places(pool):
    found = pool.run(bodies.places)
    name = pool.backend.split("-")[0]
    # TensorFlow's collectives need no runtime for one process
    assert {f[0] for f in found} == {"local" if (name, pool.size) == ("collective", 1) else name}
    assert [f[1:5] for f in found] == [(r, pool.size, r, pool.size) for r in range(pool.size)]
    assert len({f[5] for f in found}) == 1
    assert len(found[0][5]) == pool.size


@every_world
@both_modes
@pytest.mark.parametrize(
    "body",
    [
        bodies.allreduce_every_dtype_and_shape,
        bodies.allreduce_single_and_constant,
        bodies.allreduce_large,
        bodies.allreduce_many_tiny,
        bodies.allreduce_mixed_list,
        bodies.indexed_slices_mean,
        bodies.allgather,
        bodies.alltoall,
        bodies.reduce_scatter,
        bodies.broadcast,
    ],
    ids=lambda body: body.__name__,
)
def test_collective(pool, graph, body):
    pool.run(body, graph)


@pytest.mark.worlds(("local", 1))
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "body",
    [
        bodies.allreduce_every_dtype_and_shape,
        bodies.allreduce_single_and_constant,
        bodies.allreduce_large,
        bodies.allreduce_many_tiny,
        bodies.allreduce_mixed_list,
        bodies.indexed_slices_mean,
        bodies.allgather,
        bodies.alltoall,
        bodies.reduce_scatter,
        bodies.broadcast,
    ],
    ids=lambda body: body.__name__,
)
def test_collective_between_the_devices_of_one_process(pool, count, body):
    pool.run(bodies.between_devices, body.__name__, count)


@pytest.mark.worlds(("local", 1))
@both_modes
def test_null_keeps_shapes_and_dtypes(pool, graph):
    pool.run(bodies.null_keeps_shapes_and_dtypes, graph)


@pytest.mark.worlds(("local", 1))
def test_autograph_rewrites_no_communicator(pool):
    """Nor one that dtk knows nothing of."""
    assert pool.run(bodies.rewritten) == [["_reduce"]]


@every_world
@pytest.mark.parametrize(
    "body",
    [
        bodies.allreduce_keeps_static_shapes,
        bodies.allreduce_unknown_shape,
        bodies.allgather_sizes_change,
        bodies.objects,
        bodies.order_in_a_graph,
        bodies.unused_results_still_take_part,
        bodies.bytes_are_counted_per_execution,
        bodies.keys_do_not_pile_up,
        bodies.retrace_on_one_rank,
        bodies.refuses,
    ],
    ids=lambda body: body.__name__,
)
def test_behaviour(pool, body):
    pool.run(body)


@several_ranks
@both_modes
def test_send_and_recv(pool, graph):
    pool.run(bodies.send_and_recv, graph)


@several_ranks
@both_modes
def test_barrier_waits_for_the_last(pool, graph):
    times = pool.run(bodies.barrier_waits, graph)
    last_arrival = max(arrived for arrived, _ in times)
    assert all(left >= last_arrival for _, left in times)


@every_world
def test_split_of_one_color_and_of_all_colors(pool):
    n = pool.size
    assert set(pool.run(bodies.split, [0] * n, None)) <= {"local", pool.backend.split("-")[0]}
    assert set(pool.run(bodies.split, list(range(n)), None)) == {"local"}


@worlds(lambda backend, size: size == 3)
def test_split_in_three(pool):
    name = pool.backend.split("-")[0]
    assert pool.run(bodies.split, [0, 1, 0], None) == [name, "local", name]
    assert pool.run(bodies.split, [0, 1, 0], [2, 0, 1]) == [name, "local", name]
    assert pool.run(bodies.split, [5, 5, 5], [1, 2, 0]) == [name] * 3


@pytest.mark.worlds(("collective", 3))
def test_split_of_a_group(pool):
    pool.run(bodies.split_a_group)


@pytest.mark.worlds(("horovod-mpi", 3))
def test_horovod_says_what_it_cannot_open_by_itself(pool):
    pool.run(bodies.horovod_needs_links)


@pytest.mark.worlds(("horovod-gloo", 2))
def test_horovod_makes_groups_only_if_told_so(pool):
    pool.run(bodies.horovod_makes_groups_if_told_so)
