"""BroadcastVariables, ProgressPrinter, epochs_per_worker, and models no strategy compiled."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import types

import keras
import numpy as np
import pytest

import dtk
from dtk.callbacks import ProgressPrinter, epochs_per_worker

from callbacks import bodies
from callbacks.bodies import compiled, data, fails, strategy

two_ranks = pytest.mark.worlds(("collective", 2))


def broadcast_from(root):
    """Ranks that start apart: whose weights does everyone train with? Rate 0 keeps them."""
    rank = strategy().rank  # made before the seeds differ: ranks are told to shuffle alike
    keras.utils.set_random_seed(10 + rank)
    model = compiled(keras.optimizers.SGD(0.0))
    mine = model.get_weights()[0]
    keras.utils.set_random_seed(10)  # ranks that would shuffle apart are refused
    x, y = data()
    model.fit(x, y, verbose=0, callbacks=[dtk.callbacks.BroadcastVariables(root)])
    return mine, model.get_weights()[0]


@two_ranks
@pytest.mark.parametrize("root", [0, 1])
def test_everyone_starts_from_root(pool, root):
    results = pool.run(broadcast_from, root)
    for _, trained in results:
        np.testing.assert_array_equal(trained, results[root][0])


def broadcast_refused(root, kind="world"):
    model = compiled("sgd", kind)
    x, y = data()
    return fails(model.fit, x, y, verbose=0, callbacks=[dtk.callbacks.BroadcastVariables(root)])


@two_ranks
@pytest.mark.parametrize("root", [2, -1])
def test_a_root_outside_the_world_is_refused(pool, root):
    for kind, text in pool.run(broadcast_refused, root):
        assert kind == "ValueError"
        assert f"root_rank={root} is outside the world of 2" in text


def test_broadcast_does_nothing_in_one_process(alone):
    assert alone.run(broadcast_refused, 0) == [None]
    assert alone.run(broadcast_refused, 0, "mirrored") == [None]


def not_under_a_strategy(directory):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    x, y = data()
    callbacks = [
        dtk.callbacks.BroadcastVariables(),
        dtk.callbacks.LearningRateScaling(),
        dtk.callbacks.BatchSizeSchedule([8]),
        dtk.callbacks.Checkpoint(directory),
        dtk.callbacks.ProgressPrinter(),
    ]
    return [fails(model.fit, x, y, verbose=0, callbacks=[callback]) for callback in callbacks]


@two_ranks
def test_a_model_no_strategy_compiled_is_refused(pool, tmp_path):
    for answers in pool.run(not_under_a_strategy, str(tmp_path)):
        for kind, text in answers:
            assert kind == "NotDistributedError"
            assert "inside `with strategy.scope():`" in text


def bar_of(verbose):
    model = compiled("sgd", "mirrored")
    x, y = data()
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        model.fit(x, y, batch_size=8, epochs=2, verbose=verbose)
    return screen.getvalue()


@pytest.mark.parametrize("verbose", [1, 2])
def test_keras_bar_says_what_all_replicas_do_in_a_second(alone, verbose):
    [screen] = alone.run(bar_of, verbose)
    last = [line.split("\r")[-1] for line in screen.split("\n") if "mae" in line]
    assert len(last) == 2
    for line in last:
        assert re.search(r"s/step, [\d,]+ samples/s - loss: \S+ - mae: ", line), line


def printed(directory, freq):
    model = compiled("sgd")
    x, y = data()
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        for log in (None, str(pathlib.Path(directory, "log"))):
            printer = dtk.callbacks.ProgressPrinter(freq, log_to_file=log)
            model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[printer])
    rank = strategy().rank
    return screen.getvalue(), pathlib.Path(directory, f"log.rank{rank}").read_text()


@two_ranks
@pytest.mark.parametrize(
    "freq, minibatches", [(0, [1, 2, 4]), (2, [2, 4]), (None, [])], ids=["geometric", "n", "epoch"]
)
def test_progress_on_rank_0_or_in_a_file_per_rank(pool, tmp_path, freq, minibatches):
    (screen, log), (silent, other_log) = pool.run(printed, str(tmp_path), freq)
    assert silent == ""
    for text in (screen, log, other_log):
        lines = text.splitlines()
        expected = [
            prefix
            for epoch in (1, 2)
            for prefix in [
                *(f"epoch {epoch}/2, minibatch {m}/5: loss " for m in minibatches),
                f"epoch {epoch}/2: loss ",
            ]
        ]
        assert len(lines) == len(expected)
        for line, prefix in zip(lines, expected, strict=True):
            assert line.startswith(prefix)
            assert ", mae " in line
            assert line.endswith(" samples/s")


def test_progress_frequency_is_checked():
    with pytest.raises(ValueError, match="got -1"):
        ProgressPrinter(-1)


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


@pytest.mark.parametrize(
    "name",
    [
        "asynchronous_warmup",
        "auto_batch_size",
        "batch_norm_statistics",
        "batch_size_schedule",
        "broadcast_variables",
        "checkpoint",
        "checkpointing.best",
        "checkpointing.state",
        "cross_validation",
        "final_test",
        "find_non_finite",
        "grow_batch_instead_of_decay",
        "halve_rate",
        "hyperparameters.batch_size_search",
        "hyperparameters.epochs",
        "hyperparameters.momentum",
        "hyperparameters.rate",
        "learning_rate_scaling",
        "momentum_schedule",
        "progress_printer",
        "sample_rate",
        "server_report",
    ],
)
def test_the_examples_run(alone, name):
    [(failed, attempted)] = alone.run(bodies.examples, f"dtk.callbacks.{name}")
    assert attempted
    assert not failed
