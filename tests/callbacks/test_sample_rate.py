"""A sample moves the weights as far at every batch size, and as fast; momentum changes freely.

Row i of the data moves weight i and no other, by a gradient of 1: weights are what each sample has
contributed.
"""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.schedules import momentum_from_time_constant

from callbacks.bodies import Crash, crash_at, strategy

two_ranks = pytest.mark.worlds(("collective", 2))

GROWING = [4, 8, 16]  # 37 rows: the last batches have 1, 5 and 5


def constantly(value):
    return lambda epoch, seen: value


ROWS = 37


class Linear:
    """A model whose loss is the mean of its weights' sum; notes how often its loss is traced."""

    def __init__(self, kind="world", sgd=None, optimizer=None, **options):
        self.traces = 0
        sgd = {"momentum": 0.9} | (sgd or {})
        with strategy(kind).scope():
            dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            self.model = keras.Sequential([keras.Input((ROWS,)), dense])
            chosen = optimizer() if optimizer else keras.optimizers.SGD(0.125, **sgd)
            self.model.compile(optimizer=chosen, loss=self._loss, **options)

    def _loss(self, y_true, y_pred):
        self.traces += 1
        return y_pred[:, 0]

    def fit(self, callbacks, batch_size=8, epochs=3, form="arrays"):
        x = np.eye(ROWS, dtype="float32")
        given = {"x": x, "y": x[:, :1], "batch_size": batch_size, "shuffle": False}
        if form == "dataset":
            given = {"x": tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(batch_size)}
        with contextlib.suppress(Crash):
            self.model.fit(**given, epochs=epochs, verbose=0, callbacks=callbacks)
        return self

    @property
    def moved(self):
        """How far each weight has been moved down."""
        return -self.model.get_weights()[0][:, 0].astype("float64")

    @property
    def buffer(self):
        """What momentum holds of each, downwards."""
        (found,) = [v for v in self.model.optimizer.variables if v.path.endswith("_momentum")]
        return -found.numpy()[:, 0].astype("float64")


def steps_of(sizes, epochs):
    """Rows of each step, epoch by epoch; the last size persists."""
    steps = []
    for epoch in range(epochs):
        size = sizes[min(epoch, len(sizes) - 1)]
        steps += [(epoch, range(at, min(at + size, ROWS))) for at in range(0, ROWS, size)]
    return steps


def by_hand(steps, rate_of, tau_of, nesterov=False, cuts_every=None, most=0):
    """What each row has moved its weight by: all that is due of it leaves at the pace of momentum.

    `rate_of` and `tau_of` take the epoch and the rows seen before the step. Every `cuts_every` rows
    but the first time all is halved, `most` times.
    """
    moved, due, seen, cut, last = np.zeros(ROWS), np.zeros(ROWS), 0, 1.0, None
    for epoch, rows in steps:
        rate, tau = cut * rate_of(epoch, seen), tau_of(epoch, seen)
        due *= 1.0 if last is None else rate / last
        last = rate
        mu = np.exp(-len(rows) / tau) if tau else 0.0
        new = np.zeros(ROWS)
        new[list(rows)] = rate
        at_once = (1 - mu**2 if nesterov else 1 - mu) * new
        moved += (1 - mu) * due + at_once
        due = mu * due + (new - at_once)
        passed = cuts_every and (seen + len(rows)) // cuts_every > seen // cuts_every
        if passed and seen >= cuts_every and most:
            cut, due, last, most = cut / 2, due / 2, last / 2, most - 1
        seen += len(rows)
    return moved, due


def contributed(sizes, tau, nesterov=False, kind="world", corrected=True, epochs=3, options=None):
    """What each row has moved its weight by, and what is still to come of it."""
    strategy(kind)  # before the optimizer: TensorFlow's collectives come first
    rate = dtk.callbacks.SampleRate(0.01, tau, momentum_correction=corrected)
    growing = dtk.callbacks.BatchSizeSchedule(sizes)
    linear = Linear(kind, {"nesterov": nesterov}, **(options or {}))
    linear.fit([rate, growing], epochs=epochs)
    mu = rate.momentum
    return linear.moved, linear.buffer * mu ** (2 if nesterov else 1) / (1 - mu)


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_a_growing_batch(pool, nesterov):
    expected, still = by_hand(steps_of(GROWING, 3), constantly(0.01), constantly(24), nesterov)
    for moved, due in pool.run(contributed, GROWING, 24, nesterov):
        np.testing.assert_allclose(moved, expected, rtol=2e-5)
        np.testing.assert_allclose(due, still, rtol=2e-5, atol=1e-8)
        np.testing.assert_allclose(moved + due, 3 * 0.01, rtol=2e-5)


def test_without_correction_the_last_samples_before_a_change_count_for_another_amount(alone):
    [(moved, due)] = alone.run(contributed, GROWING, 24, False, "world", False)
    assert np.abs((moved + due) / 0.03 - 1).max() > 0.05


def test_several_steps_in_one_call_take_the_short_batch_for_a_whole_one(alone):
    """Two calls of five steps; the batch of one row has the rate of four, as is documented."""
    options = {"steps_per_execution": 5}
    [(moved, due)] = alone.run(contributed, [4], 24, False, "world", True, 1, options)
    np.testing.assert_allclose((moved + due)[:36], 0.01, rtol=2e-5)
    assert (moved + due)[36] == pytest.approx(0.04, rel=2e-5)


def again(same):
    """Two calls of `fit`, by one callback or two: what each row has contributed, or is to."""
    strategy()
    linear, first = Linear(), dtk.callbacks.SampleRate(0.01, 24)
    second = first if same else dtk.callbacks.SampleRate(0.01, 24)
    linear.fit([first], epochs=1).fit([second, dtk.callbacks.BatchSizeSchedule([4, 16])], epochs=2)
    return linear.moved + linear.buffer * second.momentum / (1 - second.momentum)


@pytest.mark.parametrize("same", [True, False], ids=["same", "another"])
def test_a_second_fit_goes_on(alone, same):
    """A new callback once took what momentum held for nothing."""
    [counted] = alone.run(again, same)
    np.testing.assert_allclose(counted, 3 * 0.01, rtol=2e-5)


def unchanged():
    """Traces of the loss: of one batch size, and of sizes and momenta that change."""
    strategy()
    told = []
    for tau, sizes in ((24, [8]), ([0, 24, 48], [4, 8, 16])):
        callbacks = [dtk.callbacks.SampleRate(0.01, tau), dtk.callbacks.BatchSizeSchedule(sizes)]
        told.append(Linear().fit(callbacks).traces)
    return told


def test_a_new_momentum_needs_no_new_trace(alone):
    [(constant, changing)] = alone.run(unchanged)
    assert changing == constant


# Sixteen rows of 0 momentum and rate 0.01, then of 0 and 0.02, then of 24.
def rate_of(epoch, seen):
    return 0.01 if seen < 16 else 0.02


def tau_of(epoch, seen):
    return 0 if seen < 32 else 24


def never_content(corrected):
    return {"monitor": lambda numbers: 1.0, "momentum_correction": corrected}


def everything_at_once(directory=None, crash=None, corrected=True, often="epoch"):
    """A growing batch, momentum by samples, halving: weights, rates told, Keras's rates."""
    strategy()
    x = np.eye(ROWS, dtype="float32")
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    callbacks = [
        dtk.callbacks.SampleRate([0.01, 0.02], [0] * 2 + [24], corrected, every_samples=16),
        dtk.callbacks.BatchSizeSchedule([4, 8, 16]),
        dtk.callbacks.HalveRate(30, (x, x[:, :1]), cuts=2, **never_content(corrected)),
        Rates(),
    ]
    callbacks += [] if directory is None else [dtk.callbacks.Checkpoint(directory, often)]
    callbacks += [] if crash is None else [crash_at(*crash)]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        linear = Linear().fit(callbacks)
    return linear.moved, rates, screen.getvalue()


@pytest.mark.full("a cheaper test holds its rule")
def test_halving_rates_by_samples_and_a_growing_batch_at_once(alone):
    expected, _ = by_hand(steps_of(GROWING, 3), rate_of, tau_of, False, 30, 2)
    [(moved, rates, told)] = alone.run(everything_at_once)
    np.testing.assert_allclose(moved, expected, rtol=2e-5)
    assert "rate per sample 0.02 -> 0.01 (cut 1 of 2)" in told
    assert "rate per sample 0.01 -> 0.005 (cut 2 of 2)" in told
    assert rates[0] == pytest.approx(4 * 0.01), "no momentum yet"
    [(uncorrected, *_)] = alone.run(everything_at_once, None, None, False)
    assert np.abs(uncorrected / expected - 1).max() > 0.05


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
@pytest.mark.parametrize("often, crash", [(4, (1, 3)), ("epoch", (2, 1))], ids=["steps", "epochs"])
def test_a_resumed_run_ends_as_one_that_was_never_stopped(pool, tmp_path, often, crash):
    """In the midst of an epoch, and between two; after one cut."""
    whole = pool.run(everything_at_once)
    pool.run(everything_at_once, str(tmp_path / "saved"), crash, True, often)
    resumed = pool.run(everything_at_once, str(tmp_path / "saved"), None, True, often)
    for (moved, rates, _), (expected, all_rates, _) in zip(resumed, whole, strict=True):
        assert 0 < len(rates) < len(all_rates)
        assert rates == all_rates[-len(rates) :]
        np.testing.assert_array_equal(moved, expected)


def beside_growing(kind="world"):
    """The schedule falls by half, and again: so does the rate per sample, and the batch grows."""
    strategy(kind)
    growing = dtk.callbacks.GrowBatchInsteadOfDecay([3.0, 1.5, 0.75])
    rate = dtk.callbacks.SampleRate(0.01, 24)
    return Linear(kind).fit([growing, rate], batch_size=4).moved, [size for size, _ in growing.plan]


def test_where_a_schedule_would_decay_the_rate_per_sample_does_and_the_batch_grows(alone):
    [(moved, sizes)] = alone.run(beside_growing)
    assert sizes == [4, 8, 16]
    expected, _ = by_hand(steps_of(GROWING, 3), lambda epoch, seen: 0.01 / 2**epoch, constantly(24))
    np.testing.assert_allclose(moved, expected, rtol=2e-5)


def beside_searching(first=True):
    """Sizes as found by trials, which must leave no trace; losses of the last."""
    strategy()
    search = dtk.callbacks.AutoBatchSize(multiple=4, trial_batches=2, margin=1e9)
    sizes = []

    class Sizes(dtk.callbacks.BatchSizeSchedule):
        sets = ()

        def __init__(self):
            super().__init__([1])

        def on_train_begin(self, logs=None):
            pass

        def on_epoch_begin(self, epoch, logs=None):
            sizes.append(self.trainer.feed.batch_size())

    callbacks = [search, dtk.callbacks.SampleRate([0.01, 0.02, 0.04], 24)]
    callbacks = [*(callbacks if first else reversed(callbacks)), Sizes()]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        moved = Linear().fit(callbacks, batch_size=4).moved
    return moved, sizes, search.trials


def test_trials_of_batch_sizes_leave_no_trace(alone):
    [(moved, sizes, losses)] = alone.run(beside_searching)
    assert sizes[0] == 4 and len(set(sizes)) > 1
    expected, _ = by_hand(steps_of(sizes, 3), lambda epoch, seen: 0.01 * 2**epoch, constantly(24))
    np.testing.assert_allclose(moved, expected, rtol=2e-5)
    [(_, _, others)] = alone.run(beside_searching, False)
    assert losses == others, "a trial has the rate of the coming epoch, whoever comes first"


def plateaued():
    """Keras's own callback halves the optimizer's rate before each epoch but the first."""

    class Halving(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch:
                rate = self.model.optimizer.learning_rate
                self.model.optimizer.learning_rate = float(keras.ops.convert_to_numpy(rate)) / 2

    strategy()
    rate = dtk.callbacks.SampleRate(0.01)
    linear = Linear(sgd={"momentum": 0.0})
    linear.fit([Halving(), rate, dtk.callbacks.BatchSizeSchedule([4, 8, 16])])
    return linear.moved, rate.rate


def test_whoever_sets_the_optimizers_rate_sets_the_rate_per_sample(alone):
    [(moved, rate)] = alone.run(plateaued)
    np.testing.assert_allclose(moved, 0.01 * (1 + 0.5 + 0.25), rtol=2e-5)
    assert rate == pytest.approx(0.0025)


# MomentumSchedule, and the momentum of HalveRate.
def of_keras(momenta):
    """SGD's equation: batches of 8 of 37 rows, the rate 1/8 of every step."""
    moved, buffer = np.zeros(ROWS), np.zeros(ROWS)
    for (_, rows), mu in zip(steps_of([8], 3), momenta, strict=True):
        buffer *= mu
        buffer[list(rows)] += 0.125 / len(rows)
        moved += buffer
    return moved


def scheduled_momentum(time_constants, every_samples, form):
    """Weights with a momentum schedule; the rate stays."""
    strategy()
    size = 8 if form == "dataset" else None
    schedule = dtk.callbacks.MomentumSchedule(time_constants, every_samples, size)
    return Linear().fit([schedule], form=form).moved


@pytest.mark.parametrize(
    "form, every, tau_of",
    [
        ("arrays", None, lambda epoch, seen: 24 if epoch else 0),
        ("arrays", 20, lambda _, seen: 24 if seen >= 20 else 0),
        ("dataset", None, lambda epoch, seen: 24 if epoch else 0),  # whose rows count in eights
    ],
    ids=["epochs", "samples", "dataset"],
)
def test_time_constants_for_epochs_and_for_samples(alone, form, every, tau_of):
    momenta, seen = [], 0
    for epoch, rows in steps_of([8], 3):
        size = 8 if form == "dataset" else len(rows)
        momenta.append(momentum_from_time_constant(tau_of(epoch, seen), size))
        seen += len(rows)
    [moved] = alone.run(scheduled_momentum, [0, 24], every, form)
    np.testing.assert_allclose(moved, of_keras(momenta), rtol=2e-5)


def halved(corrected):
    """The rate is halved once, after 32 rows of batches of 8; plain SGD with momentum."""
    strategy()
    x = np.eye(ROWS, dtype="float32")
    cut = dtk.callbacks.HalveRate(16, (x, x[:, :1]), cuts=1, **never_content(corrected))
    with contextlib.redirect_stdout(io.StringIO()):
        linear = Linear().fit([cut], epochs=1)
    return linear.moved


@pytest.mark.parametrize("corrected", [True, False])
def test_a_cut_halves_what_momentum_holds(alone, corrected):
    """After 16 rows it is noted, after 32 cut: one more step, of 5 rows, follows."""
    moved, buffer = np.zeros(ROWS), np.zeros(ROWS)
    for step, (_, rows) in enumerate(steps_of([8], 1)):
        buffer *= 0.9 * (0.5 if step == 4 and corrected else 1.0)
        buffer[list(rows)] += (0.125 if step < 4 else 0.0625) / len(rows)
        moved += buffer
    [found] = alone.run(halved, corrected)
    np.testing.assert_allclose(found, moved, rtol=2e-5)
