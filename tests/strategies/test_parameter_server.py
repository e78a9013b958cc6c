"""Weights on parameter servers: the same numbers where they must be, exact counts everywhere.

Tolerance of the synchronous mode as in test_equivalence: 1e-5 relative after 50 shuffled steps.
"""

from __future__ import annotations

import contextlib
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.errors import NotDistributedError
from dtk.parameter_server.consistency_models import BoundedDelay, Sync

from strategies.test_equivalence import TOLERANCE
from support import bodies, cases
from support.bodies import digits, flat, served_with
from support.once import once
from support.served_bodies import check_mistake, exchanging, partitioned, task
from trainer.test_cases import plain as plain_case

MATRIX = [
    (2, "sgd momentum", "none", "tail of one"),
    (2, "adam", "global clipnorm", "short tail"),
    (2, "adamw", "clipvalue", "even"),
    (2, "loss scaling", "clipnorm", "short tail"),
    (2, "ema", "accumulation", "tail of one"),
]


TWO = pytest.mark.parametrize("backend, size", [("served", 2)])


def plain(*recipe):
    return once(bodies.train, *recipe, normalise=False)


@pytest.mark.full_but(
    "served-2-adam-global clipnorm-short tail",
)
@pytest.mark.parametrize(
    "backend, size, optimizer, clip, tail", [("served", *recipe) for recipe in MATRIX]
)
def test_synchronous_steps_equal_one_process(world, backend, size, optimizer, clip, tail):
    check(world(backend, size), (optimizer, clip, tail))


@pytest.mark.full("four to six processes: when steps may start is tested by itself")
@pytest.mark.parametrize("backend, size", [("served", 3)])
def test_backups_equal_one_process(world, backend, size):
    recipe = ("adam", "global clipnorm", "tail of one")
    check(world(backend, size), recipe, Sync(backup_workers=1))


def check(pool, recipe, *consistency):
    ((mine, logged),) = pool.run(
        bodies.train_served, *recipe, *consistency, timeout=120, meanwhile=lambda: plain(*recipe)
    )
    weights, history = plain(*recipe)
    assert np.linalg.norm(mine - weights) <= TOLERANCE * np.linalg.norm(weights)
    for name, values in history.items():
        np.testing.assert_allclose(logged[name], values, rtol=TOLERANCE, atol=TOLERANCE)


# What needs workers to speak with each other, Python on a worker, or an update inside a step.
NOT_SERVED = {
    "two optimizers",
    "gathered rows",
    "eager steps",
    "layers that an eager train step builds",
    "metrics of whole batches eagerly",
    "layers in float8",
    "own train step that logs its loss eagerly",
}

# The others have a synchronized normalisation or a mean over weights, which slices refuse.
SLICED = {
    "sparse embedding gradients clipped",
    "several outputs",
    "strings and ragged rows",
    "own train step",
    "own train step that logs numbers",
    "ragged inputs and outputs",
    "lists of inputs and positional arguments",
}


# What goes another way behind servers; a step behind them is the same step.
BY_SERVERS = {
    "evaluate and predict odd rows",
    "layers that a train step builds",
    "single batches",
}


@pytest.mark.full("a cheaper test holds its rule")
@TWO
@pytest.mark.parametrize(
    "name, consistency",
    [
        pytest.param(
            name,
            # Serial steps are whole batches: all but where they run is as in one process.
            "sync" if name in SLICED else BoundedDelay(0),
            marks=() if name in BY_SERVERS else pytest.mark.full,
        )
        for name in cases.CASES
        if name not in NOT_SERVED
    ],
    ids=str,
)
def test_features_of_fit(world, backend, size, name, consistency):
    cases.skip_if_later(name)
    (result,) = world(backend, size).run(
        bodies.run_served_case, name, consistency, timeout=120, meanwhile=lambda: plain_case(name)
    )
    expected = plain_case(name)
    assert result.keys() == expected.keys()
    for part, value in expected.items():
        np.testing.assert_allclose(result[part], value, rtol=2e-5, atol=2e-5, err_msg=part)


@contextlib.contextmanager
def slowed(process, share):
    """Let a process run only this share of the time, by stopping and continuing it."""
    over = threading.Event()

    def stutter():
        while not over.is_set():
            process.suspend()
            over.wait(0.2 * (1 - share))
            process.resume()
            time.sleep(0.2 * share)

    thread = threading.Thread(target=stutter, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        process.resume()


def staleness(consistency):
    """Statistics of 60 steps, one worker slowed down to a fifth; the steps of each, and logs."""
    strategy = served_with(consistency)
    x, y = digits()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x[:64], y[:64], batch_size=16, verbose=0)
    statistics = []

    class Slow(keras.callbacks.Callback):
        """From the second step on: functions are made before, on every task, slow ones too."""

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                stack.enter_context(slowed(task("worker", 0), 0.2))

        def on_epoch_end(self, epoch, logs=None):
            statistics.append(strategy.schedule_of(model).statistics)

    with exchanging(strategy, None) as moved, contextlib.ExitStack() as stack:
        history = model.fit(x[:960], y[:960], batch_size=16, verbose=0, callbacks=[Slow()]).history
    assert int(model.optimizer.iterations.numpy()) == 64
    return statistics[0], [worker["steps"] for worker in moved], history


@pytest.mark.full_but("4-served-2")
@TWO
@pytest.mark.parametrize("tau", [4, None])
def test_a_slow_worker_is_waited_for_after_tau_steps(world, backend, size, tau):
    consistency = "async" if tau is None else BoundedDelay(tau)
    ((seen, (slow, fast), history),) = world(backend, size).run(staleness, consistency, timeout=120)
    assert seen.steps == 60
    if tau is None:
        assert fast > 1.5 * slow
        assert seen.max <= 4, "two steps of each worker may wait to be applied"
        return
    assert seen.max <= tau
    assert seen.lag == tau, "or the slow worker was not slow enough for the test to mean much"
    assert history["staleness_max"] == [seen.max]


def tables(consistency, parts):
    """Nine steps of an embedding, in parts where there are servers: weights, traffic and more."""
    keras.utils.set_random_seed(5)
    strategy = served_with(consistency)
    tokens = np.random.default_rng(0).integers(0, 1001, (48, 6))
    labels = (tokens.sum(1) % 4).astype("int64")
    with partitioned(strategy, parts), exchanging(strategy, None) as moved:
        with bodies.scope_of(strategy):
            model = keras.Sequential(
                [
                    keras.Input((6,), dtype="int32"),
                    keras.layers.Embedding(1001, 8),
                    keras.layers.Flatten(),
                    keras.layers.Dense(4),
                ]
            )
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        history = model.fit(tokens, labels, batch_size=16, epochs=3, verbose=0).history
    stored = model.layers[0]._embeddings._value
    devices = {shard.device for shard in getattr(stored, "variables", [])}
    predicted = model.predict(tokens, verbose=0)
    return flat(model.get_weights()), history, moved, devices, predicted


@pytest.mark.full_but("sync-2-served-2")
@TWO
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("consistency", ["sync", BoundedDelay(0)], ids=str)
def test_tables(world, backend, size, consistency, parts):
    ((weights, history, moved, devices, predicted),) = world(backend, size).run(
        tables, consistency, parts
    )
    expected, expected_history, _, _, expected_predictions = once(tables, None, 0)
    assert np.linalg.norm(weights - expected) <= TOLERANCE * np.linalg.norm(expected)
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(predicted, expected_predictions, rtol=1e-4, atol=1e-5)
    assert len(devices) == (2 if parts == 2 else 0)
    table = 1001 * 8 * 4
    steps = sum(worker["steps"] for worker in moved)
    assert sum(worker["pulled"] for worker in moved) < steps * table / 4, "pulled whole tables"
    pushed = sum(worker["pushed"] for worker in moved)
    assert pushed < steps * table / 4, "pushed whole tables"
    # In a buffer declared empty, rows once counted nothing. 8 times 6 tokens, few of them twice.
    dense, rows = 4 * (6 * 8 * 4 + 4), 40 * (8 + 4 * 8)
    assert pushed >= steps * (dense + rows), "did not count the rows it pushed"


def placement():
    """Bytes on each server after a model was made, and of its largest variable."""
    strategy = served_with("async")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((100,)), *(keras.layers.Dense(n) for n in (300, 100, 300, 10))]
        )
    return strategy.placement, max(4 * int(np.prod(v.shape)) for v in model.trainable_variables)


@TWO
def test_variables_are_spread_by_bytes(world, backend, size):
    ((placed, largest),) = world(backend, size).run(placement)
    assert len(placed) == 2
    assert max(placed) - min(placed) <= largest, placed


def _fit(consistency, layers, **compiled):
    x, y = digits()
    with served_with(consistency).scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, **compiled)
    model.fit(x[:32], y[:32], batch_size=16, verbose=0)


def _no_gradient():
    class Idle(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            return {"loss": tf.reduce_mean(self(x))}

    with served_with("async").scope():
        model = Idle()
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)


MISTAKES = {
    "eager steps": (
        lambda: _fit("async", [keras.layers.Dense(10)], run_eagerly=True),
        *(ValueError, "run_eagerly=True", "dtk.auto_strategy()"),
    ),
    "no gradient": (_no_gradient, NotDistributedError, "no gradient", "self.optimizer.apply"),
    "too many backups": (
        lambda: _fit(Sync(2), [keras.layers.Dense(10)]),
        *(ValueError, "backup_workers=2", "use at most 1"),
    ),
}


@TWO
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(world, backend, size, name):
    check_mistake(world(backend, size), __name__, name)
