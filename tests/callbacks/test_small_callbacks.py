"""BroadcastVariables, ProgressPrinter and Keras's progress bar."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import keras
import numpy as np
import pytest

import dtk

from callbacks.bodies import compiled, data, strategy

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


def summed_up():
    model = compiled("sgd")
    x, y = data()
    summary = dtk.callbacks.TrainingSummary()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[summary]).history
    assert summary.test_summary is None
    epochs = [tuple(one) for one in summary.epoch_summaries]
    assert epochs == [*zip(history["loss"], history["mae"], [37, 37], strict=True)]
    given = {"validation_data": (x[:21], y[:21]), "callbacks": [summary], "verbose": 0}
    validated = model.fit(x, y, batch_size=8, **given).history
    assert len(summary.epoch_summaries) == 1, "of the last fit"
    (loss,), (mae,) = validated["val_loss"], validated["val_mae"]
    assert tuple(summary.test_summary) == (loss, mae, 21)
    tested = model.evaluate(x[:5], y[:5], verbose=0, callbacks=[summary])
    assert tuple(summary.test_summary) == (*tested, 5)
    return summary.test_summary


@two_ranks
def test_a_summary_holds_what_history_and_evaluate_tell_on_every_rank(pool):
    first, second = pool.run(summed_up)
    assert first == second
