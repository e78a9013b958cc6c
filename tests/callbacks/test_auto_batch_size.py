"""Trials choose the batch, alike on every rank, and leave nothing behind."""

from __future__ import annotations

import contextlib
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import AutoBatchSize
from dtk.compat import tf_replicas
from dtk.trainer.replica import snapshot
from dtk.trainer.strategy import ShuffleSeed

from callbacks.batch_size_bodies import BATCH, ROWS, train
from callbacks.bodies import Crash, crash_at, data, fails, strategy, untried

two_ranks = pytest.mark.worlds(("collective", 2))


def check_trials(results):
    """Weights, optimizer, metrics and seeds; Python's and numpy's generators."""
    for left, within, trials in results:
        assert [size for size, *_ in left] == [8, 16]  # 8, 11, 16
        assert list(trials) == [8, 16]
        assert all(all(same) for _, *same in left)
        assert not any(any(same) for same in within), "the case must change all of it"
        assert trials == results[0][2]


def all_state(model):
    """Everything a step may change, as this process holds it, bit for bit."""
    kept = snapshot.Snapshot(snapshot.changed_by_training(model))._kept
    numpy_state = np.random.get_state(legacy=False)["state"]
    return (
        [value.tobytes() for _, value in kept],
        random.getstate(),
        (numpy_state["pos"], numpy_state["key"].tobytes()),
    )


def drawing(kind="world"):
    """A model whose steps draw from Keras's, Python's and numpy's generators."""

    class Draws(keras.layers.Layer):
        def call(self, rows):
            def draw(values):
                return values + np.float32(0.0 * (random.random() + np.random.rand()))

            return tf.ensure_shape(tf.numpy_function(draw, [rows], tf.float32), rows.shape)

    with strategy(kind).scope():
        layers = [Draws(), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])
    return model


def tried(kind="world"):
    """Sizes tried, and which kinds of state a trial has changed in spite of all; and in itself."""
    left, within = [], []

    class Watched(dtk.callbacks.AutoBatchSize):
        def _trial(self, size):
            before = all_state(self.model)
            loss = super()._trial(size)
            pairs = zip(before, all_state(self.model), strict=True)
            left.append([size, *(one == other for one, other in pairs)])
            return loss

        def _train(self, size):
            before = all_state(self.model)
            loss = super()._train(size)
            pairs = zip(before, all_state(self.model), strict=True)
            within.append([one == other for one, other in pairs])
            return loss

    keras.utils.set_random_seed(3)
    model = drawing(kind)
    x, y = data(ROWS)
    searching = Watched(trial_batches=3, multiple=8, margin=100.0)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[searching])
    return left, within, searching.trials


@two_ranks
def test_a_trial_leaves_no_bit_changed(pool):
    check_trials(pool.run(tried, timeout=90))


def test_a_trial_leaves_no_bit_changed_on_two_devices(alone):
    check_trials(alone.run(tried, "mirrored", timeout=90))


def searched_in_vain(kind="world"):
    """Trials that leave the size as it is, against no trials: both runs."""
    runs = []
    for callbacks in ([dtk.callbacks.AutoBatchSize(max_batch_size=8, multiple=8)], []):
        steps, _, weights, history = train(callbacks, "adam", 3, kind=kind, dropout=0.3)
        runs.append((steps, weights.tobytes(), history))
    return runs


@two_ranks
def test_trials_in_vain_change_nothing_of_training(pool):
    for with_trials, without in pool.run(searched_in_vain, timeout=90):
        assert with_trials == without


def test_trials_in_vain_change_nothing_in_one_process(alone):
    [(with_trials, without)] = alone.run(searched_in_vain, timeout=90)
    assert with_trials == without


def searched(rate=1e-6, form="arrays", epochs=5, **options):
    strategy()  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    searching = dtk.callbacks.AutoBatchSize(multiple=8, batch_size=given, **options)
    steps, rates, _, _ = train([searching], keras.optimizers.SGD(rate), epochs, form)
    return steps, rates, searching.trials


@two_ranks
def test_the_batch_doubles_at_most_and_the_rate_with_it(pool):
    """With a rate so small that every size is as good as another."""
    for steps, rates, trials in pool.run(searched, 1e-6, "dataset", 3, timeout=90):
        assert steps == [12, 6, 3]
        assert rates == pytest.approx([1e-6, 2e-6, 4e-6])
        assert list(trials) == [8, 16, 24, 32]


def searched_seldom():
    return searched(frequency=2, scale_rate=False)


def test_every_second_epoch_and_a_rate_left_alone(alone):
    [(steps, rates, _)] = alone.run(searched_seldom)
    assert steps == [12, 12, 6, 6, 3]
    assert rates == pytest.approx([1e-6] * 5)


def rows_of_a_trial():
    """Rows of every batch of 8 of 24, in a script that sets no seed: 3, a trial's 2, and 3."""
    chosen, order = strategy(), []
    before, chosen.shuffle_seed = chosen.shuffle_seed, ShuffleSeed(7)
    chosen.shuffle_seed.restore(7, in_force=tf_replicas.global_seed())

    class Rows(keras.layers.Layer):
        def call(self, rows):
            tf.py_function(lambda values: order.append(values.numpy().ravel().tolist()), [rows], [])
            return rows

    with chosen.scope():
        model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    untried(model)
    x = np.arange(24.0, dtype="float32")[:, None]
    searching = dtk.callbacks.AutoBatchSize(trial_batches=2, max_batch_size=8, multiple=8)
    try:
        model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[searching])
    finally:
        chosen.shuffle_seed = before
    return order


def test_a_trial_trains_on_the_rows_the_epoch_begins_with(alone):
    [order] = alone.run(rows_of_a_trial)
    assert len(order) == 8
    assert order[3:5] == order[5:7]
    assert order[5:] != order[:3], "epochs must be shuffled apart"


def test_what_is_no_number_is_bad(alone):
    [(steps, rates, trials)] = alone.run(searched, 1e30, "arrays", 2)
    assert steps == [12] * 2
    assert list(trials) == [8]
    assert not math.isfinite(trials[8])


def searched_and_resumed(directory, form):
    """Steps, rates and weights of a run, and of what is left of it after a crash."""

    def run(*callbacks):
        searching = dtk.callbacks.AutoBatchSize(multiple=8, margin=0.5, batch_size=8)
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        return train([*callbacks, searching], optimizer, 3, form, dropout=0.3)[:3]

    whole = run()
    with contextlib.suppress(Crash):
        run(dtk.callbacks.Checkpoint(directory, 5), crash_at(1, 4))
    return whole, run(dtk.callbacks.Checkpoint(directory, 5))


@pytest.mark.parametrize("form, left", [("arrays", 3), ("shuffled", 4)])
def test_a_resumed_run_has_the_size_it_had(alone, tmp_path, form, left):
    """Saved in the midst of the second epoch, of 6 steps, which began with a search.

    A dataset breaks when the trials' passes over it, each shuffled anew, are not passed again.
    """
    [(whole, again)] = alone.run(searched_and_resumed, str(tmp_path), form, timeout=90)
    assert whole[0] == [12, 6, 3]
    assert again[0] == [left, 3]
    assert again[1] == pytest.approx(whole[1][1:])
    assert again[2] == pytest.approx(whole[2], rel=1e-6)


def search_refused():
    strategy()  # before the optimizer: TensorFlow's collectives come first
    auto = dtk.callbacks.AutoBatchSize
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    return [
        fails(train, [auto()], "sgd", form="dataset"),
        fails(train, [auto()], keras.optimizers.SGD(decay)),
        fails(train, [auto(), dtk.callbacks.BatchSizeSchedule([8])], "sgd"),
    ]


@two_ranks
def test_what_cannot_work_is_refused_before_the_first_step(pool):
    for answers in pool.run(search_refused):
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
