"""Resumed training equals uninterrupted training, and no crash harms what is saved."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import random
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
import dtk.exchange
from dtk.callbacks.checkpointing.checkpoint_files import CheckpointFiles
from dtk.callbacks.checkpointing.checkpoint_state import of_callbacks, pack, unpack
from dtk.patches import patch

from callbacks import bodies
from callbacks.bodies import (
    BATCH,
    EPOCHS,
    ROWS,
    Crash,
    compiled,
    crash_at,
    data,
    difference,
    everything,
    fails,
    fitted,
    recorder,
    strategy,
)

EXACT = 1e-6
two_ranks = pytest.mark.worlds(("collective", 2))


def check(results):
    """Every rank went on where the checkpoint was, and ended where the whole run ended."""
    for result in results:
        assert result["start"] == result["expected start"]
        assert result["difference"] <= EXACT
        assert result["history"].keys() == result["resumed history"].keys()
        for name, values in result["history"].items():
            np.testing.assert_allclose(result["resumed history"][name], values, rtol=1e-5)
        assert result["history"] == results[0]["history"]
        assert result["resumed history"] == results[0]["resumed history"]


# Where a run is saved, crashes and goes on: in the middle of an epoch, and between two.
WITHIN = {"save_freq": 7, "crash": (2, 2), "resumed": (1, 2)}
BETWEEN = {"crash": (2, 3), "resumed": (2, 0)}


def momentum_sgd(rate=0.05, **more):
    return keras.optimizers.SGD(rate, momentum=0.9, **more)


def rows():
    return tf.data.Dataset.from_tensor_slices(data()).shuffle(ROWS)


def epoch_case():
    stopping = keras.callbacks.EarlyStopping(
        "mae", mode="min", patience=3, restore_best_weights=True
    )
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=0.5)
    callbacks = [plateau, stopping]
    return {**BETWEEN, "optimizer": momentum_sgd(), "dropout": 0.3, "callbacks": callbacks}


def stream_case():
    stream = {"data": rows().repeat().batch(BATCH), "steps_per_epoch": 4}
    return {**WITHIN, **stream, "optimizer": "sgd", "crash": (2, 1), "resumed": (1, 3)}


class Items(keras.utils.PyDataset):
    """The batches of `data`."""

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, index):
        return tuple(each[index * BATCH : (index + 1) * BATCH] for each in data())


def items_case():
    """Items that Keras shuffles, as it does unless it is told not to."""
    return {**WITHIN, "optimizer": momentum_sgd(), "data": Items()}


def passes_case():
    """Each epoch takes all items, so that the next one begins with an order of its own."""
    return {**items_case(), **BETWEEN, "save_freq": "epoch", "steps_per_epoch": 5}


def threads_case():
    return {**items_case(), "data": Items(workers=2)}


def end_of_data_case():
    # Of unknown length: Keras begins a sixth step, before which the epoch is saved.
    unknown = rows().batch(BATCH).filter(lambda x, y: True)
    how = {"save_freq": 5, "crash": (1, 1), "resumed": (0, 5)}
    return {**how, "optimizer": momentum_sgd(), "data": unknown}


def scaled_case():
    # Sizes 8, 16, 16, 32: 5, 3, 3, 2 steps; step 6 is within the warm-up.
    sizes = dtk.callbacks.BatchSizeSchedule([8, (2, 16), 32])
    callbacks = [sizes, dtk.callbacks.LearningRateScaling(warmup_epochs=2.5)]
    how = {"save_freq": 6, "crash": (2, 1), "resumed": (1, 1)}
    return {**how, "optimizer": momentum_sgd(0.02), "callbacks": callbacks}


def schedule_case():
    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    adam = keras.optimizers.Adam(decay, use_ema=True)
    return {
        **BETWEEN,
        "optimizer": keras.optimizers.LossScaleOptimizer(adam, initial_scale=64.0),
        "callbacks": [dtk.callbacks.LearningRateScaling("sqrt", warmup_epochs=3)],
    }


def swapped_case():
    # At the end of an epoch the averages are in the model, and its weights are in the optimizer.
    averaging = momentum_sgd(use_ema=True, ema_momentum=0.8)
    swapping = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    return {**BETWEEN, "optimizer": averaging, "callbacks": swapping}


def exchanging(how, exchange, optimizer="adam"):
    return {**how, "optimizer": optimizer, "exchange": exchange}


def block_momentum_case():
    blocks = dtk.exchange.BlockMomentum(block_size=3 * BATCH, reset_local_momentum=False)
    return exchanging(BETWEEN, blocks, momentum_sgd())


@keras.saving.register_keras_serializable("tests")
class Counted(keras.metrics.Metric):
    """Counts positive labels in whole numbers, as Keras's MeanIoU counts."""

    def __init__(self, name="counted"):
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", dtype="int64")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_true > 0, "int64")))

    def result(self):
        return keras.ops.cast(self.count, "float32")


def steps_case():
    # Step 7 is in the middle of an accumulation window.
    adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, clipnorm=0.5)
    # The scheduler multiplies the rate at the beginning of every epoch, also of a resumed one.
    falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7)
    counted = {"weighted_metrics": [Counted()]}
    return {**WITHIN, "optimizer": adam, "callbacks": [falling], "compile": counted}


def execution_case():
    # Callbacks are called at steps 0, 2 and 4.
    how = {"save_freq": 4, "crash": (1, 2), "resumed": (0, 4)}
    # Keras's file holds the sum of kernel and LoRA.
    return {**how, "optimizer": "adam", "compile": {"steps_per_execution": 2, "lora": 2}}


def quantised_case():
    # Its residuals are each worker's own, and the stripes of sums each owner's.
    quantized = dtk.exchange.Quantized(1)
    return exchanging(WITHIN, dtk.exchange.WarmStart(quantized, samples=3 * BATCH))


# Made when they are used: TensorFlow's collectives must come before the first tensor.
CASES = {
    "quantised": quantised_case,
    # Gradients that no step has applied yet are saved.
    "delayed": lambda: exchanging(WITHIN, dtk.exchange.Delayed(dtk.exchange.Quantized(4))),
    "block momentum": block_momentum_case,
    # Adam's moments are each worker's own.
    "averaging": lambda: exchanging(BETWEEN, dtk.exchange.ModelAveraging(period=BATCH)),
    "swapped": swapped_case,
    "execution": execution_case,
    "epoch": epoch_case,
    "steps": steps_case,
    "dataset": lambda: {**WITHIN, "optimizer": momentum_sgd(), "data": rows().batch(BATCH)},
    "stream": stream_case,
    "stream-epoch": lambda: {**stream_case(), **BETWEEN, "save_freq": "epoch"},
    "end of data": end_of_data_case,
    "items": items_case,
    "items by passes": passes_case,
    "items by threads": threads_case,
    "scaled": scaled_case,
    "schedule": schedule_case,
}


def train(name, directory=None, crash=False, seed=5, kind="world"):
    """Train one case; with a directory it is saved and resumed. Returns state, history, start."""
    keras.utils.set_random_seed(seed)
    case = CASES[name]()
    strategy(kind).exchange = case.get("exchange")
    model = compiled(case["optimizer"], kind, case.get("dropout", 0.0), **case.get("compile", {}))
    seen, drawn = [], []

    class Drawing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn.append((random.random(), np.random.rand()))

    callbacks = [*case.get("callbacks", ()), recorder(seen), Drawing()]
    if directory is not None:
        # First in the list: order must not matter.
        callbacks.insert(0, dtk.callbacks.Checkpoint(directory, case.get("save_freq", "epoch")))
    if crash:
        callbacks.append(crash_at(*case["crash"]))
    if "data" in case:
        given = {"x": case["data"], "steps_per_epoch": case.get("steps_per_epoch")}
    else:
        x, y = data()
        given = {"x": x, "y": y, "batch_size": BATCH}
    try:
        model.fit(**given, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except Crash:
        assert crash
    return everything(model), model.history.history, seen[0][:2], drawn[-1]


def resume(name, directory, kind="world"):
    """Train through; train, crash, and resume: with another seed in the script where that may be.

    A shuffled dataset takes its seed when the script makes it, before any callback runs.
    """
    place = pathlib.Path(directory, str(strategy(kind).rank))  # ranks share no file system
    whole, history, _, drawn = train(name, kind=kind)
    train(name, place, crash=True, kind=kind)
    seed = 5 if "data" in CASES[name]() else 99
    again, resumed_history, start, drawn_again = train(name, place, seed=seed, kind=kind)
    assert drawn == drawn_again, "Python and numpy draw on where they were"
    return {
        "difference": difference(again, whole),
        "history": history,
        "resumed history": resumed_history,
        "start": start,
        "expected start": CASES[name]()["resumed"],
        "files": sorted(p.name for p in place.iterdir()) if place.exists() else None,
    }


@pytest.mark.full_but("*-items", "*-items by passes", "*-steps")
@two_ranks
@pytest.mark.parametrize("name", list(CASES))
def test_resumed_equals_uninterrupted(pool, tmp_path, name):
    results = pool.run(resume, name, str(tmp_path), timeout=120)
    check(results)
    assert [r["files"] for r in results[1:]] == [None], "only rank 0 may write"
    assert all(f.startswith("checkpoint-") for f in results[0]["files"])


@pytest.mark.full("one way of being interrupted of each kind")
@pytest.mark.parametrize("kind", ["world", "mirrored"])
@pytest.mark.parametrize("name", ["steps", "scaled", "end of data"])
def test_resumed_equals_uninterrupted_in_one_process(alone, tmp_path, kind, name):
    check(alone.run(resume, name, str(tmp_path), kind, timeout=120))


def saved_within_a_window(directory):
    """What is said where Checkpoint saves while each rank has its part of a window."""
    strategy()
    adam = keras.optimizers.Adam(0.05, gradient_accumulation_steps=2)
    with contextlib.redirect_stderr(io.StringIO()) as told:
        fitted(compiled(adam), dtk.callbacks.Checkpoint(directory, save_freq=3))
    return told.getvalue()


@two_ranks
def test_nobody_is_told_to_use_checkpoint_who_does(pool, tmp_path):
    """It said that the file has one rank's part of a window, which a checkpoint has whole."""
    assert not any("window" in told for told in pool.run(saved_within_a_window, str(tmp_path)))


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_another_world_size_resumes(pool, alone, tmp_path):
    """Written by two ranks within an accumulation window; two devices of one process go on."""
    place = str(tmp_path)
    pool.run(train, "steps", place, True, timeout=120)
    [(whole, *_)] = alone.run(train, "steps", timeout=120)
    [(again, _, start, _)] = alone.run(train, "steps", place, False, 9, "mirrored", timeout=120)
    assert start == (1, 2)
    assert difference(again, whole) <= 1e-5


def in_other_batches(directory):
    """Resume in the middle of an epoch, of which other steps are left than there were."""
    items, arrays = (pathlib.Path(directory, name) for name in ("items", "steps"))
    train("items", items, crash=True)
    with patch(Items, __len__=lambda self: 3):
        fewer = fails(train, "items", items)
    train("steps", arrays, crash=True)
    with patch(sys.modules[__name__], BATCH=4):
        smaller = fails(train, "steps", arrays)
    together = {**CASES["steps"](), "compile": {"weighted_metrics": [Counted()]}}
    together["compile"]["steps_per_execution"] = 3
    with patch(sys.modules[__name__], CASES={"steps": lambda: together}):
        passed_over = fails(train, "steps", arrays)
    with patch(sys.modules[__name__], data=lambda: bodies.data(ROWS - BATCH)):
        shorter = fails(train, "steps", arrays)
    return fewer, smaller, passed_over, shorter


@pytest.mark.worlds(("local", 1))
def test_an_epoch_in_other_batches_is_refused(pool, tmp_path):
    [failures] = pool.run(in_other_batches, str(tmp_path), timeout=120)
    fewer, smaller, passed_over, shorter = failures
    assert "len(PyDataset)=5, so len(PyDataset)=3 cannot continue the epoch" in fewer[1]
    assert "batch_size=8, so batch_size=4 cannot continue the epoch" in smaller[1]
    assert "batches of the data=5, so batches of the data=4 cannot continue" in shorter[1]
    assert "step 2 of an epoch lies within an execution of steps_per_execution=3" in passed_over[1]


def beside_another(directory):
    """Steps after a resume by the last of two; and what a run of four epochs notes as its best."""
    first, second, best = (pathlib.Path(directory, name) for name in ("first", "second", "best"))

    def run(*callbacks, **more):
        model = compiled("sgd")
        with contextlib.suppress(Crash):
            fitted(model, *callbacks, **more)
        return int(model.optimizer.iterations)

    def two():
        return dtk.callbacks.Checkpoint(first, 4), dtk.callbacks.Checkpoint(second)

    whole = run()
    run(*two(), crash_at(1, 3))
    watching = dtk.callbacks.Checkpoint(best, save_freq=7, monitor="val_loss", mode="max")
    run(watching, epochs=4, validation_data=data(), validation_freq=2)
    return run(*two()), whole, json.loads((best / "best.json").read_text())["epoch"]


def test_two_checkpoints_and_the_best_epoch_wherever_it_is_saved(alone, tmp_path):
    """Breaks as steps that are passed over for the other one, or as the last epoch for the best.

    The loss falls, so that of the epochs that validate, the second and the fourth, the second has
    the largest.
    """
    [(resumed, whole, epoch)] = alone.run(beside_another, str(tmp_path))
    assert resumed == whole
    assert epoch == 2


def checkpoint_of(optimizer, directory, width=4):
    keras.utils.set_random_seed(5)
    fitted(compiled(optimizer, width=width), dtk.callbacks.Checkpoint(directory))


def another_model(directory):
    """What is said of another width or optimizer, and of one random layer or metric more."""

    def run(dropouts=1, metrics=("mae",), save_freq="epoch", *more):
        keras.utils.set_random_seed(5)
        with strategy().scope():
            layers = [keras.layers.Dropout(0.1) for _ in range(dropouts)]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse", metrics=list(metrics))
        place = pathlib.Path(directory, str(save_freq))
        fitted(model, dtk.callbacks.Checkpoint(place, save_freq), *more, epochs=2)

    place = pathlib.Path(directory, "weights")
    checkpoint_of("sgd", place)
    run()
    with contextlib.suppress(Crash):
        run(1, ["mae"], 3, crash_at(0, 4))
    return [
        fails(checkpoint_of, "sgd", place, width=5),
        fails(checkpoint_of, "adam", place),
        fails(run, 2),
        fails(run, 1, ["mae", "mape"], 3),
    ]


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_another_model_is_refused_on_every_rank(pool, tmp_path):
    """Breaks as "zip() argument 2 is shorter than argument 1"."""
    for answers in pool.run(another_model, str(tmp_path)):
        shape, missing, dropout, metric = [text for kind, text in answers if kind == "ValueError"]
        assert re.search(r"dense\w*/kernel \[\[6, 4\].* has .*kernel \[\[6, 5\]", shape)
        assert "resume=False" in shape and "resume=False" in dropout
        assert "belongs to another model" in missing
        assert "it has 1 random layers (Dropout and the like), this model has 2" in dropout
        assert "variables of metrics, this model has" in metric


def numbered_variables(directory):
    """What resuming says where Keras numbers Nadam's product, which has no name, otherwise."""
    place = pathlib.Path(directory, "nadam")
    checkpoint_of("nadam", place)
    return fails(checkpoint_of, "nadam", place)


@pytest.mark.full("one way of being interrupted of each kind")
@pytest.mark.worlds(("local", 1))
def test_the_same_optimizer_made_twice_in_a_process_resumes(pool, tmp_path):
    assert pool.run(numbered_variables, str(tmp_path)) == [None]


def full_disk(directory):
    """Rank 0 cannot write: every rank must hear of it."""
    if strategy().is_chief:
        pathlib.Path(directory).write_text("in the way")
    return fails(checkpoint_of, "sgd", directory)


def test_state_has_keys_of_any_kind():
    """Keys came back as strings, and a dict of the key "array" not at all."""
    state = {"by": {0: 1.5, (1, "a"): {"array": "x"}, None: {np.int64(3): np.arange(2)}}}
    state["marks"] = {"(key, value)": {"array": {True: [2]}}}
    arrays = {}
    back = unpack(json.loads(json.dumps(pack(state, arrays))), arrays)
    np.testing.assert_array_equal(back["by"][None].pop(3), [0, 1])
    assert back == {**state, "by": {**state["by"], None: {}}}
    before = {"by": {"0": 1.5}, "weights": [{"array": "a0"}]}
    assert unpack(before, {"a0": 7}) == {"by": {"0": 1.5}, "weights": [7]}, "of before"


def test_a_get_state_without_set_state_is_left_alone():
    """Breaks as a resume that fails: the method may mean something else."""
    one = keras.callbacks.LambdaCallback()
    one.get_state = lambda: ["running"]
    assert of_callbacks([one]) == {}


@pytest.mark.parametrize("value", [np.array(["a", None]), np.longdouble(1)])
def test_state_that_could_not_be_read_is_refused_by_name(value):
    """Breaks as a directory of which no checkpoint can be read: such arrays are pickled."""
    with pytest.raises(TypeError, match=r"cannot save callbacks\['Mine.0'\]\['best'\], an? "):
        pack({"Mine.0": {"best": value}}, {}, "callbacks")


def test_state_keeps_types_that_are_not_numpys(tmp_path):
    """Breaks as weights of bfloat16 that come back as bytes."""
    weights, arrays = tf.constant([1.5, -2.0], tf.bfloat16), {}
    packed = pack({"best_weights": [weights, weights[0]]}, arrays)
    np.savez(tmp_path / "arrays.npz", **arrays)
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as stored:
        vector, scalar = unpack(packed, stored)["best_weights"]
    assert vector.dtype == scalar.dtype == tf.bfloat16
    assert (vector.tolist(), scalar.tolist()) == ([1.5, -2.0], 1.5)


@two_ranks
def test_when_rank_0_cannot_write_every_rank_raises(pool, tmp_path):
    first, second = pool.run(full_disk, str(tmp_path / "taken"))
    assert first == second
    assert first[0] in ("FileExistsError", "NotADirectoryError")
    assert "no checkpoint can be written (it is no directory)" in first[1]


def early_stopped(directory):
    """A run that EarlyStopping ended, started again."""
    epochs = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05))
        stopping = keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=100.0, restore_best_weights=True
        )
        history = fitted(model, dtk.callbacks.Checkpoint(directory), stopping, epochs=9)
        epochs.append((history.epoch, everything(model).tolist()))
    return epochs


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_a_run_that_stopped_early_stays_stopped(pool, tmp_path):
    for (epochs, weights), (epochs_again, weights_again) in pool.run(early_stopped, str(tmp_path)):
        assert epochs == epochs_again == [0, 1]
        np.testing.assert_allclose(weights_again, weights, rtol=1e-6)


def best_of(directory):
    """Keep the best by loss over two runs of two epochs; the second makes it worse."""
    at_end = []

    class Snapshots(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            at_end.append(self.model.get_weights())

    for epochs in (2, 4):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05))
        x, y = data()
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 5.0),
            dtk.callbacks.Checkpoint(directory, max_to_keep=2, monitor="val_loss"),
            Snapshots(),
        ]
        # A script may build the CallbackList itself.
        own = keras.callbacks.CallbackList([*callbacks, keras.callbacks.History()], model=model)
        given = {"batch_size": BATCH, "epochs": epochs, "validation_data": (x, y)}
        model.fit(x, y, verbose=0, callbacks=own, **given)
    strategy().communicator.barrier()
    losses, place = model.history.history["val_loss"], pathlib.Path(directory)
    best, note = int(np.argmin(losses)), json.loads((place / "best.json").read_text())
    model.load_weights(place / "best.weights.h5")
    same = all(np.array_equal(a, b) for a, b in zip(model.get_weights(), at_end[best], strict=True))
    return best, losses, note, same, sorted(p.name for p in place.iterdir())


@pytest.mark.full("one way of being interrupted of each kind")
@two_ranks
def test_the_best_of_an_earlier_run_stays_the_best(pool, tmp_path):
    for best, losses, note, same, files in pool.run(best_of, str(tmp_path)):
        assert len(losses) == 4 and best < 2, "the case must have its best epoch in the first run"
        assert note == {"epoch": best + 1, "monitor": "val_loss", "value": losses[best]} and same
        assert files == [
            "best.json",
            "best.weights.h5",
            "checkpoint-00000003",
            "checkpoint-00000004",
        ]


def in_two_fits(directory):
    """Two calls of fit with one callback; the second crashes in its first epoch, and resumes."""
    steps = []

    def run(*crash):
        keras.utils.set_random_seed(5)
        saving, model = dtk.callbacks.Checkpoint(place, save_freq=3), compiled(momentum_sgd())
        fitted(model, saving, recorder(steps), epochs=2)
        model.optimizer.learning_rate = 0.01
        with contextlib.suppress(Crash):
            fitted(model, saving, recorder(steps), *crash, initial_epoch=2, epochs=3)
        return everything(model)

    place = pathlib.Path(directory, "whole")
    whole = run()
    place = pathlib.Path(directory, "resumed")
    run(crash_at(2, 4))
    steps.clear()
    return difference(run(), whole), [step[:2] for step in steps]


@pytest.mark.worlds(("local", 1))
def test_the_second_fit_with_one_callback_resumes(pool, tmp_path):
    """Breaks as steps that are trained twice: the first fit took the second one's checkpoint."""
    [(difference, steps)] = pool.run(in_two_fits, str(tmp_path))
    assert steps == [(2, 3), (2, 4)]
    assert difference <= EXACT


def for_two_models(directory):
    saving = dtk.callbacks.Checkpoint(directory)
    fitted(compiled(momentum_sgd()), saving, epochs=1)
    with pytest.raises(ValueError) as caught:
        fitted(compiled(momentum_sgd()), saving, epochs=1)
    return str(caught.value)


@pytest.mark.worlds(("local", 1))
def test_a_callback_saves_one_model(pool, tmp_path):
    """Folds of a cross-validation mixed their checkpoints, and started again took each other's."""
    (message,) = pool.run(for_two_models, tmp_path)
    assert "has the checkpoints of another model" in message


def counted_by_kerass(directory):
    """What ModelCheckpoint saves every 4 steps, and TensorBoard's steps; whole and resumed."""

    def run(name, *callbacks):
        folder = pathlib.Path(directory, name)
        files = keras.callbacks.ModelCheckpoint(
            f"{folder}/{{epoch}}-{{batch}}.weights.h5", save_freq=4, save_weights_only=True
        )
        board = keras.callbacks.TensorBoard(f"{folder}-logs", update_freq=1)
        with contextlib.suppress(Crash):
            fitted(compiled("sgd"), files, board, *callbacks, epochs=EPOCHS)
        return sorted(file.name for file in folder.iterdir()), board._global_train_batch

    place = pathlib.Path(directory, "checkpoints")
    whole = run("whole")
    run("resumed", dtk.callbacks.Checkpoint(place, save_freq=7), crash_at(2, 2))
    return whole, run("resumed", dtk.callbacks.Checkpoint(place, save_freq=7))


@pytest.mark.worlds(("local", 1))
def test_kerass_callbacks_count_batches_on(pool, tmp_path):
    """Breaks as files of other steps, and as curves that begin anew at step 1."""
    [(whole, resumed)] = pool.run(counted_by_kerass, str(tmp_path), timeout=120)
    assert whole[1] == 20 and resumed == whole


def ended_before_the_best_was_kept(directory):
    """A job ends when the best epoch's checkpoint is written, and nothing is beside it; resume."""

    def end(self, name, best):
        raise Crash

    def run():
        model = compiled("sgd")
        with contextlib.suppress(Crash):
            fitted(model, dtk.callbacks.Checkpoint(directory, monitor="loss"))
        return model

    with patch(CheckpointFiles, keep_best=end):
        trained = run().get_weights()
    best = pathlib.Path(directory, "best.weights.h5")
    before, model = best.exists(), run()  # which has trained its one epoch
    model.load_weights(best)
    return before, all(map(np.array_equal, model.get_weights(), trained))


@pytest.mark.worlds(("local", 1))
def test_the_best_is_kept_by_the_next_start_where_a_job_was_killed(pool, tmp_path):
    """Breaks as a best.weights.h5 of an older epoch, or none, that no later epoch replaces."""
    assert pool.run(ended_before_the_best_was_kept, str(tmp_path)) == [(False, True)]


def blown_up(directory):
    """Weights turn into NaN in the third epoch; return what is kept, and what a rerun says."""
    strategy()  # before the first tensor
    said = io.StringIO()

    class BlowUp(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.optimizer.learning_rate = np.inf

    for more in ([BlowUp(), keras.callbacks.TerminateOnNaN()], []):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.01))
        place = dtk.callbacks.Checkpoint(directory)
        with contextlib.redirect_stdout(said):
            fitted(model, place, *more, epochs=4)
        if more:
            kept = place.files.names()
    finite = all(np.all(np.isfinite(weight)) for weight in model.get_weights())
    return kept, finite, said.getvalue()


@pytest.mark.worlds(("local", 1), pytest.param(("collective", 2), marks=pytest.mark.full))
def test_weights_that_are_not_finite_are_never_the_newest(pool, tmp_path):
    kept, finite, said = pool.run(blown_up, str(tmp_path))[0]
    assert kept == ["checkpoint-00000002", "checkpoint-00000001"] and finite
    assert "epoch 3, step 0: not saved, as " in said and "hold NaN or infinite numbers" in said
    assert f"the newest one stays {tmp_path}/checkpoint-00000002" in said
    assert "resuming at epoch 3/4" in said
