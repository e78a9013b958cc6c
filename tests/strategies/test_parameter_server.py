"""Weights on parameter servers: the same numbers where they must be, exact counts everywhere.

Tolerance of the synchronous mode as in test_equivalence: 1e-5 relative after 50 shuffled steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.parameter_server.consistency_models import BoundedDelay, Sync

from once import once
from strategies import bodies, cases, served_bodies
from strategies.test_cases import plain as plain_case
from strategies.test_equivalence import TOLERANCE

MATRIX = [
    (1, "adam", "none", "short tail"),
    (2, "sgd momentum", "none", "tail of one"),
    (2, "adam", "global clipnorm", "short tail"),
    (2, "adamw", "clipvalue", "even"),
    (2, "loss scaling", "clipnorm", "short tail"),
    (2, "ema", "accumulation", "tail of one"),
    (3, "sgd momentum", "clipnorm", "tail of one"),
    (3, "adam", "accumulation", "short tail"),
]


TWO, THREE = (pytest.mark.parametrize("backend, size", [("served", size)]) for size in (2, 3))


def plain(*recipe):
    return once(bodies.train, *recipe, normalise=False)


@pytest.mark.parametrize(
    "backend, size, optimizer, clip, tail", [("served", *recipe) for recipe in MATRIX]
)
def test_synchronous_steps_equal_one_process(world, backend, size, optimizer, clip, tail):
    check(world(backend, size), (optimizer, clip, tail))


@THREE
@pytest.mark.parametrize("consistency", [Sync(backup_workers=1), BoundedDelay(0)], ids=str)
def test_backups_and_serial_steps_equal_one_process(world, backend, size, consistency):
    check(world(backend, size), ("adam", "global clipnorm", "tail of one"), consistency)


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
    "layers in float8",
    "own train step that logs its loss eagerly",
    "outputs with a tail of one eagerly",
}

# The others have a synchronized normalisation or a mean over weights, which slices refuse.
SLICED = {
    "sparse embedding gradients clipped",
    "several outputs",
    "datasets of dicts",
    "strings and ragged rows",
    "subclassed models built late",
    "own train step",
    "own train step that logs numbers",
    "ragged inputs and outputs",
    "lists of inputs and positional arguments",
    "outputs with a tail of one",
}


@TWO
@pytest.mark.parametrize(
    "name, consistency",
    [
        # Serial steps are whole batches: all but where they run is as in one process.
        *(
            (name, "sync" if name in SLICED else BoundedDelay(0))
            for name in cases.CASES
            if name not in NOT_SERVED
        ),
    ],
    ids=str,
)
def test_features_of_fit(world, backend, size, name, consistency):
    (result,) = world(backend, size).run(
        bodies.run_served_case, name, consistency, timeout=120, meanwhile=lambda: plain_case(name)
    )
    expected = plain_case(name)
    assert result.keys() == expected.keys()
    for part, value in expected.items():
        np.testing.assert_allclose(result[part], value, rtol=2e-5, atol=2e-5, err_msg=part)


@THREE
@pytest.mark.parametrize(
    "consistency", ["sync", "async", BoundedDelay(0), BoundedDelay(2)], ids=str
)
def test_every_gradient_is_applied_once(world, backend, size, consistency):
    """A lost update, or one applied twice, would show in the sum of constant gradients."""
    ((weights, iterations, history),) = world(backend, size).run(
        served_bodies.every_gradient_once, consistency
    )
    assert iterations == 100
    np.testing.assert_allclose(weights, [-1.0, -2.0, -3.0], rtol=1e-5)
    assert history["loss"][0] == history["loss"][0]  # a number


@THREE
@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_fit_that_was_left_leaves_nothing_behind(world, backend, size, consistency):
    """Steps of the first `fit` that nobody applied must not be applied by the second."""
    ((first, second),) = world(backend, size).run(served_bodies.left_and_fitted_again, consistency)
    assert first <= 5 and second == 10


def test_the_end_of_an_epoch_is_told_once():
    """Wrapped anew in each epoch, the validation's iterator ended in a RecursionError."""
    from keras.src.backend.tensorflow.trainer import TFEpochIterator

    from dtk.trainer import epoch_data

    plain = tf.distribute.get_strategy()
    iterator = TFEpochIterator(x=np.zeros((4, 1)), batch_size=2, distribute_strategy=plain)
    ends = []
    for _ in range(3):
        epoch_data.at_end_of_data(iterator, lambda: ends.append("end"))
        list(iterator._enumerate_iterator())
    assert ends == ["end"] * 3


@TWO
@pytest.mark.parametrize("tau", [0, 1, 4])
def test_a_slow_worker_stays_within_the_bound(world, backend, size, tau):
    (seen,) = world(backend, size).run(
        served_bodies.staleness, BoundedDelay(tau), True, timeout=120
    )
    assert seen["max"] <= tau and seen["lag"] <= tau
    assert seen["steps"] == 60 and seen["iterations"] == 64
    if tau:
        assert seen["lag"] == tau, "the slow worker was not slow enough for the test to mean much"
        assert seen["history"]["staleness_max"] == [seen["max"]]


@TWO
def test_asynchronous_workers_do_not_wait_for_a_slow_one(world, backend, size):
    (seen,) = world(backend, size).run(served_bodies.staleness, "async", True, timeout=120)
    slow, fast = seen["by worker"]
    assert fast > 1.5 * slow and seen["steps"] == 60
    assert seen["max"] <= 4, "two steps of each worker may wait to be applied"


@TWO
@pytest.mark.parametrize("consistency", ["sync", "async", BoundedDelay(8)], ids=str)
def test_accuracy_on_the_digits(world, backend, size, consistency):
    (mine,) = world(backend, size).run(
        served_bodies.accuracy,
        consistency,
        timeout=120,
        meanwhile=lambda: once(served_bodies.accuracy, None),
    )
    assert mine >= once(served_bodies.accuracy, None) - 0.01


@TWO
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("consistency", ["sync", BoundedDelay(0)], ids=str)
def test_tables(world, backend, size, consistency, parts):
    ((weights, history, moved, devices, predicted),) = world(backend, size).run(
        served_bodies.tables, consistency, parts
    )
    expected, expected_history, _, _, expected_predictions = once(served_bodies.tables, None, 0)
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


@TWO
def test_variables_are_spread_by_bytes(world, backend, size):
    ((placed, largest),) = world(backend, size).run(served_bodies.placement)
    assert len(placed) == 2
    assert max(placed) - min(placed) <= largest, placed


@TWO
@pytest.mark.parametrize(
    "name, kind, parts",
    [
        ("synchronized normalisation", "ValueError", ["exchange numbers", "AllReduceStrategy"]),
        ("eager steps", "ValueError", ["run_eagerly=True", "dtk.auto_strategy()"]),
        ("no gradient", "NotDistributedError", ["no gradient", "self.optimizer.apply"]),
        ("too many backups", "ValueError", ["backup_workers=2", "use at most 1"]),
    ],
)
def test_mistakes(world, backend, size, name, kind, parts):
    ((raised, text),) = world(backend, size).run(served_bodies.refused, name)
    assert raised == kind, text
    for part in parts:
        assert part in text
