"""Parameter servers: pipelines on workers, warm starts, sparing exchanges, callbacks."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

from dtk.exchange import Downpour, codec
from dtk.parameter_server.consistency_models import Async, BoundedDelay, SerialStart

from strategies import served_features

TOLERANCE = 1e-5

pytestmark = pytest.mark.worlds(("served", 2))


def close(mine, expected):
    return np.linalg.norm(mine - expected) <= TOLERANCE * np.linalg.norm(expected)


def test_synchronous_workers_that_read_for_themselves_equal_one_process(pool):
    """Breaks when a worker reads another's rows, or its gradient counts for more than its rows."""
    ((weights, history, evaluated, steps),) = pool.run(
        served_features.pipelines, "sync", 2, timeout=120
    )
    expected, logs, plain, _ = served_features.pipelines(None, 2)
    assert steps == 20 and close(weights, expected)
    np.testing.assert_allclose(history["loss"], logs["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(evaluated, plain, rtol=TOLERANCE)


def test_asynchronous_workers_that_read_for_themselves(pool):
    """More steps than a pipeline has batches: it begins anew."""
    ((_, history, _, steps),) = pool.run(served_features.pipelines, "async", 1, 4, timeout=120)
    assert steps == 40 and history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize(
    "name, kind, parts",
    [
        ("raises", "OSError", ["no such file: rows-00001", "raised by dataset_fn, for worker 0"]),
        ("rows", "ValueError", ["single rows", "TensorSpec(shape=(8, 8, 1)", ".batch(context."]),
        ("no dataset", "TypeError", ["returned a list", "tf.data.Dataset of batches"]),
        ("any size", "ValueError", ["batches of any size", "drop_remainder=True"]),
        ("no batch", "ValueError", ["dataset_fn gave worker", "without a batch"]),
        (
            "uneven",
            "ValueError",
            ["gave worker 1 batches of", "shape=(9, 8", "shape=(8, 8", "alike"],
        ),
        ("made before", "ValueError", ["made on the chief", "inside dataset_fn"]),
        ("made from what was made before", "ValueError", ["whole pipeline inside dataset_fn"]),
        ("no steps", "ValueError", ["steps_per_epoch="]),
        ("predict", "ValueError", ["predict", "in order", "arrays or a tf.data.Dataset"]),
        ("loss scaling", "ValueError", ["Downpour(push_every=2", "scales its loss"]),
        ("accumulation", "ValueError", ["Downpour(push_every=2", "accumulates them"]),
    ],
)
def test_mistakes(pool, name, kind, parts):
    ((raised, text),) = pool.run(served_features.wrong, name)
    assert raised == kind, text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "warm_start, serial", [(SerialStart(epochs=1), 8), (SerialStart(samples=200), 10)], ids=str
)
def test_the_first_steps_of_a_warm_start_are_those_of_one_process(pool, warm_start, serial):
    ((seen, steps),) = pool.run(served_features.warmed_up, Async(warm_start), timeout=120)
    expected, _ = served_features.warmed_up(None, epochs=1)
    assert steps == 24
    assert close(seen[0][0], expected[0][0]), "the first epoch was not that of one process"
    assert seen[0][1].histogram == {0: 8}
    fresh = [sum(age * n for age, n in statistics.histogram.items()) for _, statistics in seen[1:]]
    assert sum(fresh) > 0, "no step was ever asynchronous"
    assert seen[1][1].histogram.get(0, 0) >= serial - 8


@pytest.mark.parametrize("more", [(), ("dropout", "normalisation")], ids=str)
@pytest.mark.parametrize("exchange", [Downpour(4), Downpour(4, fetch_every=2)], ids=str)
def test_pushing_every_fourth_step_of_plain_sgd_is_plain_sgd(pool, exchange, more):
    """One at a time, a worker's own steps are those the server takes when they are pushed."""
    ((weights, steps, history, moved),) = pool.run(
        served_features.pushed, BoundedDelay(0), exchange, *more, timeout=120
    )
    expected, _, logs, _ = served_features.pushed(None, None, *more)
    assert steps == 39, "the optimizer counts every batch"
    if exchange.fetch_every == 4:
        assert close(weights, expected)
        np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-4)
    model = 4 * (64 * 32 + 32 + 320 + 10) + (4 * 2 * 32 if more else 0)
    pushes = 3 * 4  # of 4, 4, 4 and 1 batches
    assert sum(worker["pushed"] for worker in moved) == pushes * model
    pulled = model + (4 * 2 * 32 if more else 0)  # moving statistics, too
    fetches = pushes if exchange.fetch_every == 4 else 3 * 7
    assert sum(worker["pulled"] for worker in moved) == fetches * pulled


@pytest.mark.parametrize("consistency", ["async", BoundedDelay(2)], ids=str)
@pytest.mark.parametrize("push_every", [1, 3])
def test_every_gradient_is_applied_once_however_rarely_it_is_pushed(pool, consistency, push_every):
    ((weights, steps),) = pool.run(
        served_features.constant_gradients, consistency, Downpour(push_every, significant=1e-9)
    )
    assert steps == 100
    np.testing.assert_allclose(weights, [-1.0, -2.0, -3.0], rtol=1e-5)


def test_fetching_less_often_than_pushing(pool):
    """A worker goes on with its own weights after a push; no gradient is lost by that."""
    ((_, steps, history, moved),) = pool.run(
        served_features.pushed, "async", Downpour(1, fetch_every=4), "normalisation", timeout=120
    )
    assert steps == 39 and history["loss"][-1] < history["loss"][0]
    pushed, pulled = (sum(worker[way] for worker in moved) for way in ("pushed", "pulled"))
    model = 4 * (64 * 32 + 32 + 320 + 10) + 4 * 2 * 32
    assert pushed == 39 * model
    # A fetch for four steps of a worker, and a new one for the first in each epoch or two.
    assert pulled < 0.5 * 39 * (model + 4 * 2 * 32)


def test_what_is_not_significant_waits_on_the_worker(pool):
    """Steps of 0.01, 0.02 and 0.03 are pushed once they add up to more than 0.05."""
    ((weights, steps),) = pool.run(
        served_features.constant_gradients, BoundedDelay(0), Downpour(significant=0.05)
    )
    assert steps == 100
    missing = np.abs(weights - np.array([-1.0, -2.0, -3.0]))
    assert (missing <= 2 * 0.05 + 1e-5).all(), "more is missing than two workers may keep"
    assert missing.max() > 1e-3, "nothing was kept back"


def test_a_filter_sends_less(pool):
    whole, sifted = (
        pool.run(served_features.pushed, BoundedDelay(0), exchange, timeout=120)[0]
        for exchange in (Downpour(), Downpour(significant=2e-3))
    )
    sent = [sum(worker["pushed"] for worker in found[3]) for found in (whole, sifted)]
    assert sent[1] < 0.6 * sent[0], sent
    assert sifted[2]["loss"][-1] < 1.1 * whole[2]["loss"][-1]


def test_a_few_bits_of_each_gradient_are_pushed_and_the_rest_later(pool):
    whole, fine, coarse = (
        pool.run(served_features.pushed, BoundedDelay(0), exchange, timeout=120)[0]
        for exchange in (Downpour(), Downpour(bits=16), Downpour(bits=1))
    )
    assert np.linalg.norm(fine[0] - whole[0]) < 1e-3 * np.linalg.norm(whole[0])
    sent = [sum(worker["pushed"] for worker in found[3]) for found in (whole, fine, coarse)]
    code = 32 * (64 // 8 + 8) + 10 * (32 // 8 + 8) + 4 * (32 + 10)
    assert sent[2] == sent[0] // (4 * (64 * 32 + 32 + 320 + 10)) * code
    assert coarse[2]["loss"][-1] < 1.3 * whole[2]["loss"][-1]


def test_what_a_code_loses_is_pushed_later(pool):
    """One bit makes the same of gradients from 1 to 3; only what is kept tells them apart."""
    ((weights, steps),) = pool.run(
        served_features.constant_gradients, BoundedDelay(0), Downpour(bits=1), 100, 24
    )
    assert steps == 100
    given, kept, most = np.linspace(1, 3, 24, dtype="float32")[None], 0.0, 0.0
    for _ in range(100):
        wanted = given + kept
        kept = wanted - codec.decode(codec.encode(tf.constant(wanted), 1), 24, 1).numpy()
        most = max(most, np.abs(kept).max())
    missing = np.abs(weights + given[0])
    assert missing.max() <= 2 * 0.01 * most + 1e-4, "more is missing than two workers may keep"
    assert 2 * 0.01 * most < 0.5, "and without keeping it, 1 would be missing at either end"


@pytest.mark.parametrize("name", ["momentum", "adam", "schedule", "averages"])
def test_no_slot_loses_an_update(pool, name):
    """Constant gradients leave the same behind in whatever order asynchronous steps are applied."""
    (mine,) = pool.run(served_features.constant_gradients_with, name, "async")
    assert close(mine, served_features.constant_gradients_with(name, None))


@pytest.mark.parametrize("name", ["broadcast", "batch sizes", "rate", "checkpoint"])
def test_callbacks(pool, name, tmp_path):
    """Of dtk's own, on workers as in one process."""
    ((weights, steps, history),) = pool.run(
        served_features.with_callbacks, name, tmp_path / "served", BoundedDelay(0), timeout=120
    )
    expected = served_features.with_callbacks(name, tmp_path / "alone", None)
    assert steps == expected[1] and close(weights, expected[0])
    np.testing.assert_allclose(history["loss"], expected[2]["loss"], rtol=1e-4)


def test_a_checkpoint_in_the_middle_has_every_step_it_counts(pool, tmp_path):
    """Steps under way when it was taken would be passed over on resuming, and be lost."""
    (found,) = pool.run(served_features.saved_steps, tmp_path)
    assert [step for step, _, _ in found] == [7, 14, 21, 28, 35, 40]
    for step, iterations, weight in found:
        assert iterations == step
        np.testing.assert_allclose(weight, -0.01 * step, rtol=1e-5)


def test_the_report(pool):
    ((told, epochs, history),) = pool.run(served_features.reported, "async")
    assert [sum(histogram.values()) for histogram in epochs] == [10, 10]
    model = 4 * (64 * 32 + 32 + 320 + 10)
    assert history["pushed_bytes"] == history["pulled_bytes"] == [model, model]
    assert "ServerReport: 2 servers hold" in told
    assert told.count(f"pulled {model / 1e3:.1f} kB and pushed {model / 1e3:.1f} kB in each") == 2
    ages = re.search(r"staleness \(missing steps x times\): (.*)", told)[1]
    assert sum(int(part.split(" x ")[1]) for part in ages.split(", ")) == 20


@pytest.mark.parametrize(
    "shape, warm_start, factors",
    [
        ("staircase", None, [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 9),
        ("linear", SerialStart(epochs=1), [1.0] * 7 + [0.25, 0.5, 0.75] + [1.0] * 8),
    ],
)
def test_the_rate_of_asynchronous_steps_warms_up(pool, shape, warm_start, factors):
    """Of serial ones it does not; the first asynchronous step is announced one step late."""
    (rates,) = pool.run(served_features.warming_rates, shape, warm_start)
    np.testing.assert_allclose(rates, 0.1 * np.array(factors), rtol=1e-5)


def test_random_layers_never_repeat_themselves(pool):
    """Breaks when epochs, calls or batches begin again with the same masks."""
    ((losses, predicted, evaluated),) = pool.run(served_features.masks)
    assert len(set(losses)) == 4, losses
    assert len({row.tobytes() for row in predicted}) == 32, "two rows have the same mask"
    assert evaluated[0] != evaluated[1]


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_callbacks_may_predict_and_evaluate_at_any_time(pool, consistency):
    """Breaks when the workers do not go back to training: it hangs."""
    ((steps, given),) = pool.run(served_features.asked_in_the_middle, consistency, timeout=90)
    assert steps == 16
    assert given == [(5, 10), (3, 10), 2, 2] * 9


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_validation_that_was_left_leaves_nothing_behind(pool, consistency):
    ((steps, logged),) = pool.run(served_features.left_in_validation, consistency)
    assert steps == 16 and "val_loss" in logged


@pytest.mark.parametrize("consistency", ["sync", BoundedDelay(0)], ids=str)
def test_a_sparse_gradient_of_a_lone_weight(pool, consistency):
    """Breaks when its row numbers are lost on the way to the server."""
    (mine,) = pool.run(served_features.sparse_gradient_of_a_lone_weight, consistency)
    expected = served_features.sparse_gradient_of_a_lone_weight(None)
    np.testing.assert_allclose(mine, expected, rtol=1e-5)
