"""The batch changes between epochs: by a schedule, in place of decay, or by trial."""

from __future__ import annotations

import contextlib
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import dtk
from dtk.callbacks.batch_size import (
    bounds,
    grow,
    last_good,
    rates_of,
    trial_sizes,
)
from dtk.compat import tf_replicas
from dtk.trainer.replica import step_trial
from dtk.trainer.strategy import ShuffleSeed

from callbacks.bodies import (
    BATCH,
    MANY,
    Crash,
    compiled,
    crash_at,
    difference,
    epoch_recorder,
    fitted,
    recorder,
    strategy,
    train,
    untried,
)

two_ranks = pytest.mark.worlds(("collective", 2))

# 24 rows at 6, 6, 12, 7, 7.
STEPS = [4, 4, 2, 4, 4]

BATCHES = [[6] * 4, [6] * 4, [12] * 2, [7, 7, 7, 3], [7, 7, 7, 3]]


def epochs_of(order, steps):
    """Rows of every step, epoch by epoch."""
    order = iter(order)
    return [[next(order) for _ in range(n)] for n in steps]


def merged(results):
    """Ranks' slices of every step put together."""
    return [sum(parts, []) for parts in zip(*(order for order, _ in results), strict=True)]


def noting(chosen):
    """A model, and a list of the rows of its steps."""
    order = []

    class Rows(keras.layers.Layer):
        def call(self, rows):
            def note(values):
                order.append(values.numpy().ravel().astype(int).tolist())

            tf.py_function(note, [rows], [])
            return rows

    with chosen.scope():
        model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    untried(model)
    return model, order


def batch_sizes(kind="world", form="arrays", initial_epoch=0):
    """Rows of every step as the model sees them, and what the progress bar is told."""
    keras.utils.set_random_seed(3)
    model, order = noting(strategy(kind))
    x = np.arange(24.0, dtype="float32")[:, None]
    if form == "arrays":
        given = {"x": x, "y": x, "batch_size": 5, "sample_weight": x[:, 0]}
    elif form == "tensors":
        given = {"x": tf.constant(x), "y": tf.constant(x)}
    else:
        given = {"x": tf.data.Dataset.from_tensor_slices((x, x)).batch(5)}
    seen = []
    schedule = dtk.callbacks.BatchSizeSchedule([(2, 6), 12, 7])
    given |= {"epochs": 5, "initial_epoch": initial_epoch, "verbose": 0}
    model.fit(**given, callbacks=[schedule, recorder(seen)])
    return order, seen


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
@pytest.mark.parametrize("form", ["arrays", "dataset"])
def test_two_ranks(pool, form):
    results = pool.run(batch_sizes, "world", form)
    epochs = epochs_of(merged(results), STEPS)
    assert [[len(step) for step in epoch] for epoch in epochs] == BATCHES
    assert all(sorted(sum(epoch, [])) == list(range(24)) for epoch in epochs)
    told = [steps for _, step, steps in results[0][1] if step == 0]
    # A dataset's new batches are counted while the first epoch of their size runs.
    assert told == (STEPS if form == "arrays" else [None, 4, None, None, 4])


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("form", ["arrays", "tensors", "dataset"])
def test_one_process_and_the_order_is_kerass(alone, form):
    [(order, _)] = alone.run(batch_sizes, "world", form)
    epochs = epochs_of(order, STEPS)
    assert [[len(step) for step in epoch] for epoch in epochs] == BATCHES
    assert all(sorted(sum(epoch, [])) == list(range(24)) for epoch in epochs)
    # The seed decides the order of rows, whatever the size they are cut to.
    assert len({tuple(sum(epoch, [])) for epoch in epochs}) == 1
    if form == "arrays":  # sizes belong to epochs, not to starts
        [(order, _)] = alone.run(batch_sizes, "world", "arrays", 2)
        later = epochs_of(order, STEPS[2:])
        assert [[len(step) for step in epoch] for epoch in later] == BATCHES[2:]


# A batch that grows instead of the rate falling: the noise, rate / batch, is the schedule's.

rates = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=20)


@pytest.mark.parametrize(
    "given, largest, plan",
    [
        ([1.0, 0.2, 0.04], None, [(128, 1.0), (640, 1.0), (3200, 1.0)]),  # a = 5, as in the paper
        ([1.0, 0.2, 0.04], 640, [(128, 1.0), (640, 1.0), (640, 0.2)]),
        ([0.5, 1.0, 0.5, 1.0], None, [(128, 0.5), (128, 1.0), (256, 1.0), (128, 1.0)]),
    ],
)
def test_plans_of_growing(given, largest, plan):
    assert grow(given, 128, largest) == [(size, pytest.approx(rate)) for size, rate in plan]


@given(rates, st.integers(1, 4096), st.none() | st.integers(0, 4096))
def test_noise_is_that_of_the_schedule(schedule, batch_size, more):
    largest = None if more is None else batch_size + more
    for (size, rate), wanted in zip(grow(schedule, batch_size, largest), schedule, strict=True):
        assert rate / size == pytest.approx(wanted / batch_size)
        assert batch_size <= size <= (largest or size)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(1e-6, 10.0)), min_size=1, max_size=5))
def test_a_function_is_as_good_as_a_list(pairs):
    flat = [rate for count, rate in pairs for _ in range(count)]
    assert rates_of(pairs, len(flat)) == rates_of(flat.__getitem__, len(flat)) == flat
    assert rates_of(pairs, len(flat) + 2) == [*flat, flat[-1], flat[-1]]


def grown(max_batch_size=None, form="arrays", kind="world"):
    strategy(kind)  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    growing = dtk.callbacks.GrowBatchInsteadOfDecay(
        [0.1, 0.05, 0.025, 0.0125], max_batch_size, batch_size=given
    )
    return train([growing], keras.optimizers.SGD(1.0, momentum=0.9), form=form, kind=kind)


# 96 rows at 8, 16, 32, 64, or no more than 32.
# Where Keras reads beyond the data, an optimizer on a CPU counts that step; one on a GPU may.
@pytest.mark.not_on_pretended_gpus("counts of steps differ")
@two_ranks
def test_two_ranks_train_as_one_process(pool, alone):
    first, second = pool.run(grown, 32, "dataset")
    steps, seen, weights, _ = first
    assert steps == [12, 6, 3, 3]
    assert seen == pytest.approx([0.1, 0.1, 0.1, 0.05])
    assert second[:2] == first[:2]
    [(_, _, whole, _)] = alone.run(grown, 32, "dataset")
    assert difference(weights, whole) <= 1e-5


@pytest.mark.full("a cheaper test holds its rule")
def test_one_process_has_no_limit_but_its_rows(alone):
    [(steps, seen, _, _)] = alone.run(grown)
    assert steps == [12, 6, 3, 2]
    assert seen == pytest.approx([0.1] * 4)


# Sizes found by trial.

NAN = math.nan


@pytest.mark.parametrize(
    "initial, previous, ratio, maximum, expected",
    [
        (256, 256, 1.0, 2**20, (256, 512)),
        (256, 256, 4.0, 2**20, (256, 512)),  # a rate that rose lowers nothing
        (256, 512, 0.25, 2**20, (512, 1024)),  # 256 / sqrt(1/4)
        (256, 512, 0.5, 2**20, (362, 1024)),
        (256, 2048, 0.25, 2**20, (1024, 4096)),  # half the last one is more
        (256, 256, 0.01, 2**20, (2560, 512)),  # above the upper bound
        (256, 2**20, 1.0, 2**20, (2**19, 2**20)),
    ],
)
def test_bounds(initial, previous, ratio, maximum, expected):
    assert bounds(initial, previous, ratio, maximum) == expected


@pytest.mark.parametrize(
    "lower, upper, multiple, expected",
    [
        (64, 128, 64, [64, 128]),  # 64, 90.5, 128
        (128, 512, 64, [128, 192, 256, 384, 512]),
        (2560, 512, 64, [512]),
        (20, 40, 64, [64]),
        (8, 32, 1, [8, 11, 16, 23, 32]),
    ],
)
def test_trial_sizes(lower, upper, multiple, expected):
    assert trial_sizes(lower, upper, multiple) == expected


@pytest.mark.parametrize(
    "losses, best, tried",
    [
        ([1.0, 0.9, 0.8], 2, 3),
        ([1.0, 1.01, 1.0], 2, 3),  # exactly the margin is good
        ([1.0, 1.02, 0.5], 0, 2),  # stops at the first that is worse
        ([1.0, 0.5, 1.005], 2, 3),  # against the first, not the best
        ([1.0, NAN, 0.5], 0, 2),
        ([1.0, math.inf, 0.5], 0, 2),
        ([NAN, 0.5], None, 1),
        ([math.inf, 0.5], None, 1),
        ([-1.0, -0.995, -0.98], 1, 3),
    ],
)
def test_the_last_good_one_wins(losses, best, tried):
    found, told = last_good(range(len(losses)), losses.__getitem__, 0.01)
    assert found == best
    assert len(told) == tried


# By hand from CNTK's AdaptiveMinibatchSizing and SearchForBestMinibatchSize (microsoft/CNTK,
# Source/SGDLib/SGD.cpp), for minibatchSize=256 and at most 2030: what the rate is divided by before
# an epoch, the losses of the sizes it tries, and its choice. Sizes grow by sqrt 2, and are then
# rounded.
CNTKS = [
    (1, {256: 1.0, 384: 1.01, 512: 1.011}, 384),  # 256, 362, 512; 1.01 is the most that is good
    (1, {256: 2.0, 384: 1.9, 512: 2.02, 704: 1.8}, 704),  # ..., 724; 1024 is more than 2 x 384
    (16, {1024: 3.0}, 1024),  # from 256 / sqrt(1 / 16), more than 704 / 2; 1448 is over 2 x 704
    (1, {1024: 1.0, 1472: 1.02}, 1024),  # 1448; 2048 is not tried after a bad one
    (16, {2030: 9.0}, 2030),  # 256 / sqrt(1 / 256) is over the maximum, which CNTK takes untried
]


def searched_as_cntk():
    """The sizes tried before each epoch, and the epochs' steps of 4096 rows and rates."""
    tried, steps, rates = [], [], []

    class Given(dtk.callbacks.AutoBatchSize):
        def on_epoch_begin(self, epoch, logs=None):
            divisor, self.losses, _ = [(1, {}, 256), *CNTKS][epoch]
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate / divisor
            super().on_epoch_begin(epoch, logs)
            tried.append(list(self.trials))

        def _trial(self, size):
            return self.losses[size]

    model = compiled(keras.optimizers.SGD(1e-6))
    watching = [Given(max_batch_size=2030), epoch_recorder(steps, rates)]
    fitted(model, *watching, rows=4096, batch_size=256, epochs=6)
    return tried, steps, rates


def test_sizes_are_those_of_cntk(alone):
    """Before the second epoch CNTK may try more than twice the size; here a bad loss ends that."""
    [(tried, steps, rates)] = alone.run(searched_as_cntk)
    assert tried == [[], *(list(losses) for _, losses, _ in CNTKS)]
    sizes = [256, *(size for *_, size in CNTKS)]
    assert steps == [math.ceil(4096 / size) for size in sizes]
    divisors = np.cumprod([1, *(divisor for divisor, *_ in CNTKS)])
    assert rates == pytest.approx(1e-6 * np.array(sizes) / 256 / divisors)


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
    kept = step_trial.Snapshot(step_trial.changed_by_training(model))._kept
    numpy_state = np.random.get_state(legacy=False)["state"]
    return (
        [value.tobytes() for _, value in kept.values()],
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
            loss, same = self._compared(super()._trial, size)
            left.append([size, *same])
            return loss

        def _train(self, size):
            loss, same = self._compared(super()._train, size)
            within.append(same)
            return loss

        def _compared(self, work, size):
            before, loss = all_state(self.model), work(size)
            pairs = zip(before, all_state(self.model), strict=True)
            return loss, [one == other for one, other in pairs]

    keras.utils.set_random_seed(3)
    searching = Watched(trial_batches=3, multiple=8, margin=100.0)
    fitted(drawing(kind), searching, rows=MANY, epochs=2)
    return left, within, searching.trials


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_a_trial_leaves_no_bit_changed(pool):
    check_trials(pool.run(tried, timeout=90))


@pytest.mark.full("a cheaper test holds its rule")
def test_a_trial_leaves_no_bit_changed_on_two_devices(alone):
    check_trials(alone.run(tried, "mirrored", timeout=90))


def searched(rate=1e-6, form="arrays", epochs=5, **options):
    strategy()  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    searching = dtk.callbacks.AutoBatchSize(multiple=8, batch_size=given, **options)
    steps, rates, _, _ = train([searching], keras.optimizers.SGD(rate), epochs, form)
    return steps, rates, searching.trials


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_the_batch_doubles_at_most_and_the_rate_with_it(pool):
    """With a rate so small that every size is as good as another."""
    for steps, rates, trials in pool.run(searched, 1e-6, "dataset", 3, timeout=90):
        assert steps == [12, 6, 3]
        assert rates == pytest.approx([1e-6, 2e-6, 4e-6])
        assert list(trials) == [8, 16, 24, 32]


def searched_otherwise():
    return searched(frequency=2, scale_rate=False), searched(1e30, epochs=2)


@pytest.mark.full("a cheaper test holds its rule")
def test_every_second_epoch_and_a_rate_left_alone_and_what_is_no_number_is_bad(alone):
    [((steps, rates, _), (all_steps, _, trials))] = alone.run(searched_otherwise)
    assert steps == [12, 12, 6, 6, 3]
    assert rates == pytest.approx([1e-6] * 5)
    assert all_steps == [12] * 2
    assert list(trials) == [8] and not math.isfinite(trials[8])


def rows_of_a_trial():
    """Rows of every batch of 8 of 24, in a script that sets no seed: 3, a trial's 2, and 3."""
    chosen = strategy()
    before, chosen.shuffle_seed = chosen.shuffle_seed, ShuffleSeed(7)
    chosen.shuffle_seed.restore(7, in_force=tf_replicas.global_seed())
    model, order = noting(chosen)
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


@pytest.mark.full_but("shuffled-4")
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
