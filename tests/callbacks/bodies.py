"""What the tests of callbacks run, on every rank at once."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal

import numpy as np

ROWS, BATCH, EPOCHS = 37, 8, 4  # five steps an epoch, the last of 5 rows


def strategy(kind="world"):
    """The strategy of this process: over its world, or mirrored over two devices."""
    return _strategy(kind)


@functools.cache
def _strategy(kind):
    from dtk.strategies import AllReduceStrategy, MirroredStrategy

    if kind == "mirrored":
        return MirroredStrategy(devices=2)
    return AllReduceStrategy(os.environ["DTK_TEST_COMMUNICATOR"])


def make_devices():
    strategy("mirrored")


def data(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype("float32")
    y = (x[:, :1] - 0.5 * x[:, 1:2]).astype("float32")
    return x, y


def compiled(optimizer, kind="world", dropout=0.0, width=4, **options):
    import keras

    with strategy(kind).scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width, activation="tanh"),
                keras.layers.Dropout(dropout),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return model


def everything(model):
    """Weights and optimizer state, one vector."""
    import keras

    variables = [*model.weights, *model.optimizer.variables]
    values = [keras.ops.convert_to_tensor(v).numpy() for v in variables]
    return np.concatenate([np.ravel(v).astype("float64") for v in values])


def difference(one, other):
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


class Crash(Exception):
    """What ends a run in its middle."""


def crash_at(epoch, step):
    import keras

    class Crasher(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if (self.epoch, batch) == (epoch, step):
                raise Crash

    return Crasher()


def recorder(into):
    """Notes (epoch, step, steps the progress bar was told) of every step."""
    import keras

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            into.append((self.epoch, batch, self.params["steps"]))

    return Recorder()


# Resuming: for every case the pieces of one training.


def epoch_case():
    import keras

    return {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "dropout": 0.3,
        "callbacks": [
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=0.5),
            keras.callbacks.EarlyStopping("mae", mode="min", patience=3, restore_best_weights=True),
        ],
        "crash": (2, 3),
        "resumed": (2, 0),
    }


def steps_case():
    # Step 7 is in the middle of an accumulation window.
    import keras

    return {
        "optimizer": keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, clipnorm=0.5),
        "save_freq": 7,
        "crash": (2, 2),
        "resumed": (1, 2),
    }


def dataset_case():
    import keras
    import tensorflow as tf

    return {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "data": tf.data.Dataset.from_tensor_slices(data()).shuffle(ROWS).batch(BATCH),
        "save_freq": 7,
        "crash": (2, 2),
        "resumed": (1, 2),
    }


def stream_case():
    import keras
    import tensorflow as tf

    return {
        "optimizer": keras.optimizers.SGD(0.05),
        "data": tf.data.Dataset.from_tensor_slices(data()).shuffle(ROWS).repeat().batch(BATCH),
        "steps_per_epoch": 4,
        "save_freq": 7,
        "crash": (2, 1),
        "resumed": (1, 3),
    }


def stream_epoch_case():
    return {**stream_case(), "save_freq": "epoch", "resumed": (2, 0)}


def scaled_case():
    # Sizes 8, 16, 16, 32: 5, 3, 3, 2 steps; step 6 is within the warm-up.
    import keras

    import dtk

    return {
        "optimizer": keras.optimizers.SGD(0.02, momentum=0.9),
        "callbacks": [
            dtk.callbacks.BatchSizeSchedule([8, (2, 16), 32]),
            dtk.callbacks.LearningRateScaling(warmup_epochs=2.5),
        ],
        "save_freq": 6,
        "crash": (2, 1),
        "resumed": (1, 1),
    }


def schedule_case():
    import keras

    import dtk

    decay = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    return {
        "optimizer": keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(decay, use_ema=True), initial_scale=64.0
        ),
        "callbacks": [dtk.callbacks.LearningRateScaling("sqrt", warmup_epochs=3)],
        "crash": (2, 1),
        "resumed": (2, 0),
    }


def execution_case():
    # Callbacks are called at steps 0, 2 and 4.
    return {
        "optimizer": "adam",
        "compile": {"steps_per_execution": 2},
        "save_freq": 4,
        "crash": (1, 2),
        "resumed": (0, 4),
    }


def swapped_case():
    # At the end of an epoch the averages are in the model, and its weights are in the optimizer.
    import keras

    return {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.8),
        "callbacks": [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
        "crash": (2, 1),
        "resumed": (2, 0),
    }


def quantised_case():
    # Its residuals are each worker's own, and the stripes of sums each owner's.
    return {
        "optimizer": "adam",
        "exchange": exchange().WarmStart(exchange().Quantized(1), samples=3 * BATCH),
        "save_freq": 7,
        "crash": (2, 2),
        "resumed": (1, 2),
    }


def delayed_case():
    # Gradients that no step has applied yet are saved.
    return {
        "optimizer": "adam",
        "exchange": exchange().Delayed(exchange().Quantized(4)),
        "save_freq": 7,
        "crash": (2, 2),
        "resumed": (1, 2),
    }


def block_momentum_case():
    import keras

    return {
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.9),
        "exchange": exchange().BlockMomentum(block_size=3 * BATCH, reset_local_momentum=False),
        "crash": (2, 3),
        "resumed": (2, 0),
    }


def averaging_case():
    # Adam's moments are each worker's own.
    return {
        "optimizer": "adam",
        "exchange": exchange().ModelAveraging(period=BATCH),
        "crash": (2, 3),
        "resumed": (2, 0),
    }


def exchange():
    import dtk.exchange

    return dtk.exchange


CASES = {
    "quantised": quantised_case,
    "delayed": delayed_case,
    "block momentum": block_momentum_case,
    "averaging": averaging_case,
    "swapped": swapped_case,
    "execution": execution_case,
    "epoch": epoch_case,
    "steps": steps_case,
    "dataset": dataset_case,
    "stream": stream_case,
    "stream-epoch": stream_epoch_case,
    "scaled": scaled_case,
    "schedule": schedule_case,
}


def train(name, directory=None, crash=False, seed=5, kind="world"):
    """Train one case; with a directory it is saved and resumed. Returns state, history, start."""
    import keras

    import dtk

    keras.utils.set_random_seed(seed)
    case = CASES[name]()
    strategy(kind).exchange = case.get("exchange")
    model = compiled(case["optimizer"], kind, case.get("dropout", 0.0), **case.get("compile", {}))
    seen = []
    callbacks = [*case.get("callbacks", ()), recorder(seen)]
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
    return everything(model), model.history.history, seen[0][:2]


def resume(name, directory, kind="world"):
    """Train through; train, crash, and resume: with another seed in the script where that may be.

    A shuffled dataset takes its seed when the script makes it, before any callback runs.
    """
    place = pathlib.Path(directory, str(strategy(kind).rank))  # ranks share no file system
    whole, history, _ = train(name, kind=kind)
    train(name, place, crash=True, kind=kind)
    seed = 5 if "data" in CASES[name]() else 99
    again, resumed_history, start = train(name, place, seed=seed, kind=kind)
    return {
        "difference": difference(again, whole),
        "history": history,
        "resumed history": resumed_history,
        "start": start,
        "expected start": CASES[name]()["resumed"],
        "files": sorted(p.name for p in place.iterdir()) if place.exists() else None,
    }


def checkpoint_of(optimizer, directory, width=4, epochs=1, kind="world", **options):
    import keras

    import dtk

    keras.utils.set_random_seed(5)
    model = compiled(optimizer, kind, width=width)
    x, y = data()
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=epochs,
        verbose=0,
        callbacks=[dtk.callbacks.Checkpoint(directory, **options)],
    )
    return everything(model), history.history


def own_callback_list(directory):
    """A script may build the CallbackList itself; dtk's callbacks work in it all the same."""
    import keras

    import dtk

    epochs = []
    for total in (1, 2):
        model = compiled("sgd")
        x, y = data()
        own = keras.callbacks.CallbackList(
            [dtk.callbacks.Checkpoint(directory), keras.callbacks.History()], model=model
        )
        model.fit(x, y, epochs=total, verbose=0, callbacks=own)
        epochs.append(model.history.epoch)
    return epochs


def fails(function, *args, **kwargs):
    """The type and text of what a body raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def another_model(directory):
    checkpoint_of("sgd", directory)
    return [
        fails(checkpoint_of, "sgd", directory, width=5),
        fails(checkpoint_of, "adam", directory),
    ]


def corrupt(directory):
    """The newest checkpoint loses its second half; then all lose theirs."""
    import warnings

    import dtk

    checkpoint_of("sgd", directory, epochs=3)
    strategy().communicator.barrier()
    files = dtk.callbacks.checkpoint.CheckpointFiles(directory)
    if strategy().is_chief:
        cut_in_half(files.weights(files.names()[0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, history = checkpoint_of("sgd", directory, epochs=4)
    told = [str(w.message) for w in caught if "corrupt checkpoint" in str(w.message)]
    strategy().communicator.barrier()
    if strategy().is_chief:
        for name in files.names():
            cut_in_half(files.weights(name))
    strategy().communicator.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = fails(checkpoint_of, "sgd", directory, epochs=4)
    return told, len(history["loss"]), lost


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def full_disk(directory):
    """Rank 0 cannot write: every rank must hear of it."""
    if strategy().is_chief:
        pathlib.Path(directory).write_text("in the way")
    return fails(checkpoint_of, "sgd", directory)


def early_stopped(directory):
    """A run that EarlyStopping ended, started again."""
    import keras

    import dtk

    epochs = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05))
        x, y = data()
        stopping = keras.callbacks.EarlyStopping(
            "loss", patience=1, min_delta=100.0, restore_best_weights=True
        )
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=9,
            verbose=0,
            callbacks=[dtk.callbacks.Checkpoint(directory), stopping],
        )
        epochs.append((history.epoch, everything(model).tolist()))
    return epochs


def best_of(directory):
    """Keep the best by loss; the scheduler makes later epochs worse."""
    import keras

    import dtk

    keras.utils.set_random_seed(5)
    model = compiled(keras.optimizers.SGD(0.05))
    x, y = data()
    at_end = []

    class Snapshots(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            at_end.append(self.model.get_weights())

    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else 5.0),
        dtk.callbacks.Checkpoint(directory, max_to_keep=2, monitor="val_loss"),
        Snapshots(),
    ]
    history = model.fit(
        x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks, validation_data=(x, y)
    )
    strategy().communicator.barrier()
    best = int(np.argmin(history.history["val_loss"]))
    model.load_weights(pathlib.Path(directory, "best.weights.h5"))
    same = all(np.array_equal(a, b) for a, b in zip(model.get_weights(), at_end[best], strict=True))
    return best, same, sorted(p.name for p in pathlib.Path(directory).iterdir())


def draws(directory):
    """What Python's and numpy's generators give in every step: of a whole run, and of a resumed."""
    import random

    import keras

    import dtk

    def run(*callbacks, seed=5):
        keras.utils.set_random_seed(seed)
        model = compiled("sgd")
        drawn = {}

        class Drawing(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.epoch = epoch

            def on_train_batch_end(self, batch, logs=None):
                drawn[self.epoch, batch] = random.random(), np.random.rand()

        x, y = data()
        with contextlib.suppress(Crash):
            model.fit(
                x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Drawing(), *callbacks]
            )
        return drawn

    whole = run()
    run(dtk.callbacks.Checkpoint(directory, 7), crash_at(2, 1))
    return whole, run(dtk.callbacks.Checkpoint(directory, 7), seed=99)


def best_across_runs(directory, mode):
    """Two runs, the second of which gets no better: what each leaves as the best."""
    import json

    import keras

    import dtk

    strategy()  # before the optimizer's variables: TensorFlow's collectives come first
    later = {"min": 5.0, "max": 0.05}[mode]
    notes = []
    for epochs in (2, 4):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05))
        x, y = data()
        rate = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 if epoch < 2 else later)
        saved = dtk.callbacks.Checkpoint(directory, monitor="loss", mode=mode)
        history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=[rate, saved])
        strategy().communicator.barrier()
        notes.append(json.loads(pathlib.Path(directory, "best.json").read_text()))
        strategy().communicator.barrier()
    return notes, history.history["loss"]


def one_dropout_more(directory):
    """A random layer, then a metric, that the checkpoint does not know: neither has weights."""
    import keras

    import dtk

    def run(dropouts=1, metrics=("mae",), save_freq="epoch", *more):
        keras.utils.set_random_seed(5)
        with strategy().scope():
            layers = [keras.layers.Dropout(0.1) for _ in range(dropouts)]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
            model.compile(optimizer="sgd", loss="mse", metrics=list(metrics))
        x, y = data()
        place = pathlib.Path(directory, str(save_freq))
        saved = dtk.callbacks.Checkpoint(place, save_freq)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[saved, *more])

    run()
    with contextlib.suppress(Crash):
        run(1, ["mae"], 3, crash_at(0, 4))
    return fails(run, 2), fails(run, 1, ["mae", "mape"], 3)


def terminated(directory):
    """The last rank alone gets SIGTERM at step 2 of epoch 1; all leave together, then resume."""
    import keras

    import dtk

    chosen = strategy()
    mine = signal.getsignal(signal.SIGTERM)

    class Preempted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            last = chosen.rank == chosen.communicator.size - 1
            if last and (self.epoch, batch) == (1, 1):
                os.kill(os.getpid(), signal.SIGTERM)

    def run(*callbacks, seen=None):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        x, y = data(400)
        note = recorder([] if seen is None else seen)
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[*callbacks, note])
        return everything(model)

    whole = run()
    code = None
    try:
        run(dtk.callbacks.Checkpoint(directory), Preempted())
    except SystemExit as ending:
        code = ending.code
    restored = signal.getsignal(signal.SIGTERM) is mine
    seen = []
    again = run(dtk.callbacks.Checkpoint(directory), seen=seen)
    return code, restored, seen[0], difference(again, whole)


def preempted_in_validation(directory, form, patience=3.0):
    """SIGTERM on the last rank early in a validation that lasts longer than ranks are patient."""
    import time

    import keras
    import tensorflow as tf

    import dtk
    from dtk.callbacks import checkpoint

    chosen = strategy()
    x, y = data(40)

    class Preempted(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_test_batch_end(self, batch, logs=None):
            if self.epoch == 1:
                time.sleep(0.25)
                last = chosen.rank == chosen.communicator.size - 1
                if last and batch == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

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
    code, original = None, checkpoint.Termination
    checkpoint.Termination = functools.partial(original, patience=patience)
    try:
        run(dtk.callbacks.Checkpoint(directory), Preempted())
    except SystemExit as ending:
        code = ending.code
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


# Learning rate.


def warming(kind="world", scheduled=False, momentum_correction=True):
    """Rates seen by every step, and the same training written out by hand in numpy."""
    import keras

    import dtk

    keras.utils.set_random_seed(3)
    rate = 0.1
    if scheduled:
        rate = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.05])
    with strategy(kind).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(optimizer=keras.optimizers.SGD(rate, momentum=0.9), loss="mse")
    begin = model.get_weights()[0].astype("float64")
    x, y = data(32)
    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            value = self.model.optimizer.learning_rate
            rates.append(float(keras.ops.convert_to_tensor(value).numpy()))

    scaling = dtk.callbacks.LearningRateScaling(
        4.0, warmup_epochs=1.5, momentum_correction=momentum_correction
    )
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=[scaling, Rates()])
    return rates, difference(model.get_weights()[0], by_hand(begin, x, y, momentum_correction))


def by_hand(weights, x, y, corrected):
    """Momentum SGD of Goyal et al. (eq. 9 and 10), rates as in `warming`, no schedule."""
    u = v = np.zeros_like(weights)
    for step in range(12):
        rate = 0.1 * (1 + 3 * min(1, step / 4 / 1.5))
        part = slice(step % 4 * 8, step % 4 * 8 + 8)
        residual = x[part] @ weights - y[part]
        gradient = 2 * x[part].T.astype("float64") @ residual / 8
        u = 0.9 * u + gradient
        v = 0.9 * v - rate * gradient
        weights = weights - rate * u if corrected else weights + v
    return weights


def scaled_once(directory):
    """Rates after one fit, a second one, one with a new callback, and after resuming."""
    import contextlib
    import io

    import keras

    import dtk

    def rate_of(model):
        return round(float(keras.ops.convert_to_tensor(model.optimizer.learning_rate).numpy()), 6)

    x, y = data()
    rates = []
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model = compiled(keras.optimizers.SGD(0.1))
        scaling = dtk.callbacks.LearningRateScaling()
        for callback in (scaling, scaling, dtk.callbacks.LearningRateScaling()):
            saved = dtk.callbacks.Checkpoint(directory, resume=False)
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback, saved])
            rates.append(rate_of(model))
        for order in (1, -1):
            model = compiled(keras.optimizers.SGD(0.1))
            again = [dtk.callbacks.LearningRateScaling(), dtk.callbacks.Checkpoint(directory)]
            model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=again[::order])
            rates.append(rate_of(model))
        # Absolute rates of other callbacks stand, and a new optimizer is scaled anew.
        with strategy().scope():
            model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
        absolute = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 if epoch == 0 else 0.03)
        model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[dtk.callbacks.LearningRateScaling(), absolute],
        )
        rates.append(rate_of(model))
    return rates, told.getvalue()


def rate_function_refused():
    import keras

    import dtk

    model = compiled(keras.optimizers.SGD(lambda: 0.1))
    x, y = data()
    return fails(model.fit, x, y, verbose=0, callbacks=[dtk.callbacks.LearningRateScaling()])


# Batch sizes.


def batch_sizes(kind="world", form="arrays", initial_epoch=0):
    """Rows of every step as the model sees them, and what the progress bar is told."""
    import keras
    import tensorflow as tf

    import dtk

    keras.utils.set_random_seed(3)
    order = []

    class Rows(keras.layers.Layer):
        def call(self, rows):
            def note(values):
                order.append(values.numpy().ravel().astype(int).tolist())

            tf.py_function(note, [rows], [])
            return rows

    with strategy(kind).scope():
        model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    untried(model)
    x = np.arange(24.0, dtype="float32")[:, None]
    if form == "arrays":
        given = {"x": x, "y": x, "batch_size": 5, "sample_weight": x[:, 0]}
    elif form == "tensors":
        given = {"x": tf.constant(x), "y": tf.constant(x)}
    else:
        given = {"x": tf.data.Dataset.from_tensor_slices((x, x)).batch(5)}
    seen = []
    schedule = dtk.callbacks.BatchSizeSchedule([(2, 6), 12, 7])
    given |= {"epochs": 5, "initial_epoch": initial_epoch, "verbose": 0}
    model.fit(**given, callbacks=[schedule, recorder(seen)])
    return order, seen


def untried(model):
    """No self-test of this one, whose layer would remember the rows of that."""
    from dtk.trainer.model_scope import trainer_of

    trainer_of(model).kinds["train"] = {}


def refused_batches():
    import keras

    import dtk

    class Rows(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return data(4)

    model = compiled("sgd")
    return fails(model.fit, Rows(), verbose=0, callbacks=[dtk.callbacks.BatchSizeSchedule([8])])


# The rest.


def broadcast_from(root):
    """Ranks that start apart: whose weights does everyone train with? Rate 0 keeps them."""
    import keras

    import dtk

    rank = strategy().rank  # made before the seeds differ: ranks are told to shuffle alike
    keras.utils.set_random_seed(10 + rank)
    model = compiled(keras.optimizers.SGD(0.0))
    mine = model.get_weights()[0]
    keras.utils.set_random_seed(10)  # ranks that would shuffle apart are refused
    x, y = data()
    model.fit(x, y, verbose=0, callbacks=[dtk.callbacks.BroadcastVariables(root)])
    return mine, model.get_weights()[0]


def broadcast_refused(root, kind="world"):
    import dtk

    model = compiled("sgd", kind)
    x, y = data()
    return fails(model.fit, x, y, verbose=0, callbacks=[dtk.callbacks.BroadcastVariables(root)])


def not_under_a_strategy(directory):
    import keras

    import dtk

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


def printed(directory, freq):
    import contextlib
    import io

    import dtk

    model = compiled("sgd")
    x, y = data()
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        for log in (None, str(pathlib.Path(directory, "log"))):
            printer = dtk.callbacks.ProgressPrinter(freq, log_to_file=log)
            model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[printer])
    rank = strategy().rank
    return screen.getvalue(), pathlib.Path(directory, f"log.rank{rank}").read_text()


def keras_callbacks(directory):
    """Keras's own callbacks, all in one fit of four epochs on every rank."""
    import keras

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
        chosen.CSVLogger(str(place / "log.csv")),
        chosen.ModelCheckpoint(str(place / "epoch-{epoch}.keras")),
        chosen.ModelCheckpoint(str(place / "best.keras"), save_best_only=True),
        chosen.ModelCheckpoint(str(place / "w.weights.h5"), save_weights_only=True, save_freq=2),
        chosen.BackupAndRestore(str(place / "backup"), delete_checkpoint=False),
        chosen.TerminateOnNaN(),
    ]
    history = model.fit(
        x, y, batch_size=8, epochs=9, verbose=0, callbacks=given, validation_data=(x[:9], y[:9])
    )
    files = sorted(p.name for p in place.iterdir())
    reloaded = None
    if (place / "best.keras").exists():
        reloaded = keras.models.load_model(place / "best.keras").count_params()
    return history.history, everything(model), files, reloaded, model.count_params()


def keras_backup(directory):
    """BackupAndRestore brings every rank back to the epoch rank 0 knows of."""
    import keras

    place = pathlib.Path(directory, str(strategy().rank))

    def run(*more):
        keras.utils.set_random_seed(5)
        model = compiled(keras.optimizers.SGD(0.05, momentum=0.9))
        x, y = data()
        seen = []
        backup = keras.callbacks.BackupAndRestore(str(place))
        with contextlib.suppress(Crash):
            model.fit(
                x, y, batch_size=8, epochs=4, verbose=0, callbacks=[backup, recorder(seen), *more]
            )
        return everything(model), seen[0][:2]

    whole, _ = run()
    run(crash_at(2, 1))
    again, start = run()
    return difference(again, whole), start


def nan_on_one_rank():
    """Rows of the last rank alone hold NaN: every rank stops at that step."""
    import keras

    x, y = data(32)
    x[15] = np.nan
    model = compiled("sgd")
    seen = []
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN(), recorder(seen)],
    )
    return [s[:2] for s in seen]


def tensorboard(directory):
    import keras

    place = pathlib.Path(directory, str(strategy().rank))
    place.mkdir()
    model = compiled("sgd")
    x, y = data()
    board = keras.callbacks.TensorBoard(str(place), update_freq=2, histogram_freq=1)
    model.fit(x, y, epochs=2, verbose=0, callbacks=[board], validation_data=(x, y))
    return sorted(p.name for p in place.rglob("events*"))


def examples(module):
    """Run the examples in a module's docstrings."""
    import doctest
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = doctest.testmod(importlib.import_module(module))
    return outcome.failed, outcome.attempted
