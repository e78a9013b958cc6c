"""Keras's own callbacks, unchanged, on two ranks; BroadcastVariables, ProgressPrinter, the bar."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pathlib
import re

import keras
import numpy as np
import pytest

import dtk
from dtk.errors import DisagreementError

from callbacks.bodies import (
    Crash,
    compiled,
    crash_at,
    data,
    difference,
    everything,
    fitted,
    recorder,
    strategy,
)

two_ranks = pytest.mark.worlds(("collective", 2))


class Evaluated(keras.callbacks.CSVLogger):
    """Evaluates, which takes all ranks."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {**logs, "twice": self.model.evaluate(*data(), verbose=0)[0]})


class Hopeful(keras.callbacks.Callback):
    """Goes on as long as a ModelCheckpoint finds better epochs."""

    def __init__(self, checkpoint):
        super().__init__()
        self.checkpoint, self.told, self.best = checkpoint, [], []

    def set_params(self, params):
        super().set_params(params)
        self.told.append(dict(params))

    def on_epoch_end(self, epoch, logs=None):
        assert self.checkpoint.best <= logs["val_loss"], "on every rank, in every epoch"
        self.best.append(self.checkpoint.best)


def keras_callbacks(directory):
    """Keras's own callbacks, all in one fit of four epochs on every rank."""
    place = pathlib.Path(directory, str(strategy().rank))
    place.mkdir()
    keras.utils.set_random_seed(5)
    model = compiled(keras.optimizers.SGD(0.05, momentum=0.9), dropout=0.2)
    x, y = data()
    chosen = keras.callbacks
    given = [
        chosen.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        chosen.ReduceLROnPlateau("val_loss", patience=1, factor=0.5, min_delta=1.0),
        chosen.EarlyStopping("val_loss", patience=2, min_delta=1.0, restore_best_weights=True),
        Evaluated(str(place / "log.csv")),
        chosen.ModelCheckpoint(str(place / "epoch-{epoch}.keras")),
        chosen.ModelCheckpoint(str(place / "best.keras"), save_best_only=True),
        chosen.ModelCheckpoint(str(place / "w.weights.h5"), save_weights_only=True, save_freq=2),
        chosen.BackupAndRestore(str(place / "backup"), delete_checkpoint=False),
        chosen.TerminateOnNaN(),
    ]
    given.append(Hopeful(given[5]))
    history = model.fit(
        x, y, batch_size=8, epochs=9, verbose=0, callbacks=given, validation_data=(x[:9], y[:9])
    )
    files = sorted(p.name for p in place.iterdir())
    reloaded = None
    if (place / "best.keras").exists():
        reloaded = keras.models.load_model(place / "best.keras").count_params()
    assert given[5].best == min(history.history["val_loss"]), "on every rank"
    assert given[-1].best[0] == history.history["val_loss"][0]
    assert given[-1].told == [{"verbose": 0, "epochs": 9, "steps": 5}], "as Keras does, and once"
    again = chosen.ModelCheckpoint(str(place / "best.keras"), save_best_only=True)
    listed = chosen.CallbackList([again, Hopeful(again)], add_history=True, model=model)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=listed, validation_data=(x[:9], y[:9]))
    assert again.best == model.history.history["val_loss"][0], "on every rank"
    assert "_save_model" not in vars(again)
    return history.history, everything(model), files, reloaded, model.count_params()


@two_ranks
def test_all_of_them_in_one_fit(pool, tmp_path):
    first, second = pool.run(keras_callbacks, str(tmp_path), timeout=120)
    assert first[0] == second[0]
    epochs = len(first[0]["loss"])
    assert epochs == 3, "EarlyStopping's patience ends it on both"
    assert len(set(first[0]["learning_rate"])) == epochs
    np.testing.assert_array_equal(first[1], second[1])
    assert second[2] == []
    assert first[2] == sorted(
        ["backup", "best.keras", "log.csv", "w.weights.h5"]
        + [f"epoch-{epoch + 1}.keras" for epoch in range(epochs)]
    )
    assert first[3] == first[4]


def keras_backup(directory):
    """BackupAndRestore brings every rank back to the epoch rank 0 knows of, and to its rate."""
    place = pathlib.Path(directory, str(strategy().rank))

    def run(*more):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        seen = []
        backup = keras.callbacks.BackupAndRestore(str(place))
        with contextlib.suppress(Crash):
            scaling = dtk.callbacks.LearningRateScaling(warmup_epochs=2.5)
            fitted(model, backup, scaling, recorder(seen), *more, epochs=4)
        return everything(model), seen[0][:2]

    whole, _ = run()
    run(crash_at(2, 1))
    again, start = run()
    return difference(again, whole), start


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_backup_and_restore(pool, tmp_path):
    for apart, start in pool.run(keras_backup, str(tmp_path), timeout=90):
        assert start == (2, 0)
        assert apart <= 1e-6


def orbax():
    """Its import is left out: the packages that it needs may not be there."""
    callback = object.__new__(keras.callbacks.OrbaxCheckpoint)
    with pytest.raises(ValueError, match="OrbaxCheckpoint on 2 processes: each would write the sa"):
        compiled("sgd").fit(*data(16), verbose=0, callbacks=[callback])


@two_ranks
def test_orbax_would_write_the_same_files_on_every_rank(pool):
    pool.run(orbax)


def nan_on_one_rank():
    """Rows of the last rank alone hold NaN: every rank stops at that step."""
    x, y = data(32)
    x[15] = np.nan
    seen = []
    callbacks = [keras.callbacks.TerminateOnNaN(), recorder(seen)]
    compiled("sgd").fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    return [s[:2] for s in seen]


@two_ranks
def test_terminate_on_nan_ends_all_ranks_at_one_step(pool):
    assert pool.run(nan_on_one_rank) == [[(0, 0), (0, 1)]] * 2


def restored_on_rank_0():
    """Rank 0 alone restores the weights of its best epoch, in `on_train_end`."""
    best = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    given = [best] if strategy().is_chief else []
    said = r"after on_train_end of the callbacks, 4 of 6 variables of .* differ between workers"
    with pytest.raises(DisagreementError, match=said):
        fitted(compiled(keras.optimizers.SGD(0.05)), *given, epochs=4)


@two_ranks
def test_weights_that_one_rank_changes_at_the_end_of_training_are_refused(pool):
    """It went unseen: ranks were left with different weights."""
    pool.run(restored_on_rank_0)


class FitsAgain(keras.callbacks.Callback):
    """Trains the model in an epoch of its training."""

    def on_epoch_end(self, epoch, logs=None):
        fitted(self.model)


def fits_in_its_callback():
    model = compiled("sgd")
    with pytest.raises(RuntimeError, match=r"fit of model .* in a callback .* call model.train_on"):
        fitted(model, FitsAgain())
    fitted(model)


def test_a_fit_in_a_callback_of_the_same_model_is_refused(alone):
    """It took the callbacks and the data of the other, which failed of None."""
    alone.run(fits_in_its_callback)


class Board(keras.callbacks.TensorBoard):
    """Predicts, which takes all ranks."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mean"] = float(self.model.predict(data()[0], verbose=0).mean())
        super().on_epoch_end(epoch, logs)


def tensorboard(directory):
    place = pathlib.Path(directory, str(strategy().rank))
    place.mkdir()
    model = compiled("sgd")
    x, y = data()
    board = Board(str(place), update_freq=2, histogram_freq=1)
    history = model.fit(x, y, epochs=2, verbose=0, callbacks=[board], validation_data=(x, y))
    assert len(history.history["mean"]) == 2
    return sorted(p.name for p in place.rglob("events*"))


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard(pool, tmp_path):
    first, second = pool.run(tensorboard, str(tmp_path), timeout=90)
    assert first
    assert not second


# BroadcastVariables, ProgressPrinter and Keras's progress bar.


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


@pytest.mark.full("a cheaper test holds its rule")
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


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
@pytest.mark.parametrize(
    "freq, minibatches", [(0, [1, 2, 4]), (2, [2, 4]), (None, [])], ids=["geometric", "n", "epoch"]
)
def test_progress_on_rank_0_or_in_a_file_per_rank(pool, tmp_path, freq, minibatches):
    (screen, log), (silent, other_log) = pool.run(printed, str(tmp_path), freq)
    assert silent == ""
    for text in (screen, log, other_log):
        lines = text.splitlines()
        steps = [*(f", minibatch {m}/5" for m in minibatches), ""]
        expected = [f"epoch {epoch}/2{step}: loss " for epoch in (1, 2) for step in steps]
        for line, prefix in zip(lines, expected, strict=True):
            assert line.startswith(prefix) and ", mae " in line and line.endswith(" samples/s")


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


@pytest.mark.full("a cheaper test holds its rule")
@two_ranks
def test_a_summary_holds_what_history_and_evaluate_tell_on_every_rank(pool):
    first, second = pool.run(summed_up)
    assert first == second
