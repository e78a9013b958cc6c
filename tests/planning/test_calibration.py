"""A benchmark made of known numbers gives these numbers back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.bench.results import TELLING, BenchResults, Reading, task_of
from dtk.communicators.costs import ring_allreduce
from dtk.planning.calibration import calibrated
from dtk.planning.inputs import Cluster, Factors, Link, PlanError, Software, Training
from dtk.planning.plan_methods import METHODS

COST = {method.name: method.cost for method in METHODS}
PARAMETERS = 1_000_000
SENT = {"dense": 4e6, "fp16": 2e6, "1bit": 1.4e5}
CODES = {"1bit": SENT["1bit"]}


def once(seconds, sent=0.0):
    """One turn of one reading."""
    return [[Reading(seconds, sent, 0.5, 1.0, (seconds,))]]


def bench(job, software, workers, hosts=1):
    """What `dtk bench` would save where the formulas are the truth."""
    cluster = Cluster(Link(), per_host=workers, software=software)
    turns = {"mlp": {"limit": once(job.step)}}
    for name in SENT:
        cost = COST[name](job, cluster, workers)
        label = "none" if name == "dense" else name
        turns["mlp"][f"collective {label}"] = once(cost.seconds, cost.bytes)
    for size in TELLING:
        way = ring_allreduce(workers, size)
        took = way.messages * software.message + way.bytes * software.byte
        turns[task_of(size)] = {"collective allreduce": once(took)}
    ranks = [{"host": f"host{rank % hosts}", "cores": [rank]} for rank in range(workers)]
    setting = {"workers": workers, "batch_size": job.rows, "ranks": ranks}
    setting["communicators"] = ["collective"]
    return BenchResults(setting, {"mlp": PARAMETERS}, turns)


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e-4, 1e-2),
    st.floats(1e-10, 1e-7),
    st.floats(0, 1e-2),
    st.floats(0, 1e-7),
    st.integers(2, 8),
)
def test_what_went_in_comes_out(step, message, byte, overhead, coding, workers):
    job = Training(step, PARAMETERS, rows=16, sent=SENT)
    told = Software(message, byte, overhead, {"fp16": coding / 2, "1bit": coding})
    found = calibrated(bench(job, told, workers))
    assert found.job == job
    assert found.software.message == pytest.approx(message, rel=1e-3)
    assert found.software.byte == pytest.approx(byte, rel=1e-3)
    assert found.software.step == pytest.approx(overhead, abs=1e-6)
    for name in ("fp16", "1bit"):
        assert found.software.coding[name] == pytest.approx(told.coding[name], abs=1e-11)


@given(st.floats(0.01, 1.0))
def test_what_takes_less_than_computing_and_sending_is_hidden(part):
    job = Training(0.1, PARAMETERS, sent=SENT)
    told = Software(hidden=part)
    found = calibrated(bench(job, told, 2)).software
    assert (found.step, found.hidden) == (0.0, pytest.approx(part))


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e-10, 1e-7),
    st.floats(1e-13, 1e-11),
    st.floats(0.2, 1.0),
    st.integers(2, 4),
)
def test_factors_are_told_from_the_rest(step, byte, product, part, workers):
    kernels = Factors(entries=PARAMETERS * part, width=4000.0)
    job = Training(step, PARAMETERS, rows=8, sent=CODES, factors=kernels)
    told = Software(1e-3, byte, 0.0, {"fp16": 0.0, "1bit": 1e-8}, product)
    found = calibrated(bench(job, told, workers))
    assert found.job.factors.entries == pytest.approx(kernels.entries)
    assert found.job.factors.width == pytest.approx(kernels.width)
    assert found.job.sent == CODES
    assert found.software.step == 0.0
    assert found.software.product == pytest.approx(product, rel=1e-3)
    assert found.software.coding == pytest.approx(told.coding, abs=1e-11)


def test_without_fp16_all_that_is_sent_counts_as_factors():
    kernels = Factors(entries=float(PARAMETERS), width=4000.0)
    job = Training(0.1, PARAMETERS, rows=8, sent=CODES, factors=kernels)
    found = calibrated(without(bench(job, Software(), 2), "fp16"))
    assert found.job.factors == kernels


def test_each_communicator_has_numbers_of_its_own():
    job = Training(0.1, PARAMETERS, sent=SENT)
    results = bench(job, Software(), 2)
    other = bench(job, Software(message=9e-3), 2)
    for task, turns in other.turns.items():
        for name, of in turns.items():
            results.turns[task][name.replace("collective", "horovod")] = of
    results.setting["communicators"] = ["collective", "horovod"]
    found = [calibrated(results, communicator=name) for name in ("collective", "horovod")]
    assert [one.software.message for one in found] == pytest.approx([Software().message, 9e-3])
    with pytest.raises(PlanError, match="holds collective, horovod; choose one with --comm"):
        calibrated(results)


@pytest.mark.parametrize(("cores", "step"), [([[0], [1]], 0.35), ([[0, 1], [0, 1]], 0.3)])
def test_a_step_is_that_of_the_slowest_worker(cores, step):
    # On cores of their own, of each step; on shared ones, of all of them.
    results = bench(Training(0.1, PARAMETERS, sent=SENT), Software(), 2)
    turns = [[(0.1, 0.3), (0.4, 0.2)], [(0.2, 0.4), (0.4, 0.2)], [(0.1, 0.1), (0.1, 0.1)]]
    results.turns["mlp"]["limit"] = [
        [Reading(sum(steps) / 2, 0.0, 0.0, 1.0, steps) for steps in turn] for turn in turns
    ]
    for rank, own in zip(results.setting["ranks"], cores, strict=True):
        rank["cores"] = own
    assert calibrated(results).job.step == pytest.approx(step)


def test_workers_are_counted_by_host_and_blocks_that_were_measured_too_change_nothing():
    results = bench(Training(0.1, PARAMETERS, sent=SENT), Software(), workers=6, hosts=3)
    found = calibrated(results)
    assert (found.per_host, found.hosts) == (2, 3)
    results.turns["mlp"]["collective block:512"] = once(9.0, 9e6)
    assert calibrated(results) == found


def test_noise_makes_nothing_negative():
    results = bench(Training(0.1, PARAMETERS, sent=SENT), Software(), 2)
    for name in ("none", "fp16", "1bit"):
        results.turns["mlp"][f"collective {name}"] = once(0.09, SENT.get(name, 4e6))
    results.turns[task_of(4 << 20)]["collective allreduce"] = once(1e-9)
    found = calibrated(results).software
    assert min(found.message, found.byte, found.step, *found.coding.values()) >= 0


def without(results, exchange):
    del results.turns["mlp"][f"collective {exchange}"]
    return results


def rows_of_a_table(results):
    for name in ("none", "fp16"):
        results.turns["mlp"][f"collective {name}"] = once(0.1, 1e3)


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (vars, "vgg", "--model vgg: not in the benchmark, expected one of mlp"),
        (
            lambda results: results.turns.update(other=results.turns["mlp"]),
            None,
            "the benchmark holds mlp, other; choose one with --model",
        ),
        (lambda results: without(results, "none"), None, "gradients; add `--exchange none`"),
        (rows_of_a_table, None, "rows of tables, which nothing here describes"),
        (
            lambda results: results.turns.pop("allreduce 131072"),
            None,
            "holds no allreduce 131072 by collective; measure the model anew",
        ),
    ],
)
def test_what_cannot_be_planned_with_is_refused(change, model, message):
    results = bench(Training(0.1, PARAMETERS, sent=SENT), Software(), 2)
    change(results)
    with pytest.raises(PlanError, match=message):
        calibrated(results, model)
