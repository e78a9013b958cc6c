"""Blocks of local steps: what is averaged, when, and that nothing is left apart."""

from __future__ import annotations

import functools
import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.local import NullCommunicator
from dtk.exchange import BlockMomentum, Delayed, Dense, ModelAveraging, Quantized, WarmStart
from dtk.exchange.contract import BatchPart, ExchangeState, Trained
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.fit import BeforeCallbacks
from dtk.trainer.replica.step_trial import Snapshot, changed_by_training

from exchange.exchanged import (
    ROUNDING,
    apart,
    exchanging,
    make,
    perceptron,
    plain,
    same_everywhere,
    train,
)
from support import bodies, cases

two = pytest.mark.worlds(("collective", 2))
two_and_three = pytest.mark.worlds(("collective", 2), ("collective", 3))


def combined(value, locals_of_rounds, rows=None):
    """One weight: start, local values of each rank in each round -> the weight after each."""
    communicator = bodies.strategy().communicator
    state = ExchangeState(communicator, "CPU:0")
    weight, slot = tf.Variable(1.0), tf.Variable(5.0)
    op = value.init(communicator, state, Trained([weight], [slot]))
    after = []
    for of_ranks in locals_of_rounds:
        local = of_ranks[communicator.rank]
        count = rows or [1] * communicator.size
        share = count[communicator.rank] / sum(count)
        part = BatchPart(tf.constant(sum(count), tf.int64), tf.constant(share, tf.float64))
        slot.assign(5.0)
        op.update([tf.constant(0.0)], part)
        weight.assign(local)
        op.count(part)
        after.append((float(weight), float(slot), bool(op.is_closed())))
    return after


@two
def test_blocks_end_as_the_vectors_of_the_originals(pool):
    """W = 1, locals .9 and .7: V = .2; then changes of -.1 and -.3: V = .3."""
    for nesterov, expected in ((True, [0.7, 0.25]), (False, [0.8, 0.5])):
        value = BlockMomentum(block_size=2, nesterov=nesterov)
        locals_ = [(0.9, 0.7), (expected[0] - 0.1, expected[0] - 0.3)]
        for after in pool.run(combined, value, locals_):
            np.testing.assert_allclose([weight for weight, _, _ in after], expected, rtol=1e-6)
            assert [slot for _, slot, _ in after] == [0.0, 0.0], "local momentum is forgotten"
            assert all(together for _, _, together in after)
    # An open block leaves weights apart, and averaging weighs by rows.
    first, second = pool.run(combined, BlockMomentum(block_size=4), [(0.9, 0.7)])
    assert first == [(pytest.approx(0.9), 5.0, False)]
    assert second == [(pytest.approx(0.7), 5.0, False)]
    for after in pool.run(combined, ModelAveraging(period=2), [(0.9, 0.5)], [3, 1]):
        assert after == [(pytest.approx(0.8), 5.0, True)]


def moved_by(value, changes, rows=None, dtype="float32"):
    """How far one weight is moved by each block of a world whose other ranks change nothing."""
    communicator, weight, after = NullCommunicator(0, 4), tf.Variable(0.0, dtype=dtype), []
    state = ExchangeState(communicator, "CPU:0")
    op = value.init(communicator, state, Trained([weight], []))

    @tf.function
    def step(count, change):
        part = BatchPart(count, tf.constant(0.25, tf.float64))
        op.update([tf.zeros([], dtype)], part)
        weight.assign_add(change)
        op.count(part)

    for index, change in enumerate(changes):
        before = float(weight)
        count = value.block_size if rows is None else rows[index]
        step(tf.constant(count, tf.int64), tf.constant(change, dtype))
        op.close()
        after.append(float(weight) - before)
    return after


@pytest.mark.parametrize("momentum, eta", [(None, 0.75), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_blocks_changes_go_into_the_weights_over_several(momentum, eta, rate):
    """In all 1 + eta times as far with Nesterov's momentum: the docstring once said once."""
    for nesterov, gain in ((False, 1.0), (True, 1.0 + eta)):
        value = BlockMomentum(64, momentum=momentum, rate=rate, nesterov=nesterov)
        moved = moved_by(value, [100.0] + [0.0] * 60)
        parts = 100.0 * rate * gain * (1 - eta) * eta ** np.arange(61)
        np.testing.assert_allclose(moved, parts, rtol=1e-4, atol=1e-4)
        assert sum(moved) == pytest.approx(100.0 * rate * gain, rel=1e-4)


def test_blocks_keep_the_digits_of_float64_weights():
    """Broke as momentum and shares were float32: weights moved by 1e-8 too little or too much."""
    value = BlockMomentum(64, momentum=0.3)
    [moved] = moved_by(value, [0.1], dtype="float64")
    assert moved == pytest.approx(0.1 * 0.7 * 1.3, rel=1e-14)
    # The others' means are zero: what is left of three rows of nine is a third.
    communicator, weight = NullCommunicator(0, 4), tf.Variable(0.1, dtype="float64")
    state = ExchangeState(communicator, "CPU:0")
    op = ModelAveraging(1).init(communicator, state, Trained([weight], []))
    part = BatchPart(tf.constant(9, tf.int64), tf.constant(1 / 3, tf.float64))
    op.update([tf.zeros([], "float64")], part)
    op.count(part)
    assert float(weight) == pytest.approx(0.1 / 3, rel=1e-14)


def test_less_than_a_block_counts_for_less_and_a_rate_takes_nesterovs_gain_back():
    value = BlockMomentum(64, rate=4 / (2 * 4 - 1))
    assert sum(moved_by(value, [100.0] + [0.0] * 60)) == pytest.approx(100.0, rel=1e-4)
    value = BlockMomentum(64, nesterov=False)
    moved = moved_by(value, [100.0] + [0.0] * 60, [16] + [64] * 60)
    assert sum(moved) == pytest.approx(100.0 * (1 - 0.75**0.25) / (1 - 0.75), rel=1e-4)


def test_the_step_that_reaches_the_samples_of_a_warm_start_is_the_last_exact_one():
    """Delayed applies nothing in its first step, by which it is told apart."""
    communicator = NullCommunicator(0, 2)
    state, applied = ExchangeState(communicator, "CPU:0"), tf.Variable(0.0)
    op = WarmStart(Delayed(), samples=6).init(communicator, state, Trained())
    part, seen = BatchPart(tf.constant(2, tf.int64), tf.constant(0.5, tf.float64)), []
    for step in range(1, 6):
        gradients, is_applied = op.update([tf.constant(float(step))], part)
        if is_applied is None or is_applied:
            applied.assign_add(gradients[0])
        op.count(part)
        seen.append(float(applied))
    assert seen == [1, 3, 6, 6, 10], "steps 1 to 3 at once, 4 a step later"


def apart_by_hand(size, eta, nesterov, momentum, block, rows=75, batch=16, epochs=2):
    """Block momentum over `size` models that one process trains one after the other.

    A block holds `block` steps; an epoch's last may hold fewer.
    """
    x, y = cases.rows(rows)
    models = [perceptron(None, keras.optimizers.SGD(0.05, momentum=momentum)) for _ in range(size)]
    start = [w.astype("float64") for w in models[0].get_weights()]
    moved = [np.zeros_like(w) for w in start]
    for _ in range(epochs):
        batches = [(x[i : i + batch], y[i : i + batch]) for i in range(0, rows, batch)]
        for first in range(0, len(batches), block):
            seen = 0
            for images, labels in batches[first : first + block]:
                seen += len(images)
                cuts = np.cumsum(
                    [len(images) // size + (r < len(images) % size) for r in range(size)]
                )
                for model, (a, b) in zip(models, itertools.pairwise([0, *cuts]), strict=True):
                    if b > a:
                        model.train_on_batch(images[a:b], labels[a:b])
            power = eta ** (seen / (block * batch))
            for i, before in enumerate(start):
                changes = sum(before - model.get_weights()[i] for model in models)
                moved[i] = power * moved[i] + (1 - power) * changes
                start[i] = before - moved[i] * (1 + power if nesterov else 1)
            for model in models:
                model.set_weights(start)
                for variable in model.optimizer.variables:
                    if variable.path.endswith("_momentum"):
                        variable.assign(keras.ops.zeros_like(variable))
    return bodies.flat(start)


def trained_apart(value, momentum, rows=75, batch=16, epochs=2):
    x, y = cases.rows(rows)
    with exchanging(value) as strategy:
        model = perceptron(strategy, keras.optimizers.SGD(0.05, momentum=momentum))
        history = model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), history.history


@pytest.mark.full_but("collective-2-True")
@two_and_three
@pytest.mark.parametrize("nesterov", [True, False])
def test_block_momentum_trains_as_its_equations_say(pool, nesterov):
    value = BlockMomentum(block_size=48, nesterov=nesterov)
    eta = 1 - 1 / pool.size
    expected = apart_by_hand(pool.size, eta, nesterov, 0.9, 3)
    results = pool.run(trained_apart, value, 0.9)
    assert apart(same_everywhere(results), expected) <= ROUNDING
    assert all(own == results[0][1] for _, own in results), "logs are the same everywhere"


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_averaging_every_step_of_plain_sgd_is_one_process(pool):
    """The mean of steps from the same weights is the step of the mean."""
    weights, history, _ = plain("sgd", 160)
    results = pool.run(train, ModelAveraging(period=8), "sgd", 160)
    assert apart(same_everywhere(results), weights) <= ROUNDING
    np.testing.assert_allclose(results[0][1]["accuracy"], history["accuracy"])


def around_open_blocks():
    """What single test batches, `fit` and `evaluate` make of a block that is open.

    Returns weights and moving statistics as everything finds them, and how much `evaluate` changes
    the slots.
    """
    x, y = cases.rows(48)
    with exchanging(ModelAveraging(period=10_000)) as strategy:
        build = functools.partial(cases.small, sync=False)
        model = cases.compiled(strategy, build, optimizer=make("momentum"))
        seen = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: found.append(bodies.flat(model.get_weights())),
            on_epoch_end=lambda epoch, logs: found.append(bodies.flat(model.get_weights())),
        )
        found, own = [], []
        for look in (
            lambda: model.test_on_batch(x[:16], y[:16]),
            lambda: model.predict_on_batch(x[:2]),
            lambda: model.evaluate(x, y, verbose=0),
            lambda: model.fit(x, y, batch_size=16, verbose=0, callbacks=[seen]),
        ):
            for i in range(3):
                model.train_on_batch(x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16])
            own.append(bodies.flat(model.get_weights()))
            look()
            if len(own) < 4:
                found.append(bodies.flat(model.get_weights()))
        slots = bodies.flat([v.numpy() for v in model.optimizer.variables])
        model.evaluate(x, y, verbose=0)
        after = bodies.flat([v.numpy() for v in model.optimizer.variables])
    return own, found, float(abs(after - slots).max())


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_a_block_is_closed_before_anything_looks_at_the_weights(pool):
    """Single batches and `fit` once went on from rank 0's weights; callbacks saw a rank's own."""
    (own, found, changed), (other, others, also) = pool.run(around_open_blocks)
    for i in range(4):
        assert not np.array_equal(own[i], other[i])
        np.testing.assert_allclose(found[i], (own[i] + other[i]) / 2, atol=1e-6)
    for one, another in zip(found, others, strict=True):
        assert np.array_equal(one, another)
    assert changed == also == 0.0, "evaluating leaves the optimizer's state alone"


def own_logs(value):
    """The history of a train step that returns a loss which no metric counts."""

    class Own(keras.Sequential):
        def train_step(self, data):
            images, labels = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=labels, y_pred=self(images, training=True))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"own": loss}

    x, y = cases.rows(48)
    with exchanging(value) as strategy:
        with bodies.scope_of(strategy):
            keras.utils.set_random_seed(3)
            model = Own([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
            model.compile(optimizer=make("sgd"), loss=cases.crossentropy())
        return model.fit(x, y, batch_size=16, epochs=2, verbose=0).history["own"]


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
@pytest.mark.parametrize("value", [BlockMomentum(10_000), Quantized(8)], ids=str)
def test_numbers_that_no_metric_counts_are_the_same_everywhere(pool, value):
    """ReduceLROnPlateau and the like once decided on each rank by its own loss."""
    first, second = pool.run(own_logs, value)
    assert first == second


def test_what_else_a_callback_puts_into_the_logs_is_not_sent():
    """Ranks without a secret refuse to send an object of a script's own class."""

    def gather(numbers):
        assert numbers == {"score": 1.0, "steps": 2}
        return [numbers, {"score": 3.0, "steps": 2}]

    strategy = types.SimpleNamespace(world=types.SimpleNamespace(allgather_object=gather))
    trainer = types.SimpleNamespace(
        has_local_steps=True,
        model=types.SimpleNamespace(),
        synchronize_weights=lambda: None,
        strategy=strategy,
        recorder=types.SimpleNamespace(end_steps=lambda: None),
    )
    logs = {"score": 1.0, "steps": 2, "own": object()}
    BeforeCallbacks(trainer).on_epoch_end(0, logs)
    assert (logs["score"], logs["steps"]) == (2.0, 2)


def normalised(value, rows):
    """Moving statistics after batches that are cut unevenly."""
    x, y = cases.rows(rows)
    with exchanging(value) as strategy:
        model = cases.compiled(strategy, lambda: cases.small(sync=False), optimizer=make("sgd"))
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights())


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_moving_statistics_are_exact_in_a_warm_start(pool):
    """19 rows are 16 and 3, and the 3 are two and one: they weigh by their rows."""
    warm = pool.run(normalised, WarmStart(BlockMomentum(64), samples=10_000), 19)
    dense = pool.run(normalised, Dense(), 19)
    for one, other in zip(warm, dense, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def tried(value):
    """What is remembered before some training, after it, and after taking it back."""

    def remembered():
        return {name: item["value"] for name, item in state().items()}

    x, y = cases.rows(64)
    with exchanging(value) as strategy:
        model = perceptron(strategy, make("sgd"))
        state = trainer_of(model).exchange_state
        model.fit(x, y, batch_size=16, verbose=0)
        found = [remembered()]
        kept = Snapshot(changed_by_training(model))
        model.fit(x, y, batch_size=16, verbose=0)
        found.append(remembered())
        kept.restore()
        found.append(remembered())
    return found


@pytest.mark.full("a cheaper test holds its rule")
@two
@pytest.mark.parametrize("value", [Quantized(1), BlockMomentum(32)], ids=str)
def test_training_that_is_taken_back_leaves_no_trace(pool, value):
    """AutoBatchSize trains a little with each size, and puts everything back."""
    before, changed, after = pool.run(tried, value)[0]
    assert before.keys() == changed.keys() == after.keys() and before
    assert any(not np.array_equal(before[name], changed[name]) for name in before)
    for name, kept in before.items():
        assert np.array_equal(after[name], kept), name


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@two
def test_blocks_within_one_execution(pool):
    arguments = BlockMomentum(block_size=32), "momentum", 155, 16, 2
    alone = pool.run(train, *arguments)
    several = pool.run(train, *arguments, {"steps_per_execution": 5})
    assert apart(same_everywhere(several), same_everywhere(alone)) <= ROUNDING
