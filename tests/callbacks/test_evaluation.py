"""Evaluations after exactly so many samples, and after training, leave no trace in it."""

from __future__ import annotations

import contextlib
import io
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import HalveRate

from callbacks.bodies import crash_at, data, everything, fails, fit, strategy
from support.bodies import served_with

two_ranks = pytest.mark.worlds(("collective", 2))

# Samples after each step of two epochs of 37 rows, and steps at which a multiple of 20 is complete.
BY_8 = [8, 16, 24, 32, 37, 45, 53, 61, 69, 74]  # 20 at step 3, 40 at 6, 60 at 8

BY_8_THEN_16 = [8, 16, 24, 32, 37, 53, 69, 74]  # 20 at step 3, 40 at 6, 60 at 7

BY_8_FOUR_STEPS = [8, 16, 24, 32, 37, 45, 53, 61]  # a stream: 5 steps hold 37 rows


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


class Calls:
    """A callback for CrossValidation that notes what it is told, after how many steps."""

    def __init__(self, last=None):
        self.noted = []
        self.last = last

    def __call__(self, index, average_error, samples, minibatches):
        self.noted.append((index, average_error, samples, minibatches, self.steps()))
        return self.last is None or len(self.noted) < self.last


def cross_validation(every, calls, form="arrays", **options):
    """One whose data are arrays or a dataset, as those of `fit` are."""
    x, y = data(21)
    given = (x, y) if form == "arrays" else tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    size = 4 if form == "arrays" else None
    callback = dtk.callbacks.CrossValidation(every, calls, given, size, **options)
    calls.steps = lambda: int(callback.model.optimizer.iterations.numpy())
    return callback


def cross_validated(form, every=20, kind="world", epochs=2):
    """What the callback was told; and the same training without, for comparison."""
    strategy(kind)  # before the first dataset: TensorFlow's collectives come first
    calls = Calls()
    more = []
    if form == "schedule":
        more, form = [dtk.callbacks.BatchSizeSchedule([8, 16])], "arrays"
    validating = [cross_validation(every, calls, form)]
    model, _ = fit([*more, *validating], form, epochs, kind)
    plain, _ = fit(more, form, epochs, kind)
    runs = [(everything(m).tobytes(), m.history.history) for m in (model, plain)]
    return calls.noted, runs


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
@pytest.mark.parametrize("form", ["dataset", "schedule"])
def test_two_ranks(pool, form):
    check(pool.run(cross_validated, form, timeout=90), form)


@pytest.mark.full("a cheaper test holds its rule")
def test_two_devices_go_on_in_their_data(alone):
    check(alone.run(cross_validated, "stream", 20, "mirrored", timeout=90), "stream")


@pytest.mark.full("a cheaper test holds its rule")
def test_batches_larger_than_the_interval(alone):
    [(noted, (validated, plain))] = alone.run(cross_validated, "arrays", 5, "world", 1)
    assert [(index, steps) for index, *_, steps in noted] == due_at(BY_8[:5], 5)
    assert validated == plain


def stopped_by_one_rank():
    """The last rank alone says False, at the second evaluation."""
    chosen = strategy()
    calls = Calls(2 if chosen.rank == chosen.communicator.size - 1 else None)
    model, seen = fit([cross_validation(20, calls)], epochs=3)
    return len(calls.noted), seen[-1], int(model.optimizer.iterations)


@two_ranks
def test_false_on_one_rank_stops_all_after_that_step(pool):
    # The second evaluation is after step 6, the first of epoch 1.
    assert pool.run(stopped_by_one_rank) == [(2, (1, 0), 6)] * 2


def counted_on(directory):
    """Calls, and the steps before, in two pieces of a run that crashed between evaluations."""
    place = pathlib.Path(directory, str(strategy().rank))

    def run(*more):
        calls = Calls()
        fit([cross_validation(20, calls, "dataset"), *more], "dataset", epochs=3)
        return [(index, steps) for index, *_, steps in calls.noted]

    first = run(dtk.callbacks.Checkpoint(place, 4), crash_at(1, 4))
    return first, run(dtk.callbacks.Checkpoint(place, 4))


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_a_resumed_run_counts_on(pool, tmp_path):
    """Saved after step 8 of 15, with 61 rows seen; crashed at step 9."""
    whole = due_at([*BY_8, 82, 90, 98, 106, 111], 20)
    assert whole == [(0, 3), (1, 6), (2, 8), (3, 11), (4, 14)]
    for first, second in pool.run(counted_on, str(tmp_path), timeout=90):
        assert first == whole[:3]
        assert second == whole[3:]


def served(consistency):
    """On the chief of parameter servers: what was told, runs with and without, what is refused."""
    chosen = served_with(consistency)
    x, y = data(64)

    def run(*callbacks, dataset=False):
        keras.utils.set_random_seed(3)
        with chosen.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        given = {"x": rows} if dataset else {"x": x, "y": y, "batch_size": 8}
        model.fit(**given, epochs=2, verbose=0, callbacks=callbacks)
        return model.get_weights()[0], model.history.history["loss"]

    calls, testing = Calls(), dtk.callbacks.FinalTest(x[:9], y[:9])
    validating = cross_validation(24, calls)
    runs = [run(validating, testing), run()]
    refused = [
        fails(run, cross_validation(24, calls), dataset=True),
        fails(run, dtk.callbacks.AutoBatchSize()),
        fails(run, dtk.callbacks.BatchNormStatistics(x)),
    ]
    return calls.noted, testing.result, runs, refused


@pytest.mark.full("what servers do to callbacks is tested with Keras's own")
@pytest.mark.worlds(("served", 2))
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_behind_parameter_servers(pool, consistency):
    [(noted, tested, (validated, plain), refused)] = pool.run(served, consistency, timeout=90)
    # The chief hands out 8 rows a step; steps handed out are done before it evaluates.
    assert [(index, steps) for index, *_, steps in noted] == [(n, 3 * n + 3) for n in range(5)]
    assert all(rows == 21 and batches == 6 for _, _, rows, batches, _ in noted)
    assert np.isfinite(tested["loss"])
    if consistency == "sync":
        np.testing.assert_array_equal(validated[0], plain[0])
        assert validated[1] == plain[1]
    told = ["give fit arrays", "use BatchSizeSchedule", "leave it out"]
    assert [kind for kind, _ in refused] == ["ValueError"] * 3
    assert all(cure in text for (_, text), cure in zip(refused, told, strict=True))


# HalveRate.
# 37 rows: 16 at step 2, 32 at step 4, 48 at step 7, 64 at step 9.
RATES = [0.08] * 4 + [0.04] * 3 + [0.02] * 2


def halved(directory=None, gain=0.99, crash=None):
    """A rule that is never content: rates of every step, and what was said."""
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    strategy()  # before the optimizer: TensorFlow's collectives come first
    x, y = data(16)
    halving = dtk.callbacks.HalveRate(16, (x, y), gain, cuts=2)
    more = [] if directory is None else [dtk.callbacks.Checkpoint(directory, 3)]
    more += [] if crash is None else [crash_at(*crash)]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        model, _ = fit([halving, Rates(), *more], optimizer=keras.optimizers.SGD(0.08), epochs=3)
    return rates, int(model.optimizer.iterations), screen.getvalue()


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_the_rate_is_halved_and_then_training_ends(pool):
    results = pool.run(halved)
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
    [(first, *_)] = alone.run(halved, str(tmp_path), 0.99, (1, 2))
    assert first == pytest.approx(RATES[:8])
    [(second, iterations, told)] = alone.run(halved, str(tmp_path))
    assert second == pytest.approx(RATES[6:])
    assert iterations == 9
    assert "cut 2 of 2" in told


@pytest.mark.parametrize(
    "first, errors, enough",
    [
        (None, [0.5, 0.475, 0.45], True),  # 0.05 of what was before, exactly
        (1.0, [0.9, 0.5], True),
        (1.0, [0.951], False),
        (1.0, [math.nan], False),
        (math.nan, [0.5], False),
    ],
)
def test_where_enough_is_gained_nothing_is_done(first, errors, enough):
    halving = HalveRate(1, (0, 0), first=first)  # without a model, whose rate it would need
    halving._before = first
    with contextlib.nullcontext() if enough else pytest.raises(AttributeError):
        assert all(halving.callback(index, error, 1, 1) for index, error in enumerate(errors))


def run_final_test(crash=False):
    """Result, history, screen, and what `evaluate` says after `fit`."""
    strategy()  # before the optimizer: TensorFlow's collectives come first
    x, y = data(21)
    testing = dtk.callbacks.FinalTest(x, y, batch_size=4)
    # The first epoch is the best, and is restored when training ends, after FinalTest's turn.
    restoring = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    worsening = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch == 0 else 1.0)
    callbacks = [testing, restoring, worsening, *([crash_at(1, 1)] if crash else [])]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        model, _ = fit(callbacks, optimizer=keras.optimizers.SGD(0.01))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    history = model.history.history
    tests = {key: value for key, value in history.items() if key.startswith("test_")}
    return testing.result, tests, screen.getvalue(), expected


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("crash", [False, True])
@two_ranks
def test_a_final_test_counts_once_if_training_ends_well(pool, crash):
    for rank, (result, history, screen, expected) in enumerate(pool.run(run_final_test, crash)):
        if crash:
            assert (result, history, screen) == (None, {}, "")
            continue
        assert result == pytest.approx(expected, rel=1e-6), "weights restored at the end count"
        assert history == {f"test_{name}": [value] for name, value in result.items()}
        lines = [line for line in screen.splitlines() if line.startswith("FinalTest: loss ")]
        assert len(lines) == (rank == 0)
        assert all(", mae " in line for line in lines)
