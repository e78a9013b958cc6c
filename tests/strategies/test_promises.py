"""What dtk promises besides equality with one process."""

from __future__ import annotations

import numpy as np
import pytest

from once import once
from strategies import promises

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])
SEVERAL = pytest.mark.parametrize(
    "backend, size", [("collective", 2), ("horovod-mpi", 2), ("collective", 3)]
)


@SEVERAL
@pytest.mark.parametrize("seed", [5, None])
def test_every_row_is_seen_once_an_epoch(world, backend, size, seed):
    """Breaks when ranks shuffle apart, or, without a seed, when epochs repeat one order."""
    ranks = world(backend, size).run(promises.order_of_rows, seed)
    orders = []
    for epoch in range(2):
        steps = [[row for rank in ranks for row in rank[epoch][step]] for step in range(5)]
        orders.append([row for step in steps for row in step])
        assert sorted(orders[-1]) == list(range(23))
        assert orders[-1] != sorted(orders[-1]), "not shuffled"
    assert (orders[0] == orders[1]) == (seed is not None)


@SEVERAL
def test_ranks_that_start_apart_train_together(world, backend, size):
    results = world(backend, size).run(promises.starts_apart)
    for before, after, weights in results:
        assert before, "the test needs different weights to begin with"
        assert after == []
        for mine, first in zip(weights, results[0][2], strict=True):
            np.testing.assert_array_equal(mine, first)


@SEVERAL
def test_single_batches_train_all_ranks_from_rank_0s_weights(world, backend, size):
    """Breaks when only `fit` makes ranks start equal."""
    for differing, mine, plain in world(backend, size).run(promises.weights_of_rank_0_alone):
        assert differing == []
        assert np.linalg.norm(mine - plain) <= 2e-5 * np.linalg.norm(plain)


@TWO
def test_a_model_more_on_rank_0_changes_nothing(world, backend, size):
    """Breaks as ranks that disagree on the names of variables, which are numbered by process."""
    (names, mine), (other_names, other) = world(backend, size).run(
        promises.one_model_more_on_rank_0
    )
    assert names != other_names, "the case needs names that differ"
    np.testing.assert_array_equal(mine, other)


@TWO
def test_dropout_masks_differ_by_rank_and_repeat_with_the_seed(world, backend, size):
    first, second = world(backend, size).run(promises.dropout_masks)
    assert first[0] != second[0]
    assert first[0] == first[1] and second[0] == second[1]


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_dropout_masks_differ_by_device(world, backend, size):
    ((masks, again),) = world(backend, size).run(promises.dropout_masks, 2)
    assert masks[0] != masks[1]
    assert masks == again


@pytest.mark.parametrize("backend, size", [("collective", 2), ("collective", 3)])
def test_statistics_that_are_not_synchronized_stay_equal_and_finite(world, backend, size):
    results = world(backend, size).run(promises.local_normalisation)
    for statistics, weights in results:
        for value, first in zip(statistics, results[0][0], strict=True):
            assert np.all(np.isfinite(value)), "an empty slice got into the statistics"
            np.testing.assert_array_equal(value, first)
        assert all(np.all(np.isfinite(w)) for w in weights)


@TWO
def test_mixed_precision(world, backend, size):
    """float16 rounds at 5e-4, and ranks add their halves in another order."""
    for weights, plain in world(backend, size).run(promises.half_precision):
        assert np.linalg.norm(weights - plain) <= 5e-3 * np.linalg.norm(plain)


@pytest.mark.parametrize("backend, size", [("collective", 2), ("horovod-gloo", 2), ("local", 1)])
def test_custom_loops(world, backend, size):
    devices = 2 if backend == "local" else 0
    results = world(backend, size).run(promises.own_loop, devices)
    plain, losses, _ = once(promises.own_loop_plain)
    for weights, reduced, replicas in results:
        assert replicas == 2
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)
        np.testing.assert_allclose(reduced, losses, rtol=1e-5)


@pytest.mark.parametrize(
    "backend, size, pipelines",
    [("collective", 2, False), ("collective", 2, True), ("local", 1, False)],
)
def test_custom_loops_inside_a_function(world, backend, size, pipelines):
    """Breaks when a distributed dataset cannot be an argument, or `for` takes it apart in Python.

    Traced again for every epoch, or a batch at a time, it would also be slow.
    """
    devices = 2 if backend == "local" else 0
    results = world(backend, size).run(promises.own_loop_in_a_function, pipelines, devices)
    plain, losses, _ = once(promises.own_loop_in_a_function_plain, pipelines)
    for weights, reduced, traced in results:
        assert traced == 1
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)
        np.testing.assert_allclose(reduced, losses, rtol=1e-5)


@TWO
def test_pipelines_per_worker_weigh_rows_exactly(world, backend, size):
    plain, history = promises.own_pipelines_plain()
    for weights, logged in world(backend, size).run(promises.own_pipelines):
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)
        for name, values in history.items():
            np.testing.assert_allclose(logged[name], values, rtol=1e-5)


@TWO
def test_nothing_stays_patched(world, backend, size):
    assert world(backend, size).run(promises.nothing_left_patched) == [(True, False)] * 2


@TWO
def test_accumulation_reduces_once_per_window(world, backend, size):
    for (every_step, every_window), gradient_bytes in world(backend, size).run(
        promises.one_reduction_per_window
    ):
        # Three of four gradient reductions are gone; metric state still travels every step.
        assert every_step - every_window == pytest.approx(3 * gradient_bytes, rel=0.05)


@TWO
@pytest.mark.parametrize(
    "given", ["a callback of the script's own", "a callback on one rank alone", "a function"]
)
def test_one_rank_that_stops_in_an_epoch_stops_all_at_that_step(world, backend, size, given):
    """Breaks when wishes are compared at the end of an epoch only: the ranks are then at different
    steps, and one waits in a sum for what the other will never send.
    """
    results = world(backend, size).run(promises.stopped_by, given, timeout=30)
    for seen, steps, epochs, weights in results:
        assert seen in (3, None) and steps == 3 and epochs == 1
        np.testing.assert_array_equal(weights, results[0][3])
    assert results[-1][0] == 3


@TWO
def test_mirrored_strategy_in_a_job_of_several_processes_warns(world, backend, size):
    """Without a word every process would train a model of its own, on all of the data."""
    for rank, warned in enumerate(world(backend, size).run(promises.mirrored_in_this_job)):
        ((kind, text, file),) = warned
        assert kind == "RuntimeWarning"
        assert f"rank {rank}: MirroredStrategy" in text and "the job has 2 processes" in text
        assert "use dtk.auto_strategy() or AllReduceStrategy()" in text
        assert file == promises.__file__, "the warning must point at the script's own line"


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_mirrored_strategy_in_a_process_of_its_own_does_not_warn(world, backend, size):
    assert world(backend, size).run(promises.mirrored_in_this_job) == [[]]


@TWO
def test_only_rank_0_draws_progress(world, backend, size):
    first, second = world(backend, size).run(promises.output_of_fit)
    assert first.count("step") >= 3
    assert second == ""
