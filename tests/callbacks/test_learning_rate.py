"""The rate rises as Goyal et al. say, once, and momentum follows it."""

from __future__ import annotations

import contextlib
import io
import types

import keras
import numpy as np
import pytest

import dtk
from dtk.callbacks import epochs_per_worker
from dtk.callbacks.learning_rate import ScaledSchedule, factor_for, momentum_buffers, warm_up
from dtk.trainer.gradients import shared_optimizer

from callbacks.bodies import compiled, data, difference, strategy

two_ranks = pytest.mark.worlds(("collective", 2))

WARM_UP = [0.1 * (1 + 3 * min(1, step / 6)) for step in range(12)]


def warming(kind="world", scheduled=False, momentum_correction=True):
    """Rates seen by every step, and the same training written out by hand in numpy."""
    keras.utils.set_random_seed(3)
    rate = 0.1
    if scheduled:
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.05])
    with strategy(kind).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=keras.optimizers.SGD(rate, momentum=0.9), loss="mse")
    begin = model.get_weights()[0].astype("float64")
    x, y = data(32)
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            value = self.model.optimizer.learning_rate
            rates.append(float(keras.ops.convert_to_tensor(value).numpy()))

    scaling = dtk.callbacks.LearningRateScaling(
        4.0, warmup_epochs=1.5, momentum_correction=momentum_correction
    )
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[scaling, Rates()])
    return rates, difference(model.get_weights()[0], by_hand(begin, x, y, momentum_correction))


def by_hand(weights, x, y, corrected):
    """Momentum SGD of Goyal et al. (eq. 9 and 10), rates as in `warming`, no schedule."""
    u = v = np.zeros_like(weights)
    for step in range(12):
        rate = 0.1 * (1 + 3 * min(1, step / 4 / 1.5))
        part = slice(step % 4 * 8, step % 4 * 8 + 8)
        residual = x[part] @ weights - y[part]
        gradient = 2 * x[part].T.astype("float64") @ residual / 8
        u = 0.9 * u + gradient
        v = 0.9 * v - rate * gradient
        weights = weights - rate * u if corrected else weights + v
    return weights


@two_ranks
@pytest.mark.parametrize("corrected", [True, False])
def test_warm_up_equals_the_paper_written_out(pool, corrected):
    for rates, apart in pool.run(warming, "world", False, corrected):
        np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
        assert apart <= 1e-5


def test_warm_up_under_mirrored(alone):
    [(rates, apart)] = alone.run(warming, "mirrored")
    np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
    assert apart <= 1e-5


@two_ranks
def test_a_schedule_is_multiplied(pool):
    scheduled = [rate / (1 if step < 4 else 2) for step, rate in enumerate(WARM_UP)]
    for rates, _ in pool.run(warming, "world", True):
        # Read after the step, when the schedule's own count has gone on by one.
        np.testing.assert_allclose(rates[:3] + rates[5:], scheduled[:3] + scheduled[5:], rtol=1e-5)


def scaled_once(directory):
    """Rates after one fit, a second one, one with a new callback, and after resuming."""

    def rate_of(model):
        return round(float(keras.ops.convert_to_tensor(model.optimizer.learning_rate).numpy()), 6)

    x, y = data()
    rates = []
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model = compiled(keras.optimizers.SGD(0.1))
        scaling = dtk.callbacks.LearningRateScaling()
        for callback in (scaling, scaling, dtk.callbacks.LearningRateScaling()):
            saved = dtk.callbacks.Checkpoint(directory, resume=False)
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback, saved])
            rates.append(rate_of(model))
        for order in (1, -1):
            model = compiled(keras.optimizers.SGD(0.1))
            again = [dtk.callbacks.LearningRateScaling(), dtk.callbacks.Checkpoint(directory)]
            model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=again[::order])
            rates.append(rate_of(model))
        # Absolute rates of other callbacks stand, and a new optimizer is scaled anew.
        with strategy().scope():
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        absolute = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch == 0 else 0.03)
        model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[dtk.callbacks.LearningRateScaling(), absolute],
        )
        rates.append(rate_of(model))
    return rates, told.getvalue()


@two_ranks
def test_scaled_once_whatever_happens(pool, tmp_path):
    first, second = pool.run(scaled_once, str(tmp_path), timeout=90)
    assert first[0] == second[0] == [0.2, 0.2, 0.2, 0.2, 0.2, 0.03]
    lines = [line for line in first[1].splitlines() if line.startswith("LearningRateScaling")]
    line = "LearningRateScaling: 2 workers, global batch 8 (4 per worker), learning rate 0.1 -> 0.2"
    assert lines == [line, line], "once for each optimizer"
    assert second[1] == "", "rank 0 alone prints"


@pytest.mark.parametrize(
    "rule, workers, factor", [("linear", 4, 4.0), ("sqrt", 4, 2.0), (0.5, 4, 0.5), ("sqrt", 1, 1.0)]
)
def test_what_a_rule_makes_of_a_number_of_workers(rule, workers, factor):

    assert factor_for(rule, workers) == factor


def test_a_warm_up_ends_at_the_whole_factor():
    """Breaks as a rate that goes on rising where warm-up ends in the middle of an epoch."""

    assert [warm_up(4.0, progress) for progress in (0.0, 0.5, 1.0, 1.5)] == [1.0, 2.5, 4.0, 4.0]


def test_the_scaled_schedule_survives_saving():
    inner = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    schedule = ScaledSchedule(inner, 3.0)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert float(again(10)) == pytest.approx(0.15)


@pytest.mark.parametrize("name, buffers", [("LARS", 1), ("LAMB", 0), ("RMSpropWarmup", 0)])
def test_which_of_dtks_optimizers_have_the_rate_in_their_momentum(name, buffers):
    more = {"steps_per_epoch": 10} if name == "RMSpropWarmup" else {}
    optimizer = getattr(dtk.optimizers, name)(learning_rate=0.1, **more)
    optimizer.build([keras.Variable([[1.0]])])
    assert len(momentum_buffers(optimizer)) == buffers


def test_optimizer_learning_rate():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert shared_optimizer.schedule_of(keras.optimizers.SGD(decay)) is decay
    assert shared_optimizer.schedule_of(keras.optimizers.SGD(0.1)) is None
    wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(decay))
    assert shared_optimizer.schedule_of(wrapped) is decay


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.RMSprop])
def test_momentum_buffers_are_found(kind):
    optimizer = kind(0.1, momentum=0.9)
    optimizer.build([keras.Variable(np.zeros(3)), keras.Variable(np.zeros(2))])
    assert [tuple(b.shape) for b in momentum_buffers(optimizer)] == [(3,), (2,)]
    adam = keras.optimizers.Adam(0.1)
    adam.build([keras.Variable(np.zeros(3))])
    assert momentum_buffers(adam) == []


def test_epochs_per_worker():
    def of(size):
        return types.SimpleNamespace(size=size)

    assert [epochs_per_worker(30, of(n)) for n in (1, 2, 4, 7, 64)] == [30, 15, 8, 5, 1]
    assert epochs_per_worker(30, of(64), minimum=3) == 3
    assert epochs_per_worker(0, of(2)) == 1
    with pytest.raises(ValueError, match="got -1"):
        epochs_per_worker(-1, of(2))
    with pytest.raises(ValueError, match="at least 1"):
        epochs_per_worker(3, of(2), minimum=0)
