"""SIGTERM in the middle of training saves what has been reached, and ends every rank."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import multiprocessing
import os
import signal
import time

import keras
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import checkpoint
from dtk.callbacks.checkpointing.termination import Termination
from dtk.communicators.local import LocalCommunicator

from callbacks.bodies import (
    BATCH,
    Preempted,
    compiled,
    data,
    difference,
    everything,
    exit_code,
    fitted,
    recorder,
    strategy,
)
from callbacks.test_checkpoint import EXACT, check

two_ranks = pytest.mark.worlds(("collective", 2))


def terminated(directory):
    """The last rank alone gets SIGTERM at step 2 of epoch 1; all leave together, then resume."""
    strategy()  # before the first tensor
    mine = signal.getsignal(signal.SIGTERM)

    def run(*callbacks, seen=None):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        note = recorder([] if seen is None else seen)
        fitted(model, *callbacks, note, rows=400, epochs=3)
        return everything(model)

    whole = run()
    code = exit_code(run, dtk.callbacks.Checkpoint(directory), Preempted(1, 1))
    restored = signal.getsignal(signal.SIGTERM) is mine
    seen = []
    again = run(dtk.callbacks.Checkpoint(directory), seen=seen)
    return code, restored, seen[0], difference(again, whole)


@two_ranks
def test_sigterm_on_one_rank_saves_and_ends_all(pool, tmp_path):
    first, second = pool.run(terminated, str(tmp_path), timeout=120)
    code, restored, (epoch, step, _), difference = first
    assert first == second and code == 143 and restored, "SIGTERM must be given back"
    assert (1, 0) < (epoch, step) < (3, 0), "left after the signal, before the end"
    assert difference <= EXACT


def preempted_in_validation(directory, form, patience=3.0):
    """SIGTERM on the last rank early in a validation that lasts longer than ranks are patient."""
    strategy()  # before the first tensor
    x, y = data(40)

    class Other(keras.callbacks.Callback):
        """Validates other weights than it trains: these must not be what is saved."""

        def on_test_begin(self, logs=None):
            self.weights = self.model.get_weights()
            self.model.set_weights([weight / 2 for weight in self.weights])

        def on_test_end(self, logs=None):
            self.model.set_weights(self.weights)

    def run(*callbacks, seen=None):
        keras.utils.set_random_seed(5)
        rows = tf.data.Dataset.from_tensor_slices((x, y))  # shuffled by the seed above
        given = {
            "arrays": {"x": x, "y": y, "batch_size": BATCH},
            "dataset": {"x": rows.shuffle(40).batch(BATCH)},
            "stream": {"x": rows.shuffle(40).repeat().batch(BATCH), "steps_per_epoch": 3},
        }[form]
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9), dropout=0.3)
        swap = [Other()] if form == "arrays" else []
        note = recorder([] if seen is None else seen)
        model.fit(
            **given,
            epochs=3,
            verbose=0,
            callbacks=[*callbacks, *swap, note],
            validation_data=rows.batch(2),
        )
        return everything(model), model.history.history

    whole, history = run()
    original = checkpoint.Termination
    checkpoint.Termination = functools.partial(original, patience=patience)
    try:
        code = exit_code(run, dtk.callbacks.Checkpoint(directory), Preempted(1, 2, True))
    finally:
        checkpoint.Termination = original
    seen = []
    again, resumed_history = run(dtk.callbacks.Checkpoint(directory), seen=seen)
    return {
        "code": code,
        "start": seen[0][:2],
        "expected start": (2, 0),
        "difference": difference(again, whole),
        "history": history,
        "resumed history": resumed_history,
    }


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
@pytest.mark.parametrize("form", ["arrays", "dataset", "stream"])
def test_sigterm_during_validation_saves_what_training_has_reached(pool, tmp_path, form):
    """Breaks as the death of a worker: it used to be deaf until the validation was over."""
    results = pool.run(preempted_in_validation, str(tmp_path), form, timeout=120)
    check(results)
    assert [result["code"] for result in results] == [143, 143]


@pytest.mark.full("one way of being interrupted of each kind")
def test_sigterm_during_validation_in_one_process(alone, tmp_path):
    results = alone.run(preempted_in_validation, str(tmp_path), "arrays", timeout=120)
    check(results)
    assert results[0]["code"] == 143


def test_sigterm_in_one_process(alone, tmp_path):
    [(code, restored, (epoch, step, _), difference)] = alone.run(terminated, str(tmp_path))
    assert (code, restored, epoch, step) == (143, True, 1, 2)
    assert difference <= EXACT


def terminated_as_an_epoch_begins(directory):
    """SIGTERM before the first step of epoch 1, when the rate has fallen and the data are open."""
    x, y = data()

    def run(*callbacks):
        keras.utils.set_random_seed(5)
        rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).batch(BATCH)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
        model.fit(rows, epochs=3, verbose=0, callbacks=[*callbacks, falling])
        return everything(model)

    def end(epoch, logs):
        if epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run()
    ending = keras.callbacks.LambdaCallback(on_epoch_begin=end)
    code = exit_code(run, dtk.callbacks.Checkpoint(directory), ending)
    return code, difference(run(dtk.callbacks.Checkpoint(directory)), whole)


def test_sigterm_before_the_first_step_of_an_epoch(alone, tmp_path):
    """Breaks as a rate that falls twice, and as the order of rows of the epoch after."""
    [(code, difference)] = alone.run(terminated_as_an_epoch_begins, str(tmp_path))
    assert code == 143
    assert difference <= EXACT


class Counting(keras.callbacks.Callback):
    """Counts calls of one of its methods, and lowers the rate by the count."""

    def __init__(self, counted):
        super().__init__()
        self.count, self.counted = 0, counted
        setattr(self, counted, self._called)

    def _called(self, *args, **kwargs):
        self.count += 1
        if self.counted != "on_test_end":  # which is also called where a validation is cut short
            self._lower()

    def on_epoch_end(self, epoch, logs=None):
        if self.counted == "on_test_end":
            self._lower()

    def _lower(self):
        self.model.optimizer.learning_rate = 0.05 * 0.9**self.count

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def counting(directory, counted, validation):
    """SIGTERM in epoch 1, to callbacks that count on both sides of the one that saves."""

    def run(*callbacks):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        around = Counting(counted), *callbacks, Counting(counted)
        fitted(model, *around, epochs=3, validation_data=data(), validation_batch_size=8)
        return everything(model), around[0].count, around[-1].count

    whole, *counts = run()
    ends = Preempted(1, 2, validation)
    code = exit_code(run, dtk.callbacks.Checkpoint(directory), ends)
    again, *counts_again = run(dtk.callbacks.Checkpoint(directory))
    return code, difference(again, whole), counts, counts_again


def stopped_and_terminated(directory):
    """SIGTERM in the validation of the epoch in which a callback has stopped training."""

    def stop(batch, logs):
        model.stop_training = True

    stopping = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    for more in (Preempted(0, 0, validation=True), None):
        model = compiled("sgd")
        saving = dtk.callbacks.Checkpoint(directory, monitor="val_loss")
        given = {"epochs": 3, "validation_data": data(), "validation_batch_size": BATCH}
        callbacks = [saving, stopping, *([more] if more else [])]
        code = exit_code(fitted, model, *callbacks, **given)
        assert (code == 143) == bool(more)
    history = model.history
    return history.epoch, history.history["val_loss"] == [saving.best]


def test_a_validation_after_training_was_stopped_is_resumed(alone, tmp_path):
    """Breaks as an epoch that no callback has seen the end of: its weights were never the best."""
    assert alone.run(stopped_and_terminated, str(tmp_path)) == [([0], True)]


class Board(keras.callbacks.TensorBoard):
    """Notes what it is told at the end of a validation."""

    def on_test_end(self, logs=None):
        self.ends = [*getattr(self, "ends", []), logs]
        super().on_test_end(logs)


def written_of_validation(directory):
    """What TensorBoard is told of a validation that SIGTERM cuts short, and of it once resumed."""
    boards = []
    for more in ([Preempted(0, 0, validation=True)], []):
        model, boards = compiled("sgd"), [*boards, Board(f"{directory}/logs")]
        callbacks = [dtk.callbacks.Checkpoint(f"{directory}/saved"), boards[-1], *more]
        exit_code(fitted, model, *callbacks, validation_data=data(), validation_batch_size=BATCH)
    return [len(getattr(board, "ends", [])) for board in boards]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_a_validation_that_is_cut_short_is_no_point_of_tensorboard(alone, tmp_path):
    """It wrote one of a part of the rows, and at the same step that of all."""
    assert alone.run(written_of_validation, str(tmp_path)) == [[0, 1]]


COUNTED = [
    ("on_train_batch_begin", False),
    ("on_epoch_begin", False),
    ("on_test_end", True),
]


@pytest.mark.parametrize("counted, validation", COUNTED)
def test_callbacks_count_what_they_are_resumed_in_once(alone, tmp_path, counted, validation):
    """Breaks as a count that is one more, by the place of a callback in the list."""
    [result] = alone.run(counting, str(tmp_path), counted, validation)
    code, difference, counts, counts_again = result
    assert code == 143 and counts_again == counts
    assert difference <= EXACT


def two_of_them(first, second, ends):
    """Two in one fit, of which the second saves seldom; SIGTERM in epoch 1 if it ends early."""
    handler = signal.getsignal(signal.SIGTERM)
    places = [
        dtk.callbacks.Checkpoint(first),
        dtk.callbacks.Checkpoint(second, save_freq=1000),
        dtk.callbacks.Checkpoint(f"{second}-ends-only", save_on_sigterm=False, save_freq=1000),
    ]
    more = [Preempted(0, 1)] if ends else []
    code = exit_code(fitted, compiled("sgd"), *places, *more, rows=400, epochs=2)
    assert signal.getsignal(signal.SIGTERM) is handler, "SIGTERM must be given back"
    assert signal.set_wakeup_fd(-1) == -1
    return code, [[place.files.read(name)[0] for name in place.files.names()] for place in places]


@pytest.mark.worlds(("local", 1))
def test_two_checkpoints_in_one_fit_both_save(pool, tmp_path):
    paths = str(tmp_path / "one"), str(tmp_path / "other")
    ((code, (first, second, third)),) = pool.run(two_of_them, *paths, True)
    assert code == 143
    assert first[0]["step"] == second[0]["step"] > 0 and not third
    paths = str(tmp_path / "three"), str(tmp_path / "four")
    ((code, saved),) = pool.run(two_of_them, *paths, False)
    assert code is None and [len(found) for found in saved] == [2, 1, 1]


def test_a_forked_process_ends_by_sigterm_and_its_parent_notices_nothing():
    """Breaks as a pool whose workers do not end, and as a rank that ends with them."""
    fork = multiprocessing.get_context("fork")
    runs, termination = fork.Event(), Termination(LocalCommunicator(), patience=60)
    termination.install()
    try:
        child = fork.Process(target=lambda: (runs.set(), time.sleep(60)))
        child.start()
        assert runs.wait(10)
        child.terminate()
        child.join(10)
        assert child.exitcode == -signal.SIGTERM
        assert not termination.wanted_after_step()
    finally:
        child.kill()
        termination.remove()


def test_a_thread_says_that_sigterm_saves_nothing(tmp_path, capsys):
    """Breaks as silence: only the main thread may catch a signal."""

    def train():
        with dtk.strategies.AllReduceStrategy("local").scope():
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        saves = [dtk.callbacks.Checkpoint(tmp_path / "ckpt")]
        model.fit(tf.ones((4, 1)), tf.ones(4), verbose=0, callbacks=saves)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(train).result(60)
    assert "SIGTERM will save nothing, since fit runs in a thread" in capsys.readouterr().out
    train()
    assert "SIGTERM" not in capsys.readouterr().out
