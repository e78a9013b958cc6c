"""What is sent for a division, between whom, and the simulated step: rules for every model."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.model_chains import workloads

from dtk.communicators.costs import Traffic
from dtk.planning.inputs import PAYLOAD, Cluster, Link, Software
from dtk.planning.model.layer_costs import LayerCosts
from dtk.planning.model.search import additive, same_splits
from dtk.planning.model.split_steps import LINK, step
from dtk.planning.model.stage_steps import SCHEDULES, StageCosts, Stages, cuts
from dtk.planning.model.timeline import Task, critical_path, simulate
from dtk.planning.model.topology import Grid, busiest, grids, group

GRIDS = st.sampled_from([Grid(1, 2), Grid(2, 2), Grid(1, 4), Grid(3, 1)])
PARTS = st.floats(0, 1)
few = settings(max_examples=20)


def choice_of(data, costs_of):
    """Any choice of splits that `parallelize` would make."""
    count = range(len(costs_of.workload.operators))
    return costs_of.settled([data.draw(st.sampled_from(costs_of.splits(one))) for one in count])


@few
@given(workload=workloads())
def test_one_worker_takes_what_its_layers_take_and_sends_nothing(workload):
    alone = same_splits(workload, Grid(1, 1))
    layers = [
        workload.computing.seconds_of_row[one.name, "whole"]
        for one in workload.operators
        if not one.is_input
    ]
    update = workload.weights * workload.computing.update
    backward = sum(
        both[1]
        for one, both in zip(workload.operators[1:], layers, strict=True)
        if one.weights or one.differentiated
    )
    forward = sum(both[0] for both in layers)
    assert alone.seconds == pytest.approx(workload.batch * (forward + backward) + update)
    assert alone.step.sent == 0
    assert all(layer.sends.waited_for == Traffic() for layer in alone.step.layers)
    assert not any(task.seconds for task in alone.step.tasks if task.resource == LINK)


@few
@given(workload=workloads(residual=True, hidden=PARTS), grid=GRIDS, data=st.data())
def test_a_step_is_no_shorter_than_its_longest_chain_nor_than_what_one_rank_does(
    workload, grid, data
):
    costs_of = LayerCosts(workload, grid)
    tasks = step(costs_of, choice_of(data, costs_of)).tasks
    assert_possible(tasks)


@few
@given(workload=workloads(), data=st.data())
def test_nor_is_that_of_a_pipeline(workload, data):
    places = cuts(workload)
    many = data.draw(st.integers(1, 6))
    begins = (0, *places[: data.draw(st.integers(0, 2))])
    stages = Stages(begins, many, data.draw(st.sampled_from(SCHEDULES)))
    made = StageCosts(workload, Grid(1, len(begins))).step(stages)
    took = assert_possible(made.tasks)
    assert took >= max(made.computing) * 0.999
    if many == 1:  # nothing to overlap
        assert took >= sum(made.computing) * 0.999
    passes = [task for task in made.tasks if task.name.startswith("stage ")]
    passes = [task for task in passes if not task.name.endswith("sent")]
    assert len(passes) == 2 * many * len(begins)


def assert_possible(tasks):
    line = simulate(tasks)
    assert line.seconds >= critical_path(tasks) * 0.999
    for resource in {task.resource for task in tasks}:
        own = [
            (end - task.seconds, end)
            for task, end in zip(tasks, line.ends, strict=True)
            if task.resource == resource and task.seconds
        ]
        assert line.seconds >= sum(end - begin for begin, end in own) * 0.999
        own.sort()
        assert all(
            first[1] <= second[0] + 1e-9 for first, second in zip(own, own[1:], strict=False)
        )
    for task, end in zip(tasks, line.ends, strict=True):
        assert all(line.ends[one] <= end - task.seconds + 1e-9 for one in task.after)
    return line.seconds


@few
@given(
    workload=workloads(), grid=st.sampled_from([Grid(1, 2), Grid(2, 1), Grid(2, 2)]), data=st.data()
)
def test_where_nothing_overlaps_costs_add_up(workload, grid, data):
    """What dynamic programming minimizes is what is simulated, but for messages of replicas."""
    costs_of = LayerCosts(workload, grid)
    splits = choice_of(data, costs_of)
    messages = costs_of.data.allreduce(
        4 * sum(layer.held for layer in step(costs_of, splits).layers)
    ).messages
    expected = additive(costs_of, splits) + messages * costs_of.data.message
    assert simulate(step(costs_of, splits).tasks).seconds == pytest.approx(expected)


@few
@given(workload=workloads(hidden=st.just(1.0)), grid=GRIDS)
def test_what_a_backward_pass_hides_is_at_most_all_but_the_last_bucket(workload, grid):
    shown = same_splits(with_hidden(workload, 0.0), grid).seconds
    hidden = same_splits(workload, grid).seconds
    assert hidden <= shown * 1.001
    costs_of = LayerCosts(workload, grid)
    traffic = costs_of.data.allreduce(4 * workload.weights)
    assert hidden >= shown - costs_of.data.seconds(traffic) * 1.001


def with_hidden(workload, hidden):
    software = dataclasses.replace(workload.cluster.software, hidden=hidden)
    return dataclasses.replace(
        workload, cluster=dataclasses.replace(workload.cluster, software=software)
    )


def test_a_task_that_waits_for_a_later_one_is_refused():
    with pytest.raises(ValueError, match="task 0 .first. waits for"):
        simulate([Task("first", ("compute", 0), 1.0, (1,)), Task("b", ("compute", 0), 1.0, ())])


@given(st.integers(1, 64), st.integers(1, 64))
def test_grids_are_all_factorisations_in_which_replicas_have_rows(workers, batch):
    found = grids(workers, batch)
    assert all(grid.size == workers for grid in found)
    assert [grid.data for grid in found] == [
        n for n in range(workers, 0, -1) if workers % n == 0 and n <= batch
    ]
    for grid in found:
        ranks = list(range(workers))
        assert sorted(sum(grid.models(), [])) == sorted(sum(grid.replicas(), [])) == ranks
        assert math.ceil(batch / grid.data) == grid.rows(batch)


def test_rings_of_ranks_beside_each_other_share_a_host_s_link():
    """Four hosts of two: models stay within hosts, and both rings of replicas leave each."""
    grid = Grid(4, 2)
    assert busiest(grid.models(), 2) == 0
    assert busiest(grid.replicas(), 2) == 2
    software = Software(message=1e-3, byte=1e-9)
    cluster = Cluster(Link(2e-3, 1e8 / PAYLOAD), Link(0, 1e9 / PAYLOAD), 2, software=software)
    inside, between = group(grid.models(), cluster), group(grid.replicas(), cluster)
    assert (inside.message, inside.byte) == pytest.approx((1e-3, 1e-9))
    assert (between.message, between.byte) == pytest.approx((3e-3, 2e-8))
