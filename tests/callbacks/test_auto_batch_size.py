"""Trials choose the batch, alike on every rank, and leave nothing behind."""

from __future__ import annotations

import math

import pytest

from dtk.callbacks import AutoBatchSize

from callbacks import batch_size_bodies as bodies

two_ranks = pytest.mark.worlds(("collective", 2))


def check_trials(results):
    """Weights, optimizer, metrics and seeds; Python's and numpy's generators."""
    for left, within, trials in results:
        assert [size for size, *_ in left] == [8, 16]  # 8, 11, 16
        assert list(trials) == [8, 16]
        assert all(all(same) for _, *same in left)
        assert not any(any(same) for same in within), "the case must change all of it"
        assert trials == results[0][2]


@two_ranks
def test_a_trial_leaves_no_bit_changed(pool):
    check_trials(pool.run(bodies.tried, timeout=90))


def test_a_trial_leaves_no_bit_changed_on_two_devices(alone):
    check_trials(alone.run(bodies.tried, "mirrored", timeout=90))


@two_ranks
def test_trials_in_vain_change_nothing_of_training(pool):
    for with_trials, without in pool.run(bodies.searched_in_vain, timeout=90):
        assert with_trials == without


def test_trials_in_vain_change_nothing_in_one_process(alone):
    [(with_trials, without)] = alone.run(bodies.searched_in_vain, timeout=90)
    assert with_trials == without


@two_ranks
def test_the_batch_doubles_at_most_and_the_rate_with_it(pool):
    """With a rate so small that every size is as good as another."""
    for steps, rates, trials in pool.run(bodies.searched, 1e-6, "dataset", 3, timeout=90):
        assert steps == [12, 6, 3]
        assert rates == pytest.approx([1e-6, 2e-6, 4e-6])
        assert list(trials) == [8, 16, 24, 32]


def test_every_second_epoch_and_a_rate_left_alone(alone):
    [(steps, rates, _)] = alone.run(bodies.searched_seldom)
    assert steps == [12, 12, 6, 6, 3]
    assert rates == pytest.approx([1e-6] * 5)


def test_a_trial_trains_on_the_rows_the_epoch_begins_with(alone):
    [order] = alone.run(bodies.rows_of_a_trial)
    assert len(order) == 8
    assert order[3:5] == order[5:7]
    assert order[5:] != order[:3], "epochs must be shuffled apart"


def test_what_is_no_number_is_bad(alone):
    [(steps, rates, trials)] = alone.run(bodies.searched, 1e30, "arrays", 2)
    assert steps == [12] * 2
    assert list(trials) == [8]
    assert not math.isfinite(trials[8])


@pytest.mark.parametrize("form, left", [("arrays", 3), ("shuffled", 4)])
def test_a_resumed_run_has_the_size_it_had(alone, tmp_path, form, left):
    """Saved in the midst of the second epoch, of 6 steps, which began with a search.

    A dataset breaks when the trials' passes over it, each shuffled anew, are not passed again.
    """
    [(whole, again)] = alone.run(bodies.searched_and_resumed, str(tmp_path), form, timeout=90)
    assert whole[0] == [12, 6, 3]
    assert again[0] == [left, 3]
    assert again[1] == pytest.approx(whole[1][1:])
    assert again[2] == pytest.approx(whole[2], rel=1e-6)


@two_ranks
def test_what_cannot_work_is_refused_before_the_first_step(pool):
    for answers in pool.run(bodies.search_refused):
        for (kind, text), told in zip(
            answers,
            [
                "give batch_size=",
                "computes its own",
                "AutoBatchSize and BatchSizeSchedule would set the same batch size",
            ],
            strict=True,
        ):
            assert kind == "ValueError"
            assert told in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"frequency": 0}, "frequency must be an integer of at least 1, got 0"),
        ({"trial_batches": 0.5}, "trial_batches must be"),
        ({"multiple": 0}, "multiple must be"),
        ({"margin": -1}, "margin must be 0 or more"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        AutoBatchSize(**arguments)
