"""What is recommended leaves training as it is; what changes it comes after, the least first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.planning.inputs import Cluster, Link, Software, Training
from dtk.planning.plan_methods import METHODS, predict, sweep
from dtk.planning.tables import advise, by_title, notes

COUNTS = (1, 2, 4, 8, 16, 32, 64)
JOB = Training(0.1, 1_000_000)


def advised(cluster, job=JOB, counts=COUNTS, target=0.7):
    return advise(sweep(job, cluster, counts), job, cluster, target)


def test_a_fast_link_needs_nothing_but_dense():
    advice = advised(Cluster(Link(1e-6, 1e10), software=Software(1e-6, 0.0, 0.0)))
    assert (advice.chosen.method.name, advice.chosen.workers) == ("dense", 64)
    assert advice.reasons[0].startswith("Use 64 workers and AllReduceStrategy(): ")
    assert advice.reasons[1:] == ("Whole gradients (dense) keep 0.70 on all of them.",)


def test_where_bytes_or_messages_wait_the_reason_says_from_which_number_of_workers():
    slow = Cluster(Link(0.0, 25e6), software=Software(1e-5, 0.0, 0.0, {"1bit": 1e-9}))
    advice = advised(slow, target=0.55)
    first = next(n for n in COUNTS if predict(METHODS[0], JOB, slow, n).efficiency < 0.55)
    assert f"fall below 0.55 from {first} workers on" in advice.reasons[1]
    assert advice.reasons[1].endswith(", for bytes wait for the link.")
    assert (advice.chosen.method.name, advice.chosen.workers) == ("dense", first // 2)
    assert advice.reasons[2].startswith("Faster, but training changes; ")
    assert [line[:4] for line in advice.reasons[3:]] == ["  * "] * len(advice.faster)
    advice = advised(Cluster(Link(0.01, 1e10), software=Software(0.0, 0.0, 0.0)))
    assert advice.reasons[1].endswith(", for messages wait for each other.")


def test_block_momentum_is_written_with_its_block():
    crawling = Cluster(Link(0.0, 1e6), software=Software(0.0, 0.0, 0.0, {"1bit": 1e-6}))
    advice = advised(crawling, Training(0.1, 1_000_000, rows=32, block_steps=100))
    last = advice.faster[-1]
    assert last.method.name == "block momentum"
    assert f"BlockMomentum({100 * 32 * last.workers})" in advice.reasons[-1]


def test_one_worker_is_told_to_stay_alone_and_where_nothing_keeps_to_the_target_it_says_so():
    advice = advised(Cluster(Link(10.0, 1.0)), counts=(1, 2))
    assert advice.chosen.workers == 1
    assert advice.reasons[0] == "Use 1 worker: 320 rows per second."
    advice = advised(Cluster(Link(10.0, 1.0)), counts=(2, 4))
    assert "Nothing keeps 0.70 on 2 workers or more." in advice.reasons


CLUSTERS = st.builds(
    Cluster,
    network=st.builds(Link, st.floats(0, 0.1), st.floats(1e5, 1e11)),
    per_host=st.integers(1, 8),
)


@given(CLUSTERS, st.floats(0.1, 1.0))
def test_less_change_costs_a_tenth(cluster, target):
    predictions = sweep(JOB, cluster, COUNTS)
    advice = advise(predictions, JOB, cluster, target)
    named = [advice.chosen, *advice.faster]
    assert [one.method.exact for one in named] == [True] + [False] * len(advice.faster)
    order = [method.name for method in METHODS]
    for chosen in named:
        assert chosen.efficiency >= target  # one worker keeps to any
        for one in (one for of in predictions for one in of):
            nearer = order.index(one.method.name) < order.index(chosen.method.name)
            if nearer and one.efficiency >= target:
                assert chosen.rows > one.rows


def test_tables_mark_what_changes_training():
    cluster = Cluster(Link(0.0, 1e9))
    table = by_title(sweep(JOB, cluster, (1, 2)))["efficiency"]
    marked = [name for name, *_ in table[1:] if name.endswith(" *")]
    assert marked == [f"{method.name} *" for method in METHODS if not method.exact]
    advice = advise(sweep(JOB, cluster, COUNTS), JOB, cluster, 0.7)
    assert notes(JOB, cluster, advice)[-1].startswith("* Training is no longer that of one process")


def test_hosts_and_servers_are_paid_for():
    price = 2.5
    cluster = Cluster(Link(0.0, 1e9), per_host=4, servers=3, price=price)
    dense = predict(METHODS[0], JOB, cluster, 9)
    (served,) = [m for m in METHODS if m.name == "servers, sync"]
    assert dense.price == pytest.approx(3 * price / 3600 * 1e6 / dense.rows)
    one = predict(served, JOB, cluster, 9)
    assert one.price == pytest.approx(6 * price / 3600 * 1e6 / one.rows)
