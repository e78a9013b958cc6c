"""The search: against trying everything, with too little memory, and twice."""

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning.model_chains import Table, workloads

from dtk.planning.inputs import Cluster, Link, PlanError, Software
from dtk.planning.model import search
from dtk.planning.model.layer_costs import LayerCosts, Operator, RankGrid, Workload
from dtk.planning.model.search import (
    best_splits,
    best_stages,
    choose,
    judge,
    pipeline,
    same_splits,
)

GRIDS = st.sampled_from([RankGrid(1, 2), RankGrid(2, 2)])
few = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])


def everything(workload, grid):
    """Return all choices of splits."""
    costs_of = LayerCosts(workload, grid)
    options = itertools.product(*(one.splits(grid.model) for one in workload.operators))
    return [judge(costs_of, one).plan for one in options]


@few
@given(workload=workloads(most=4, residual=True), grid=GRIDS)
def test_dynamic_programming_finds_the_shortest_step(workload, grid):
    best = min(plan.seconds for plan in everything(workload, grid))
    assert best_splits(workload, grid).plan.seconds == pytest.approx(best)


@few
@given(workload=workloads(most=4, residual=True), grid=GRIDS, data=st.data())
def test_what_is_found_is_the_fastest_that_fits_into_memory(workload, grid, data):
    plans = everything(workload, grid)
    most = data.draw(st.sampled_from([plan.memory for plan in plans]))
    limited = dataclasses.replace(workload, most_memory=most)
    best = min(plan.seconds for plan in plans if plan.memory <= most)
    found = best_splits(limited, grid).plan
    assert found.memory <= most and found.seconds == pytest.approx(best)
    least = min(plan.memory for plan in plans)
    starved = dataclasses.replace(workload, most_memory=0.5 * least)
    assert best_splits(starved, grid).plan.memory == pytest.approx(least)


@few
@given(workload=workloads(most=6), grid=GRIDS, data=st.data())
def test_stages_are_the_best_of_all_cuts(workload, grid, data):
    costs_of = LayerCosts(workload, grid)
    count = len(workload.operators)
    every = [
        pipeline(costs_of, (0, begin), many, schedule).plan
        for begin in workload.cuts
        if any(one.weights for one in workload.operators[:begin])
        and any(one.weights for one in workload.operators[begin:count])
        for many in (1, 2, 4, 8, 16)
        if many <= costs_of.rows
        for schedule in ("gpipe", "1f1b")
    ]
    found = best_stages(workload, grid)
    assert (found is None) is (not every)
    if found is not None:
        assert found.plan.seconds == pytest.approx(min(plan.seconds for plan in every))
        most = data.draw(st.sampled_from([plan.memory for plan in every]))
        limited = best_stages(dataclasses.replace(workload, most_memory=most), grid).plan
        best = min(plan.seconds for plan in every if plan.memory <= most)
        assert limited.memory <= most and limited.seconds == pytest.approx(best)
        assert found.plan.schedule == "gpipe"  # 1F1B is for want of memory


def test_of_many_places_to_cut_those_with_computing_between_are_tried(monkeypatch):
    workload = chain([1e-3, 1e-3, 1e-9, 1e-9, 1e-3, 1e-3], update=0.0)
    every = best_stages(workload, RankGrid(1, 2))
    monkeypatch.setattr(search, "_CUTS", 3)
    few_cuts = best_stages(workload, RankGrid(1, 2))
    assert few_cuts.plan.seconds == pytest.approx(every.plan.seconds, rel=1e-3)


@few
@given(workload=workloads(most=6, residual=True))
def test_equal_workloads_give_equal_plans_and_no_grid_is_left_out(workload):
    first, again = (choose(workload, 4) for _ in range(2))
    assert first.best.plan == again.best.plan
    names = {str(one.grid) for one in first.candidates}
    assert "4 x 1" in names and names <= {"4 x 1", "2 x 2", "1 x 4"}
    for grid in (RankGrid(2, 2), RankGrid(1, 4)):
        found = best_splits(workload, grid)
        assert str(grid) in names or set(found.splits) == {"whole"}
        assert found.plan.seconds <= same_splits(workload, grid, "rows").plan.seconds * 1.0001
    assert all(one.divides for one in first.candidates)
    assert first.best.plan.seconds == min(one.plan.seconds for one in first.candidates)


@few
@given(workload=workloads())
def test_too_little_memory_for_every_plan_is_named(workload):
    with pytest.raises(PlanError, match=r"--memory 1e-06 MB: of \d+ plans for 2 workers the one"):
        choose(dataclasses.replace(workload, most_memory=1.0), 2)


def chain(seconds_of_row, update):
    """Return layers of weights that normalize, one behind the other."""
    operators = [Operator("x", (), (), (4,), differentiated=False)]
    for number in range(len(seconds_of_row)):
        operators.append(
            Operator(
                f"norm{number}",
                (number,),
                ((4,),),
                (4,),
                weights=8,
                differentiated=number > 0,
                batch_statistics=True,
            )
        )
    seconds = {(f"norm{n}", "whole"): one for n, one in enumerate(seconds_of_row)}
    cluster = Cluster(Link(), per_host=2, software=Software(message=0.0, byte=1e-12))
    ends = (len(operators) - 1,)
    return Workload(operators, ends, 32, Table(seconds, update=update), cluster)


def test_an_inexact_plan_must_be_a_tenth_faster():
    """A pipeline with BatchNormalization trains otherwise, if it has several microbatches.

    The more an update takes, the more it is worth that stages share weights.
    """
    close, far = (choose(chain([3e-3] * 4, update), 2) for update in (1.5e-3, 1e-2))
    fastest = min(close.candidates, key=lambda one: one.plan.seconds)
    assert close.best.exact and not fastest.exact
    assert close.best.plan.seconds < 1.1 * fastest.plan.seconds
    assert not far.best.exact and far.data.plan.seconds > 1.1 * far.best.plan.seconds
