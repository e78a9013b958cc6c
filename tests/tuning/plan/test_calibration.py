"""A benchmark made of known numbers gives these numbers back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.tuning.bench.results import Reading, Results
from dtk.tuning.plan.calibration import calibrated
from dtk.tuning.plan.methods import METHODS
from dtk.tuning.plan.quantity import PlanError
from dtk.tuning.plan.setting import Cluster, Job, Link, Software
from dtk.tuning.plan.traffic import ring_allreduce

COST = {method.name: method.cost for method in METHODS}
PARAMETERS = 1_000_000
SENT = {"dense": 4e6, "fp16": 2e6, "1bit": 1.4e5}


def bench(job, software, workers, hosts=1):
    """What `dtk bench` would save where the formulas are the truth."""
    cluster = Cluster(Link(), per_host=workers, software=software)
    seconds = {name: COST[name](job, cluster, workers).seconds for name in SENT}
    turns = {"limit": [[Reading(job.step, 0.0, 0.0, 1.0)]]}
    for name, sent in SENT.items():
        turns["none" if name == "dense" else name] = [[Reading(seconds[name], sent, 0.5, 1.0)]]
    allreduces = {}
    for size in (4096, 4 << 20):
        way = ring_allreduce(workers, size)
        allreduces[size] = [way.messages * software.message + way.bytes * software.byte]
    ranks = [{"host": f"host{rank % hosts}"} for rank in range(workers)]
    setting = {"workers": workers, "batch_size": job.rows, "ranks": ranks}
    return Results(setting, {"mlp": PARAMETERS}, {"mlp": turns}, allreduces)


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e-4, 1e-2),
    st.floats(1e-10, 1e-7),
    st.floats(0, 1e-2),
    st.floats(0, 1e-7),
    st.integers(2, 8),
)
def test_what_went_in_comes_out(step, message, byte, overhead, coding, workers):
    job = Job(step, PARAMETERS, rows=16, sent=SENT)
    told = Software(message, byte, overhead, {"fp16": coding / 2, "1bit": coding})
    found = calibrated(bench(job, told, workers))
    assert found.job == job
    assert found.software.message == pytest.approx(message, rel=1e-3)
    assert found.software.byte == pytest.approx(byte, rel=1e-3)
    assert found.software.step == pytest.approx(overhead, abs=1e-6)
    for name in ("fp16", "1bit"):
        assert found.software.coding[name] == pytest.approx(told.coding[name], abs=1e-11)


def test_a_step_is_that_of_the_slowest_worker():
    results = bench(Job(0.1, PARAMETERS, sent=SENT), Software(), 2)
    turns = [(0.1, 0.4), (0.3, 0.1), (0.1, 0.1)]
    results.turns["mlp"]["limit"] = [
        [Reading(seconds, 0.0, 0.0, 1.0) for seconds in turn] for turn in turns
    ]
    assert calibrated(results).job.step == 0.3


def test_workers_are_counted_by_host():
    job = Job(0.1, PARAMETERS, sent=SENT)
    found = calibrated(bench(job, Software(), workers=6, hosts=3))
    assert (found.per_host, found.hosts) == (2, 3)


def test_noise_makes_nothing_negative():
    results = bench(Job(0.1, PARAMETERS, sent=SENT), Software(), 2)
    for name in ("none", "fp16", "1bit"):
        results.turns["mlp"][name] = [[Reading(0.09, SENT.get(name, 4e6), 0.5, 1.0)]]
    results.allreduces[4 << 20] = [1e-9]
    found = calibrated(results).software
    assert min(found.message, found.byte, found.step, *found.coding.values()) >= 0


def without(results, contender):
    del results.turns["mlp"][contender]
    return results


def rows_of_a_table(results):
    results.turns["mlp"]["none"] = [[Reading(0.1, 1e3, 0.5, 1.0)]]
    return results


def two_models(results):
    results.turns["other"] = results.turns["mlp"]
    return results


def before_allreduces(results):
    results.allreduces.clear()
    return results


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (lambda r: r, "vgg", "--model vgg: not in the benchmark, expected one of mlp"),
        (two_models, None, "the benchmark holds mlp, other; choose one with --model"),
        (lambda r: without(r, "none"), None, "without whole gradients; add `--exchange none`"),
        (rows_of_a_table, None, "rows of tables, which nothing here describes"),
        (before_allreduces, None, "holds no all-reduces; run `dtk bench --json` anew"),
    ],
)
def test_what_cannot_be_planned_with_is_refused(change, model, message):
    results = change(bench(Job(0.1, PARAMETERS, sent=SENT), Software(), 2))
    with pytest.raises(PlanError, match=message):
        calibrated(results, model)
