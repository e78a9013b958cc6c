"""What formulas must obey, and that they describe what dtk does."""

import dataclasses
import math

import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import strategies as st

from dtk.bench.results import TELLING
from dtk.communicators import buckets, costs
from dtk.communicators.collective import _longest
from dtk.communicators.costs import FLOPS_PER_BYTE, ONE_HOP_MOST, Costs
from dtk.communicators.local import NullCommunicator
from dtk.exchange import factors, parse
from dtk.exchange.contract import ExchangeState, Trained
from dtk.planning import plan_methods as methods
from dtk.planning.inputs import Cluster, Factors, Link, Software, Training
from dtk.planning.plan_methods import METHODS, predict

COUNTS = st.integers(1, 5000)
SECONDS = st.floats(0, 1.0)
SPEEDS = st.floats(1e4, 1e12)
METHOD = st.sampled_from(METHODS)
REDUCING = [method for method in METHODS if not method.served]
JOBS = st.builds(
    Training,
    step=st.floats(1e-4, 100.0),
    parameters=st.integers(1, 10**10),
    rows=st.integers(1, 512),
    global_batch=st.none() | st.integers(1, 10**6),
    block_steps=st.integers(1, 100),
)
CLUSTERS = st.builds(
    Cluster,
    network=st.builds(Link, SECONDS, SPEEDS),
    host=st.builds(Link, SECONDS, SPEEDS),
    per_host=st.integers(1, 16),
    servers=st.integers(1, 64),
    software=st.builds(
        Software,
        message=SECONDS,
        byte=st.floats(0, 1e-6),
        step=SECONDS,
        coding=st.fixed_dictionaries({"1bit": st.floats(0, 1e-6)}),
        product=st.floats(0, 1e-9),
        hidden=st.floats(0, 1),
    ),
)


def seconds(method, job, cluster, workers):
    return method.cost(job, cluster, workers).seconds


def not_less(more, less):
    return more >= less * (1 - 1e-9)


@given(st.sampled_from(REDUCING), JOBS, CLUSTERS)
def test_one_worker_takes_its_own_step(method, job, cluster):
    assert seconds(method, job, cluster, 1) == pytest.approx(job.computing(1))


@given(METHOD, JOBS, CLUSTERS, COUNTS, st.floats(1.0, 10.0))
def test_more_parameters_and_a_worse_link_never_take_less(method, job, cluster, workers, times):
    taken = seconds(method, job, cluster, workers)
    larger = dataclasses.replace(job, parameters=math.ceil(job.parameters * times))
    assert not_less(seconds(method, larger, cluster, workers), taken)
    for name in ("network", "host"):
        link = getattr(cluster, name)
        for worse in (
            Link(link.latency * times, link.bandwidth),
            Link(link.latency, link.bandwidth / times),
        ):
            slower = dataclasses.replace(cluster, **{name: worse})
            assert not_less(seconds(method, job, slower, workers), taken)


@given(METHOD, JOBS, CLUSTERS, COUNTS)
def test_nothing_is_faster_than_workers_without_each_other(method, job, cluster, workers):
    one = predict(method, job, cluster, workers)
    assert 0 < one.efficiency <= 1 + 1e-9
    assert one.seconds >= one.cost.computing
    assert min(one.cost) >= 0
    late = methods.delayed(job, cluster, workers).seconds
    assert not_less(methods.dense(job, cluster, workers).seconds, late)


@given(st.integers(2, 200), st.integers(1, 16), st.floats(1, 1e12))
def test_no_allreduce_sends_less_than_a_ring_and_workers_of_a_host_share_its_link(hosts, per, size):
    ring = costs.ring_allreduce(hosts, size)
    assert size <= ring.bytes < 2 * size  # Patarasuk and Yuan 2009
    # every pair of workers on two hosts sends size/P through each of their links
    workers = hosts * per
    shared = costs.alltoall(workers, size, per).bytes
    assert shared == pytest.approx(per * (workers - per) * size / workers)


def sends(exchange, workers, gradients):
    """Bytes that a communicator counts when a rank exchanges these gradients."""
    communicator = NullCommunicator(0, workers)
    memory = ExchangeState(communicator, "CPU:0")
    op = parse(None if exchange == "dense" else exchange).init(communicator, memory, Trained())
    op.update(gradients)
    return communicator.bytes_sent


@pytest.mark.parametrize("exchange", ["dense", "fp16", "1bit", "8bit"])
@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_are_those_that_the_communicator_counts(exchange, workers):
    column, columns = 512, 64
    job = Training(1.0, column * columns, column=column)
    assert sends(exchange, workers, [tf.ones([column, columns])]) == job.size(exchange)


@given(st.integers(1, 10**9))
def test_padding_is_the_communicators(size):
    words = -(-size // 4)
    assert costs.padded(size) == 4 * int(_longest(tf.constant(words, tf.int64)))
    assert min(TELLING) > ONE_HOP_MOST  # what calibrates goes round a ring


@pytest.mark.parametrize("megabytes", [0.01, 3, 10_000])
@pytest.mark.parametrize("message", [1e-6, 0.7e-3])
def test_buckets_are_the_communicators(megabytes, message):
    size = int(megabytes * 2**20)
    flat = tf.TensorSpec([size // 4])
    world = Costs(2, message, 3e-9, 1e-11)
    cluster = Cluster(Link(), software=Software(message, 3e-9))
    expected = buckets.limit_for([flat], costs=world)
    assert cluster.half_length(2) == world.half_length
    early = methods.early(size, cluster.half_length(2))
    assert early == pytest.approx(max(0.0, 1 - expected / size), abs=1 / size)  # to a byte


KERNEL = (512, 256)
FACTORS = Factors(entries=512 * 256, width=512 + 256)


@pytest.mark.parametrize("exchange", ["dense", "fp16"])
@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_of_factors_are_those_that_the_communicator_counts(exchange, workers):
    rows, biases = 8, 256
    gradients = [factors.Factored(*(tf.ones([rows, n]) for n in KERNEL)), tf.ones([biases])]
    job = Training(1.0, FACTORS.entries + biases, rows, factors=FACTORS)
    told = methods.dense(job, Cluster(Link()), workers, exchange)
    counts = 8  # of the rows of the kernel
    assert sends(exchange, workers, gradients) == pytest.approx(told.bytes + counts)


def test_factors_are_sent_as_long_as_the_exchange_does():
    kernel = factors.Factored(*(tf.ones([1, n]) for n in KERNEL))
    most = math.floor(FACTORS.most_rows(2) / 2) * 2
    for rows in (1, most - 1, most, most + 1):
        counts = tf.constant([[rows - rows // 2], [rows // 2]], tf.int64)
        pays = factors._pays([kernel], counts, FLOPS_PER_BYTE)
        job = Training(1.0, FACTORS.entries, global_batch=rows, factors=FACTORS)
        assert bool(pays) == (job.factored(2) is not None) == (rows <= most)


FACTORED = st.builds(
    lambda job, part: dataclasses.replace(
        job, factors=Factors(job.parameters * part, 2 * math.sqrt(job.parameters * part))
    ),
    JOBS,
    st.floats(0.01, 1.0),
)


@given(FACTORED, CLUSTERS, COUNTS)
# One row of two workers went as a row of 11.3 bytes, for a gradient of 8.
@example(Training(1.0, 2, global_batch=1, factors=Factors(2, 2 * math.sqrt(2))), Cluster(Link()), 2)
def test_factors_are_rows_of_all_and_with_many_workers_whole(job, cluster, workers):
    cost = methods.dense(job, cluster, workers)
    whole = dataclasses.replace(job, factors=None)
    if job.factored(workers) is None:
        assert cost == methods.dense(whole, cluster, workers)
    else:
        assert job.batch(workers) < job.factors.most_rows(workers)
        assert cost.bytes < job.size("dense")
        assert cost.coding >= cluster.software.step


@given(FACTORED, CLUSTERS)
def test_more_rows_as_factors_never_take_less(job, cluster):
    job = dataclasses.replace(job, global_batch=None)
    more = dataclasses.replace(job, rows=2 * job.rows, step=2 * job.step)
    if more.factored(2) is not None:
        assert not_less(seconds(METHODS[0], more, cluster, 2), seconds(METHODS[0], job, cluster, 2))
