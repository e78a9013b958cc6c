"""The harness itself: what it returns, and that nothing outlives a failure."""

from __future__ import annotations

import os
import random
import time

import numpy as np
import psutil
import pytest

from support import world as harness


def double(value):
    return os.environ["DTK_TEST_COMMUNICATOR"], value * 2, os.getpid()


def fail_on_last():
    comm = harness.communicator()
    if comm.rank == comm.size - 1:
        raise ArithmeticError("on purpose")
    comm.barrier()


@pytest.mark.parametrize("backend, size", [("collective", 2), ("horovod-mpi", 2)])
def test_results_come_in_rank_order_and_processes_are_reused(world, backend, size):
    first = world(backend, size).run(double, 21)
    again = world(backend, size).run("test_world:double", 21)
    assert first == again
    assert [r[:2] for r in first] == [(backend.split("-")[0], 42)] * size
    assert [r[2] for r in first] != [os.getpid()] * size


def unseeded():
    import keras

    harness.communicator()  # before the first tensor
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    return random.random(), np.random.rand(), layer.kernel.numpy().tolist()


@pytest.mark.worlds(("local", 1), ("collective", 2))
def test_what_is_drawn_without_a_seed_is_the_same_in_each_run(pool):
    drawn = pool.run(unseeded)
    assert pool.run(unseeded) == drawn
    assert len({one[0] for one in drawn}) == pool.size


def seed_apart():
    import keras

    keras.utils.set_random_seed(5 + harness.communicator().rank)


def seed_now():
    from dtk.compat.tf_replicas import global_seed

    return global_seed()


@pytest.mark.worlds(("collective", 2))
def test_ranks_that_a_body_has_seeded_apart_are_alike_for_the_next(pool):
    """A test of layers seeded them so, and the next one that made a strategy failed."""
    pool.run(seed_apart)
    first, second = pool.run(seed_now)
    assert first == second is not None


@pytest.mark.ends_world
@pytest.mark.worlds(("collective", 2))
def test_a_failure_ends_every_process(pool):
    pids = list(pool.pids)
    began = time.monotonic()
    with pytest.raises(harness.WorldError, match="(?s)rank 1: .*ArithmeticError: on purpose"):
        pool.run(fail_on_last, timeout=20)
    assert time.monotonic() - began < 20
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(harness.WorldError, match="has ended"):
        pool.run(double, 1)


def test_the_id_of_a_test_names_its_world(request):
    """Breaks as a world that is started once for each worker of pytest-xdist."""
    named = {item.nodeid: harness.named_in(item.nodeid) for item in request.session.items}
    for item in request.session.items:
        backend, size = harness.wanted(item)
        assert named[item.nodeid] == (f"{backend}-{size}" if backend else None), item.nodeid
    assert harness.named_in("test_a[0-horovod-gloo-2-adam-none]") == "horovod-gloo-2"
    assert harness.named_in("test_a[mirrored-3-adam]") == "local-1"
    assert harness.named_in("test_a_collective-2[sync]") is None


def test_unknown_backend():
    with pytest.raises(ValueError, match="unknown backend 'smoke'; use one of local"):
        harness.World("smoke", 1)
    with pytest.raises(ValueError, match="one rank, got size=2"):
        harness.World("local", 2)


def test_a_world_that_cannot_start_says_why_at_once():
    began = time.monotonic()
    with pytest.raises(harness.WorldError, match="(?s)collective x 1 does not start.*encodings"):
        harness.World("collective", 1, env={"PYTHONHOME": "/nowhere"})
    assert time.monotonic() - began < harness.START_TIMEOUT / 3
