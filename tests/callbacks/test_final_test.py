"""A test of the weights that `fit` leaves, when it ends well."""

from __future__ import annotations

import contextlib
import io

import keras
import pytest

import dtk

from callbacks.bodies import (
    crash_at,
    data,
    fit,
    strategy,
)


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


@pytest.mark.worlds(("collective", 2))
def test_two_ranks(pool):
    check(pool.run(run_final_test))


def test_one_process(alone):
    check(alone.run(run_final_test))


def check(results):
    for rank, (result, history, screen, expected) in enumerate(results):
        assert result == results[0][0]
        assert result == pytest.approx(expected, rel=1e-6), "weights restored at the end count"
        assert history == {f"test_{name}": [value] for name, value in result.items()}
        lines = [line for line in screen.splitlines() if line.startswith("FinalTest: loss ")]
        assert len(lines) == (rank == 0)
        assert all(", mae " in line for line in lines)


@pytest.mark.worlds(("collective", 2))
def test_no_test_when_training_failed(pool):
    for result, history, screen, _ in pool.run(run_final_test, True):
        assert result is None
        assert history == {}
        assert screen == ""
