"""The search: against trying everything, with too little memory, and twice."""

import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning.model_chains import Table, workloads

from dtk.planning.inputs import Cluster, Link, Software
from dtk.planning.model.candidates import choose
from dtk.planning.model.layer_costs import LayerCosts, Workload
from dtk.planning.model.operators import Operator
from dtk.planning.model.search import (
    Budget,
    additive,
    additive_best,
    best_splits,
    best_stages,
    same_splits,
)
from dtk.planning.model.split_steps import step
from dtk.planning.model.stage_steps import SCHEDULES, StageCosts, Stages, cuts
from dtk.planning.model.timeline import simulate
from dtk.planning.model.topology import Grid
from dtk.planning.quantity import PlanError

GRIDS = st.sampled_from([Grid(1, 2), Grid(2, 2)])
few = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])


def everything(workload, grid):
    costs_of = LayerCosts(workload, grid)
    count = range(len(workload.operators))
    options = itertools.product(*(costs_of.splits(position) for position in count))
    return costs_of, {costs_of.settled(one) for one in options}


@few
@given(workload=workloads(most=4, residual=True), grid=GRIDS)
def test_dynamic_programming_finds_the_least_sum(workload, grid):
    costs_of, choices = everything(workload, grid)
    found, splits = additive_best(costs_of)
    assert found == pytest.approx(additive(costs_of, splits))
    assert found == pytest.approx(min(additive(costs_of, one) for one in choices))


@few
@given(workload=workloads(most=3, hidden=st.floats(0, 1)), grid=GRIDS)
def test_the_search_finds_the_shortest_step(workload, grid):
    costs_of, choices = everything(workload, grid)
    best = min(simulate(step(costs_of, one).tasks).seconds for one in choices)
    tried = best_splits(workload, grid, Budget(all_of=10**6))
    searched = best_splits(workload, grid, Budget(tries=100, all_of=0))
    assert tried.seconds == pytest.approx(best)
    assert searched.seconds == pytest.approx(best, rel=0.01)


@few
@given(workload=workloads(most=4), grid=GRIDS, data=st.data())
def test_what_is_found_fits_into_memory_where_anything_does(workload, grid, data):
    costs_of, choices = everything(workload, grid)
    needs = sorted(step(costs_of, one).memory for one in choices)
    most = data.draw(st.sampled_from(needs))
    limited = dataclasses.replace(workload, most_memory=most)
    assert best_splits(limited, grid, Budget(tries=50, all_of=10**6)).step.memory <= most
    simple = min(same_splits(workload, grid, way).step.memory for way in ("whole", "output"))
    assert best_splits(limited, grid, Budget(tries=50, all_of=0)).step.memory <= max(most, simple)


@few
@given(workload=workloads(most=6), grid=GRIDS)
def test_stages_are_the_best_of_all_cuts(workload, grid):
    found = best_stages(workload, grid)
    costs_of = StageCosts(workload, grid)
    rows = costs_of.rows(1)
    borders = [
        begin
        for begin in cuts(workload)
        if costs_of.weights(0, begin) and costs_of.weights(begin, len(workload.operators))
    ]
    every = [
        simulate(costs_of.step(Stages((0, begin), many, schedule)).tasks).seconds
        for begin in borders
        for many in (1, 2, 4, 8, 16)
        if many <= rows
        for schedule in SCHEDULES
    ]
    assert (found is None) is (not every)
    if found is not None:
        assert found.seconds == pytest.approx(min(every))


@few
@given(workload=workloads(most=6, residual=True))
def test_equal_seeds_give_equal_plans_and_no_grid_is_left_out(workload):
    budget = Budget(tries=20, all_of=0)
    first, again = (choose(workload, 4, budget) for _ in range(2))
    assert first.best.plan(workload) == again.best.plan(workload)
    names = {str(one.grid) for one in first.candidates}
    assert "4 x 1" in names and names <= {"4 x 1", "2 x 2", "1 x 4"}
    for grid in (Grid(2, 2), Grid(1, 4)):
        found = best_splits(workload, grid, budget)
        assert str(grid) in names or set(found.splits) == {"whole"}
    assert all(one.divides for one in first.candidates)
    assert first.best.seconds == min(one.seconds for one in first.candidates)


@few
@given(workload=workloads())
def test_too_little_memory_for_every_plan_is_named(workload):
    with pytest.raises(PlanError, match=r"--memory 1e-06 MB: of \d+ plans for 2 workers the one"):
        choose(dataclasses.replace(workload, most_memory=1.0), 2, Budget(tries=5))


def test_an_inexact_plan_must_be_a_tenth_faster():
    """A pipeline with BatchNormalization trains otherwise, if it has several microbatches."""
    chain = [Operator("x", "InputLayer", (), (), (4,), differentiated=False)]
    for number in range(4):
        chain.append(
            Operator(
                f"norm{number}",
                "BatchNormalization",
                (number,),
                ((4,),),
                (4,),
                weights=8,
                differentiated=number > 0,
                batch_statistics=True,
            )
        )
    seconds = {(one.name, "whole"): (1e-3, 2e-3) for one in chain}

    def chosen(update):
        """The more an update takes, the more it is worth that stages share weights."""
        software = Software(message=0.0, byte=1e-12)
        computing = Table(seconds, update=update)
        workload = Workload(
            chain, (4,), 32, computing, Cluster(Link(), per_host=2, software=software)
        )
        return choose(workload, 2)

    close, far = chosen(1.5e-3), chosen(1e-2)
    fastest = min(close.candidates, key=lambda one: one.seconds)
    assert close.best.exact and not fastest.exact
    assert close.best.seconds < 1.1 * fastest.seconds
    assert not far.best.exact and far.data.seconds > 1.1 * far.best.seconds
