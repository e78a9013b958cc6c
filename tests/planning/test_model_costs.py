"""What is sent for a division, between whom, and what a step takes: rules for every model."""


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.model_chains import workloads

from dtk.communicators.costs import Traffic
from dtk.planning.inputs import PAYLOAD, Cluster, Link, Software
from dtk.planning.model.layer_costs import FLOAT, LayerCosts, RankGrid
from dtk.planning.model.search import choose, judge, pipeline, same_splits

GRIDS = st.sampled_from([RankGrid(1, 2), RankGrid(2, 2), RankGrid(1, 4), RankGrid(3, 1)])
few = settings(max_examples=20)


@few
@given(workload=workloads())
def test_one_worker_takes_what_its_layers_take_and_sends_nothing(workload):
    alone = same_splits(workload, RankGrid(1, 1))
    layers = [
        workload.computing.seconds_of_row[one.name, "whole"]
        for one in workload.operators
        if one.sources
    ]
    update = workload.weights * workload.computing.update
    assert alone.plan.seconds == pytest.approx(workload.batch * sum(layers) + update)
    assert alone.plan.sent == 0
    assert all(layer.traffic == Traffic() for layer in alone.layers)


@few
@given(workload=workloads(residual=True), grid=GRIDS, data=st.data())
def test_a_step_is_what_a_rank_computes_sends_and_updates(workload, grid, data):
    costs_of = LayerCosts(workload, grid)
    ways = st.sampled_from(["whole", "output", "input", "rows"])
    found = judge(costs_of, [data.draw(ways) for _ in workload.operators])
    computing = sum(layer.computing for layer in found.layers)
    within = sum(costs_of.model.seconds(layer.traffic) for layer in found.layers)
    held = sum(layer.held for layer in found.layers)
    update = held * workload.computing.update
    assert found.plan.seconds == pytest.approx(computing + within + found.gradients + update)
    if set(found.splits) == {"whole"}:
        whole = costs_of.data.allreduce(FLOAT * workload.weights)
        assert found.gradients == pytest.approx(costs_of.data.seconds(whole))
        assert found.plan.sent == pytest.approx(whole.bytes)


@few
@given(workload=workloads(residual=True), grid=GRIDS, data=st.data())
def test_what_works_on_each_element_is_divided_as_its_inputs_are(workload, grid, data):
    ways = st.sampled_from(["whole", "output", "rows"])
    found = judge(LayerCosts(workload, grid), [data.draw(ways) for _ in workload.operators])
    for operator, split in zip(workload.operators, found.splits, strict=True):
        if operator.follows:
            held = {found.splits[source] for source in operator.sources}
            possible = held == {"rows"} and "rows" in operator.splits(grid.model)
            assert split == ("rows" if possible else "whole")


@few
@given(workload=workloads(), data=st.data())
def test_a_pipeline_takes_no_less_than_any_of_its_stages_and_than_one_microbatch(workload, data):
    places = list(workload.cuts)
    many = data.draw(st.integers(1, 6))
    begins = (0, *places[: data.draw(st.integers(0, 2))])
    made = pipeline(LayerCosts(workload, RankGrid(1, len(begins))), begins, many)
    assert made.plan.seconds >= max(made.computing) * 0.999
    assert made.plan.seconds >= sum(made.computing) / many * 0.999
    if many == 1:  # nothing to overlap
        assert made.plan.seconds >= sum(made.computing) * 0.999
    fewer = pipeline(LayerCosts(workload, RankGrid(1, len(begins))), begins, many, "1f1b").plan
    assert fewer.seconds == made.plan.seconds and fewer.memory <= made.plan.memory


@few
@given(workload=workloads(most=3), workers=st.sampled_from([1, 2, 4, 6]))
def test_every_grid_on_which_ranks_have_parts_is_a_candidate(workload, workers):
    found = {one.grid for one in choose(workload, workers).candidates}
    assert RankGrid(workers, 1) in found or workers > workload.batch
    assert all(grid.data * grid.model == workers for grid in found)
    assert all(grid.data <= workload.batch for grid in found)


def test_rings_of_ranks_beside_each_other_share_a_host_s_link():
    """Four hosts of two: models stay within hosts, and both rings of replicas leave each."""
    software = Software(message=1e-3, byte=1e-9)
    cluster = Cluster(Link(2e-3, 1e8 / PAYLOAD), Link(0, 1e9 / PAYLOAD), 2, software=software)
    message, byte = Traffic(1, 0), Traffic(0, 1)
    inside, between = RankGrid(4, 2).groups(cluster)
    assert (inside.seconds(message), inside.seconds(byte)) == pytest.approx((1e-3, 1e-9))
    assert (between.seconds(message), between.seconds(byte)) == pytest.approx((3e-3, 2e-8))
    across, alike = RankGrid(2, 4).groups(cluster)
    assert (across.seconds(message), across.seconds(byte)) == pytest.approx((3e-3, 1e-8))
    assert (alike.size, alike.seconds(byte)) == (2, pytest.approx(2e-8))
    assert [one.seconds(message) for one in RankGrid(1, 2).groups(cluster)] == [1e-3, 1e-3]
