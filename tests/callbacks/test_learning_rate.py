"""The rate rises as Goyal et al. say, once, and momentum follows it."""

from __future__ import annotations

import contextlib
import io
import pathlib
import types
import warnings

import keras
import numpy as np
import pytest

import dtk
from dtk.callbacks import epochs_per_worker
from dtk.callbacks.learning_rate import ScaledSchedule, momentum_buffers

from callbacks.bodies import (
    BATCH,
    Crash,
    compiled,
    crash_at,
    data,
    difference,
    everything,
    fitted,
    strategy,
)

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
    how = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    with contextlib.redirect_stdout(io.StringIO()) as told:
        model.fit(x, y, callbacks=[scaling, Rates()], **how)
    expected = by_hand(begin, x, y, momentum_correction)
    return rates, difference(model.get_weights()[0], expected), told.getvalue()


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


@pytest.mark.full_but("collective-2-False")
@two_ranks
@pytest.mark.parametrize("corrected", [True, False])
def test_warm_up_equals_the_paper_written_out(pool, corrected):
    results = pool.run(warming, "world", False, corrected)
    for rates, apart, _ in results:
        np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
        assert apart <= 1e-5
    assert [bool(said) for *_, said in results] == [True, False], "rank 0 alone prints"


def test_warm_up_under_mirrored(alone):
    [(rates, apart, _)] = alone.run(warming, "mirrored")
    np.testing.assert_allclose(rates, WARM_UP, rtol=1e-5)
    assert apart <= 1e-5


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_a_schedule_is_multiplied(pool):
    scheduled = [rate / (1 if step < 4 else 2) for step, rate in enumerate(WARM_UP)]
    for rates, *_ in pool.run(warming, "world", True):
        # Read after the step, when the schedule's own count has gone on by one.
        np.testing.assert_allclose(rates[:3] + rates[5:], scheduled[:3] + scheduled[5:], rtol=1e-5)


def scaled_once(directory):
    """Rates after one fit, a second one, one with a new callback, and after resuming."""

    def rate_of(model):
        return round(float(keras.ops.convert_to_tensor(model.optimizer.learning_rate).numpy()), 6)

    rates = []
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model = compiled(keras.optimizers.SGD(0.1), "mirrored")
        scaling = dtk.callbacks.LearningRateScaling()
        for callback in (scaling, scaling, dtk.callbacks.LearningRateScaling()):
            saved = dtk.callbacks.Checkpoint(directory, resume=False)
            fitted(model, callback, saved)
            rates.append(rate_of(model))
        for order in (1, -1):
            model = compiled(keras.optimizers.SGD(0.1), "mirrored")
            again = [dtk.callbacks.LearningRateScaling(), dtk.callbacks.Checkpoint(directory)]
            fitted(model, *again[::order], epochs=4)
            rates.append(rate_of(model))
        # Absolute rates of other callbacks stand, and a new optimizer is scaled anew.
        with strategy("mirrored").scope():
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        absolute = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch == 0 else 0.03)
        fitted(model, dtk.callbacks.LearningRateScaling(), absolute, epochs=2)
        rates.append(rate_of(model))
    return rates, told.getvalue()


def test_scaled_once_whatever_happens(alone, tmp_path):
    [(rates, told)] = alone.run(scaled_once, str(tmp_path), timeout=90)
    assert rates == [0.2, 0.2, 0.2, 0.2, 0.2, 0.03]
    lines = [line for line in told.splitlines() if line.startswith("LearningRateScaling")]
    line = "LearningRateScaling: 2 workers, global batch 8 (4 per worker), learning rate 0.1 -> 0.2"
    assert lines == [line, line], "once for each optimizer"


def warmed_in_turns(spans):
    """Rates of two steps an epoch, in one fit for each span of epochs."""
    model = compiled(keras.optimizers.SGD(0.02), "mirrored")
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate.numpy()))

    for first, end in spans:
        scaling = dtk.callbacks.LearningRateScaling(4.0, warmup_epochs=2.5)
        fitted(model, scaling, Rates(), initial_epoch=first, epochs=end, rows=2 * BATCH)
    return rates


@pytest.mark.parametrize("spans", [[(0, 1), (0, 2)], [(0, 1), (1, 2), (2, 3)]])
def test_fits_one_after_the_other_warm_up_as_one(alone, spans):
    """A loop that calls `fit` for each epoch began the warm-up anew each time."""
    [rates] = alone.run(warmed_in_turns, spans)
    assert rates == pytest.approx([0.02 * (1 + 3 * min(1, step / 5)) for step in range(6)])


RATES = {
    "number": lambda: 0.02,
    "schedule": lambda: keras.optimizers.schedules.ExponentialDecay(0.02, 5, 0.9),
}


def scaled_after_restoring(directory, name, restore):
    """Weights and state after 4 epochs, and after 2 of them, a restore of Keras, and the others;
    and what was said.
    """
    place = pathlib.Path(directory)

    def made():
        keras.utils.set_random_seed(5)
        return compiled(keras.optimizers.SGD(RATES[name](), momentum=0.9))

    def fit(model, *more, **how):
        scaling = dtk.callbacks.LearningRateScaling(4.0, warmup_epochs=2.5)
        fitted(model, *more, scaling, shuffle=False, **how)
        return everything(model)

    with contextlib.redirect_stdout(io.StringIO()) as told:
        whole = fit(made(), epochs=4)
        model = made()
        if restore == "BackupAndRestore":
            with contextlib.suppress(Crash):
                fit(model, keras.callbacks.BackupAndRestore(place), crash_at(2, 1), epochs=4)
            again = fit(made(), keras.callbacks.BackupAndRestore(place), epochs=4)
        else:
            fit(model, epochs=2)
            model.save(place / "model.keras")
            with strategy().scope():
                model = keras.models.load_model(place / "model.keras")
            again = fit(model, initial_epoch=2, epochs=4)
    return difference(again, whole), told.getvalue().count("learning rate 0.02 -> 0.08")


@pytest.mark.full_but(
    "BackupAndRestore-schedule",
    "load_model-number",
)
@pytest.mark.parametrize("name", list(RATES))
@pytest.mark.parametrize("restore", ["BackupAndRestore", "load_model"])
def test_scaled_once_when_keras_restores_it(alone, tmp_path, name, restore):
    """What said so was lost with the optimizer: 0.4 was scaled to 1.6, and momentum with it."""
    [(apart, said)] = alone.run(scaled_after_restoring, str(tmp_path), name, restore)
    assert apart <= 1e-6
    assert said == 2, "once in each training"


def scaled_later(directory):
    """Rates where the callback comes later: to trained weights, and to state that is not loaded."""
    rates, place = [], pathlib.Path(directory, "model.weights.h5")

    def scale(model):
        fitted(model, dtk.callbacks.LearningRateScaling(4.0))
        rates.append(round(float(model.optimizer.learning_rate.numpy()), 6))

    with contextlib.redirect_stdout(io.StringIO()):
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        fitted(model)
        model.save_weights(place)
        scale(model)
        model.load_weights(place)  # the rate, too
        scale(model)
        model.save_weights(place)
        another = compiled(keras.optimizers.Adam(0.1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras says that it skips the optimizer
            another.load_weights(place)
        scale(another)
        schedule = ScaledSchedule(keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.1), 4.0)
        scale(compiled(keras.optimizers.SGD(schedule)))  # of a file without the mark
    return rates


def test_an_optimizer_that_was_not_scaled_is(alone, tmp_path):
    assert alone.run(scaled_later, str(tmp_path)) == [[0.4, 0.4, 0.4, 0.4]]


def test_the_scaled_schedule_survives_saving():
    inner = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    schedule = ScaledSchedule(inner, 3.0)
    again = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert float(again(10)) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "make, buffers",
    [
        (lambda: dtk.optimizers.LARS(0.1), 1),
        (lambda: dtk.optimizers.LAMB(0.1), 0),
        (lambda: dtk.optimizers.RMSpropWarmup(0.1, steps_per_epoch=10), 0),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 1),
        (lambda: keras.optimizers.RMSprop(0.1, momentum=0.9), 1),
        (lambda: keras.optimizers.Adam(0.1), 0),
    ],
)
def test_which_optimizers_have_the_rate_in_their_momentum(make, buffers):
    optimizer = make()
    optimizer.build([keras.Variable(np.zeros(3))])
    assert [tuple(buffer.shape) for buffer in momentum_buffers(optimizer)] == [(3,)] * buffers


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
