"""Evaluations after exactly so many samples, which leave no trace in training."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.callbacks import CrossValidation, HalveRate
from dtk.callbacks.halve_rate import gains_enough

from callbacks import evaluation_bodies as bodies

two_ranks = pytest.mark.worlds(("collective", 2))

# Samples after each step of two epochs of 37 rows, and steps at which a multiple of 20 is complete.
BY_8 = [8, 16, 24, 32, 37, 45, 53, 61, 69, 74]  # 20 at step 3, 40 at 6, 60 at 8
BY_8_THEN_16 = [8, 16, 24, 32, 37, 53, 69, 74]  # 20 at step 3, 40 at 6, 60 at 7
BY_8_FOUR_STEPS = [8, 16, 24, 32, 37, 45, 53, 61]  # a stream: 5 steps hold 37 rows
EXPECTED = {"arrays": [3, 6, 8], "dataset": [3, 6, 8], "schedule": [3, 6, 7], "stream": [3, 6, 8]}


def due_at(samples, every):
    """Steps that complete a multiple, and the multiples before."""
    steps, before = [], 0
    for step, seen in enumerate(samples, 1):
        if seen // every > before // every:
            steps.append((before // every, step))
            before = seen
    return steps


def check(results, form):
    samples = {"schedule": BY_8_THEN_16, "stream": BY_8_FOUR_STEPS}.get(form, BY_8)
    for noted, (validated, plain) in results:
        assert [(index, steps) for index, *_, steps in noted] == due_at(samples, 20)
        assert all(rows == 21 and batches == 6 for _, _, rows, batches, _ in noted)
        assert validated == plain, "weights and history must be those without cross-validation"
        assert noted == results[0][0]


def test_the_table_of_steps():
    for form, steps in EXPECTED.items():
        samples = {"schedule": BY_8_THEN_16, "stream": BY_8_FOUR_STEPS}.get(form, BY_8)
        assert due_at(samples, 20) == list(enumerate(steps))


@two_ranks
@pytest.mark.parametrize("form", ["dataset", "schedule"])
def test_two_ranks(pool, form):
    check(pool.run(bodies.cross_validated, form, timeout=90), form)


def test_two_devices_go_on_in_their_data(alone):
    check(alone.run(bodies.cross_validated, "stream", 20, "mirrored", timeout=90), "stream")


def test_batches_larger_than_the_interval(alone):
    [(noted, (validated, plain))] = alone.run(bodies.cross_validated, "arrays", 5, "world", 1)
    assert [(index, steps) for index, *_, steps in noted] == due_at(BY_8[:5], 5)
    assert validated == plain


def test_the_error_is_that_of_evaluate(alone):
    [(errors, expected)] = alone.run(bodies.evaluated_as_outside)
    assert len(errors) == 3
    assert errors == pytest.approx(expected, rel=1e-6)


@two_ranks
def test_false_on_one_rank_stops_all_after_that_step(pool):
    # The second evaluation is after step 6, the first of epoch 1.
    assert pool.run(bodies.stopped_by_one_rank) == [(2, (1, 0), 6)] * 2


@two_ranks
def test_a_resumed_run_counts_on(pool, tmp_path):
    """Saved after step 8 of 15, with 61 rows seen; crashed at step 9."""
    whole = due_at([*BY_8, 82, 90, 98, 106, 111], 20)
    assert whole == [(0, 3), (1, 6), (2, 8), (3, 11), (4, 14)]
    for first, second in pool.run(bodies.counted_on, str(tmp_path), timeout=90):
        assert first == whole[:3]
        assert second == whole[3:]


@pytest.mark.worlds(("served", 2))
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_behind_parameter_servers(pool, consistency):
    [(noted, tested, (validated, plain), refused)] = pool.run(
        bodies.served, consistency, timeout=90
    )
    # The chief hands out 8 rows a step; steps handed out are done before it evaluates.
    assert [(index, steps) for index, *_, steps in noted] == [
        (0, 3),
        (1, 6),
        (2, 9),
        (3, 12),
        (4, 15),
    ]
    assert all(rows == 21 and batches == 6 for _, _, rows, batches, _ in noted)
    assert np.isfinite(tested["loss"])
    if consistency == "sync":
        np.testing.assert_array_equal(validated[0], plain[0])
        assert validated[1] == plain[1]
    told = ["give fit arrays", "use BatchSizeSchedule", "leave it out"]
    assert [kind for kind, _ in refused] == ["ValueError"] * 3
    assert all(cure in text for (_, text), cure in zip(refused, told, strict=True))


@two_ranks
def test_what_cannot_work_is_refused(pool):
    for other, unknown, own in pool.run(bodies.validation_refused):
        assert other[0] == "DisagreementError"
        assert "cross-validation data" in other[1]
        assert unknown[0] == own[0] == "ValueError"
        assert "monitor='accuracy' is not among the numbers of evaluate (loss, mae)" in unknown[1]
        assert "a train_step or test_step of its own" in own[1]


def test_arguments():
    for arguments, message in [
        ((0, print, None), "every_samples must be an integer above 0, got 0"),
        ((1, "print", None), "callback must be a function, got 'print'"),
        ((1, print, None), "the cross-validation data is missing"),
        ((1, print, (0, 0), 0), "batch_size must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            CrossValidation(*arguments)
    for arguments, message in [
        ({"gain": 1.0}, "gain must be 0 or more and less than 1"),
        ({"cuts": -1}, "cuts must be an integer of at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            HalveRate(1, (0, 0), **arguments)


# HalveRate.


@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.floats(0.0, 0.99))
def test_gain_is_relative(before, error, gain):
    assert gains_enough(before, error, gain) == (before - error >= gain * before)
    assert not gains_enough(before, float("nan"), gain)
    assert not gains_enough(float("nan"), error, gain)


# 37 rows: 16 at step 2, 32 at step 4, 48 at step 7, 64 at step 9.
RATES = [0.08] * 4 + [0.04] * 3 + [0.02] * 2


@two_ranks
def test_the_rate_is_halved_and_then_training_ends(pool):
    results = pool.run(bodies.halved)
    for rates, iterations, _ in results:
        assert rates == pytest.approx(RATES)
        assert iterations == 9
    told = results[0][2].splitlines()
    assert [line.split(", ")[1] for line in told] == [
        "learning rate 0.08 -> 0.04 (cut 1 of 2)",
        "learning rate 0.04 -> 0.02 (cut 2 of 2)",
        "training ends after 2 cuts",
    ]
    assert results[1][2] == ""


def test_a_resumed_run_knows_its_cuts(alone, tmp_path):
    """Saved after step 6, after the first cut."""
    [(first, *_)] = alone.run(bodies.halved, str(tmp_path), 0.99, (1, 2))
    assert first == pytest.approx(RATES[:8])
    [(second, iterations, told)] = alone.run(bodies.halved, str(tmp_path))
    assert second == pytest.approx(RATES[6:])
    assert iterations == 9
    assert "cut 2 of 2" in told


@pytest.mark.parametrize("first, errors", [(None, [0.5, 0.47, 0.44]), (1.0, [0.9, 0.5])])
def test_where_enough_is_gained_nothing_is_done(first, errors):
    halving = HalveRate(1, (0, 0), first=first)  # without a model, whose rate it would need
    halving._before = first
    assert all(halving.callback(index, error, 1, 1) for index, error in enumerate(errors))


def test_an_optimizer_with_a_schedule_is_refused(alone):
    [(kind, text)] = alone.run(bodies.halving_refused)
    assert kind == "ValueError"
    assert "HalveRate sets the learning rate" in text
