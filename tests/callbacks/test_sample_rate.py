"""A sample moves the weights as far at every batch size, and as fast; momentum changes freely."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.callbacks import MomentumSchedule, SampleRate
from dtk.callbacks.hyperparameters.momentum import carried_over
from dtk.exchange import BlockMomentum, Delayed, WarmStart
from dtk.schedules import learning_rate_from_sample_rate, momentum_from_time_constant

from callbacks import rate_bodies as bodies

two_ranks = pytest.mark.worlds(("collective", 2))
GROWING = [4, 8, 16]  # 37 rows: the last batches have 1, 5 and 5


def constantly(value):
    return lambda epoch, seen: value


def run_by_sgd(steps, rates, momenta, nesterov, corrected):
    """Keras's equations, with the rates and momenta that the conversions give; each row alone."""
    moved, buffer, before = np.zeros(len(steps)), np.zeros(len(steps)), None
    for i, rows in enumerate(steps):
        rate, mu = rates[i], momenta[i]
        if corrected and before is not None:
            buffer *= carried_over(before, mu, nesterov)
        before = mu
        pushed = np.zeros(len(steps))
        pushed[i] = rate / rows  # one of its rows, by the mean
        buffer = mu * buffer + pushed
        moved += mu * buffer + pushed if nesterov else buffer
    return moved, buffer * before ** (2 if nesterov else 1) / (1 - before)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.booleans())
def test_a_sample_counts_as_much_whatever_batch_it_comes_in(steps, nesterov):
    """All that a row has moved and is still to move is the rate per sample: pure arithmetic."""
    momenta = [momentum_from_time_constant(100, rows) for rows in steps]
    rates = [
        learning_rate_from_sample_rate(0.02, rows, mu)
        for rows, mu in zip(steps, momenta, strict=True)
    ]
    moved, due = run_by_sgd(steps, rates, momenta, nesterov, corrected=True)
    np.testing.assert_allclose(moved + due, 0.02, rtol=1e-9)


@two_ranks
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_a_growing_batch(pool, nesterov):
    expected, still = bodies.by_hand(
        bodies.steps_of(GROWING, 3), constantly(0.01), constantly(24), nesterov
    )
    for moved, due in pool.run(bodies.contributed, GROWING, 24, nesterov):
        np.testing.assert_allclose(moved, expected, rtol=2e-5)
        np.testing.assert_allclose(due, still, rtol=2e-5, atol=1e-8)
        np.testing.assert_allclose(moved + due, 3 * 0.01, rtol=2e-5)


def test_two_devices(alone):
    [(moved, due)] = alone.run(bodies.contributed, GROWING, 24, False, "mirrored")
    np.testing.assert_allclose(moved + due, 3 * 0.01, rtol=2e-5)


def test_without_correction_the_last_samples_before_a_change_count_for_another_amount(alone):
    [(moved, due)] = alone.run(bodies.contributed, GROWING, 24, False, "world", False)
    assert np.abs((moved + due) / 0.03 - 1).max() > 0.05


def test_several_steps_in_one_call_take_the_short_batch_for_a_whole_one(alone):
    """Two calls of five steps; the batch of one row has the rate of four, as is documented."""
    options = {"steps_per_execution": 5}
    [(moved, due)] = alone.run(bodies.contributed, [4], 24, False, "world", True, 1, options)
    np.testing.assert_allclose((moved + due)[:36], 0.01, rtol=2e-5)
    assert (moved + due)[36] == pytest.approx(0.04, rel=2e-5)


@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
def test_a_second_fit_goes_on(alone, same):
    """A new callback once took what momentum held for nothing."""
    [counted] = alone.run(bodies.again, same)
    np.testing.assert_allclose(counted, 3 * 0.01, rtol=2e-5)


def test_a_new_momentum_needs_no_new_trace(alone):
    [(constant, changing)] = alone.run(bodies.unchanged)
    assert changing == constant


# Sixteen rows of 0 momentum and rate 0.01, then of 0 and 0.02, then of 24.
def rate_of(epoch, seen):
    return 0.01 if seen < 16 else 0.02


def tau_of(epoch, seen):
    return 0 if seen < 32 else 24


def test_halving_rates_by_samples_and_a_growing_batch_at_once(alone):
    expected, _ = bodies.by_hand(bodies.steps_of(GROWING, 3), rate_of, tau_of, False, 30, 2)
    [(moved, rates, told)] = alone.run(bodies.everything_at_once)
    np.testing.assert_allclose(moved, expected, rtol=2e-5)
    assert "rate per sample 0.02 -> 0.01 (cut 1 of 2)" in told
    assert "rate per sample 0.01 -> 0.005 (cut 2 of 2)" in told
    assert rates[0] == pytest.approx(4 * 0.01), "no momentum yet"
    [(uncorrected, *_)] = alone.run(bodies.everything_at_once, None, None, False)
    assert np.abs(uncorrected / expected - 1).max() > 0.05


@two_ranks
@pytest.mark.parametrize("often, crash", [(4, (1, 3)), ("epoch", (2, 1))], ids=["steps", "epochs"])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(pool, tmp_path, often, crash):
    """In the midst of an epoch, and between two; after one cut."""
    whole = pool.run(bodies.everything_at_once)
    pool.run(bodies.everything_at_once, str(tmp_path / "saved"), crash, True, often)
    resumed = pool.run(bodies.everything_at_once, str(tmp_path / "saved"), None, True, often)
    for (moved, rates, _), (expected, all_rates, _) in zip(resumed, whole, strict=True):
        assert 0 < len(rates) < len(all_rates)
        assert rates == all_rates[-len(rates) :]
        np.testing.assert_array_equal(moved, expected)


def test_where_a_schedule_would_decay_the_rate_per_sample_does_and_the_batch_grows(alone):
    [(moved, sizes)] = alone.run(bodies.beside_growing)
    assert sizes == [4, 8, 16]
    expected, _ = bodies.by_hand(
        bodies.steps_of(GROWING, 3), lambda epoch, seen: 0.01 / 2**epoch, constantly(24)
    )
    np.testing.assert_allclose(moved, expected, rtol=2e-5)


def test_trials_of_batch_sizes_leave_no_trace(alone):
    [(moved, sizes, losses)] = alone.run(bodies.beside_searching)
    assert sizes[0] == 4 and len(set(sizes)) > 1
    expected, _ = bodies.by_hand(
        bodies.steps_of(sizes, 3), lambda epoch, seen: 0.01 * 2**epoch, constantly(24)
    )
    np.testing.assert_allclose(moved, expected, rtol=2e-5)
    [(_, _, others)] = alone.run(bodies.beside_searching, False)
    assert losses == others, "a trial has the rate of the coming epoch, whoever comes first"


def test_whoever_sets_the_optimizers_rate_sets_the_rate_per_sample(alone):
    [(moved, rate)] = alone.run(bodies.plateaued)
    np.testing.assert_allclose(moved, 0.01 * (1 + 0.5 + 0.25), rtol=2e-5)
    assert rate == pytest.approx(0.0025)


@pytest.mark.worlds(("served", 2))
def test_behind_parameter_servers(pool):
    expected, _ = bodies.by_hand(bodies.steps_of(GROWING, 3), constantly(0.01), constantly(24))
    [moved] = pool.run(bodies.served, "sync", timeout=90)
    np.testing.assert_allclose(moved, expected, rtol=2e-5)


# MomentumSchedule, and the momentum of HalveRate.


def of_keras(momenta):
    """SGD's equation: batches of 8 of 37 rows, the rate 1/8 of every step."""
    moved, buffer = np.zeros(bodies.ROWS), np.zeros(bodies.ROWS)
    for (_, rows), mu in zip(bodies.steps_of([8], 3), momenta, strict=True):
        buffer *= mu
        buffer[list(rows)] += 0.125 / len(rows)
        moved += buffer
    return moved


def test_a_constant_momentum_is_kerass_own(alone):
    """exp(-8 / tau) for whole batches; rows are counted in whole ones of a dataset."""
    tau = -8 / np.log(0.75)
    [scheduled] = alone.run(bodies.scheduled, tau, None, "dataset")
    [plain] = alone.run(bodies.constant_momentum, 0.75)
    np.testing.assert_allclose(scheduled, plain, rtol=1e-6)


@pytest.mark.parametrize(
    "every, tau_of",
    [(None, lambda epoch, seen: 24 if epoch else 0), (20, lambda _, seen: 24 if seen >= 20 else 0)],
    ids=["epochs", "samples"],
)
def test_time_constants_for_epochs_and_for_samples(alone, every, tau_of):
    momenta, seen = [], 0
    for epoch, rows in bodies.steps_of([8], 3):
        momenta.append(momentum_from_time_constant(tau_of(epoch, seen), len(rows)))
        seen += len(rows)
    [moved] = alone.run(bodies.scheduled, [0, 24], every)
    np.testing.assert_allclose(moved, of_keras(momenta), rtol=2e-5)


@pytest.mark.parametrize("corrected", [True, False])
def test_a_cut_halves_what_momentum_holds(alone, corrected):
    """After 16 rows it is noted, after 32 cut: one more step, of 5 rows, follows."""
    moved, buffer = np.zeros(bodies.ROWS), np.zeros(bodies.ROWS)
    for step, (_, rows) in enumerate(bodies.steps_of([8], 1)):
        buffer *= 0.9 * (0.5 if step == 4 and corrected else 1.0)
        buffer[list(rows)] += (0.125 if step < 4 else 0.0625) / len(rows)
        moved += buffer
    [found] = alone.run(bodies.halved, corrected)
    np.testing.assert_allclose(found, moved, rtol=2e-5)


# Bad input.


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SampleRate(0.0), "rate per sample schedule holds values"),
        (lambda: SampleRate([]), "needs at least one value"),
        (lambda: SampleRate(0.1, -1), "time constant schedule holds values"),
        (lambda: SampleRate(0.1, "24"), "a time constant schedule is a list"),
        (lambda: MomentumSchedule([0, float("inf")]), "a finite number, 0 or more"),
        (lambda: MomentumSchedule(24, every_samples=0), "every_samples must be an integer"),
        (lambda: MomentumSchedule(24, batch_size=0), "batch_size must be an integer"),
    ],
)
def test_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_what_cannot_work_is_refused(alone):
    [told] = alone.run(bodies.refused)
    expected = [
        "give time_constant=76 for what it is at 8, or 0 for none",
        "give SGD any momentum above 0",
        "give SGD any momentum above 0",
        "sets the momentum of keras.optimizers.SGD, and the optimizer is a Adam",
        "is for keras.optimizers.SGD",
        "SampleRate sets the learning rate, but the optimizer computes its own",
        "would set the same momentum",
        "would set the same learning rate",
        "add SampleRate(rate per sample), which takes both into account",
    ]
    assert [kind for kind, _ in told] == ["ValueError"] * len(expected)
    for (_, text), part in zip(told, expected, strict=True):
        assert part in text


@pytest.mark.parametrize(
    "exchange, message",
    [
        (BlockMomentum(64), "workers take steps of their own"),
        (WarmStart(Delayed(), samples=10), "gradients are applied a step late"),
    ],
    ids=str,
)
def test_exchanges_whose_steps_are_not_those_of_the_batch_are_refused(alone, exchange, message):
    [(kind, text)] = alone.run(bodies.exchange_refused, exchange)
    assert kind == "ValueError" and message in text
