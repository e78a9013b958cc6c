"""What the tests of callbacks that evaluate within `fit` run, on every rank at once."""

from __future__ import annotations

import contextlib
import io

import numpy as np

from callbacks.bodies import (
    Crash,
    compiled,
    crash_at,
    data,
    everything,
    fails,
    recorder,
    strategy,
)

BATCH = 8  # 37 rows: five steps an epoch, the last of 5


def fit(callbacks, form="arrays", epochs=2, kind="world", optimizer="adam", **options):
    """Train on 37 rows; returns the model and the steps taken."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    model = compiled(optimizer, kind, dropout=0.3, **options)
    x, y = data()
    given = {"x": x, "y": y, "batch_size": BATCH}
    if form in ("dataset", "stream"):
        given = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}
    if form == "stream":
        given = {"x": given["x"].repeat(), "steps_per_epoch": 4}
    seen = []
    with contextlib.suppress(Crash):
        model.fit(
            **given,
            epochs=epochs,
            verbose=0,
            callbacks=[*callbacks, recorder(seen)],
            # Resets the metrics that count rows.
            validation_data=(x[:9], y[:9]) if form == "dataset" else None,
        )
    return model, [step[:2] for step in seen]


class Calls:
    """A callback for CrossValidation that notes what it is told, after how many steps."""

    def __init__(self, last=None):
        self.noted = []
        self.last = last

    def __call__(self, index, average_error, samples, minibatches):
        self.noted.append((index, average_error, samples, minibatches, self.steps()))
        return self.last is None or len(self.noted) < self.last


def cross_validation(every, calls, form="arrays", **options):
    """One whose data are arrays or a dataset, as those of `fit` are."""
    import tensorflow as tf

    import dtk

    x, y = data(21)
    given = (x, y) if form == "arrays" else tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    size = 4 if form == "arrays" else None
    callback = dtk.callbacks.CrossValidation(every, calls, given, size, **options)
    calls.steps = lambda: int(callback.model.optimizer.iterations.numpy())
    return callback


def cross_validated(form, every=20, kind="world", epochs=2):
    """What the callback was told; and the same training without, for comparison."""
    import dtk

    strategy(kind)  # before the first dataset: TensorFlow's collectives come first
    calls = Calls()
    more = []
    if form == "schedule":
        more, form = [dtk.callbacks.BatchSizeSchedule([8, 16])], "arrays"
    validating = [cross_validation(every, calls, form)]
    model, _ = fit([*more, *validating], form, epochs, kind)
    plain, _ = fit(more, form, epochs, kind)
    runs = [(everything(m).tobytes(), m.history.history) for m in (model, plain)]
    return calls.noted, runs


def evaluated_as_outside():
    """The errors told, and what `evaluate` says of the weights of those steps."""
    import dtk

    errors, model_weights = [], []

    def callback(index, average_error, samples, minibatches):
        errors.append(average_error)
        model_weights.append(validating.model.get_weights())

    x, y = data(21)
    validating = dtk.callbacks.CrossValidation(20, callback, (x, y), monitor="mae")
    model, _ = fit([validating])
    expected = []
    for weights in model_weights:
        model.set_weights(weights)
        expected.append(model.evaluate(x, y, verbose=0, return_dict=True)["mae"])
    return errors, expected


def stopped_by_one_rank():
    """The last rank alone says False, at the second evaluation."""
    chosen = strategy()
    calls = Calls(2 if chosen.rank == chosen.communicator.size - 1 else None)
    model, seen = fit([cross_validation(20, calls)], epochs=3)
    return len(calls.noted), seen[-1], int(model.optimizer.iterations)


def counted_on(directory):
    """Calls, and the steps before, in two pieces of a run that crashed between evaluations."""
    import pathlib

    import dtk

    place = pathlib.Path(directory, str(strategy().rank))

    def run(*more):
        calls = Calls()
        fit([cross_validation(20, calls, "dataset"), *more], "dataset", epochs=3)
        return [(index, steps) for index, *_, steps in calls.noted]

    first = run(dtk.callbacks.Checkpoint(place, 4), crash_at(1, 4))
    return first, run(dtk.callbacks.Checkpoint(place, 4))


def validation_refused():
    import keras
    import tensorflow as tf

    import dtk

    x, y = data()
    other = x + strategy().rank

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def train_step(self, batch):
            return super().train_step(batch)

    with strategy().scope():
        own = Own()
        own.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    validate = dtk.callbacks.CrossValidation
    return [
        fails(fit, [validate(20, print, (other, y))]),
        fails(fit, [validate(20, print, (x, y), monitor="accuracy")]),
        fails(own.fit, rows, verbose=0, callbacks=[validate(20, print, (x, y))]),
    ]


def served(consistency):
    """On the chief of parameter servers: what was told, runs with and without, what is refused."""
    import keras
    import tensorflow as tf

    import dtk

    from strategies.bodies import served_with

    chosen = served_with(consistency)
    x, y = data(64)

    def run(*callbacks, dataset=False):
        keras.utils.set_random_seed(3)
        with chosen.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01), "mse")
        rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
        given = {"x": rows} if dataset else {"x": x, "y": y, "batch_size": 8}
        model.fit(**given, epochs=2, verbose=0, callbacks=callbacks)
        return model.get_weights()[0], model.history.history["loss"]

    calls, testing = Calls(), dtk.callbacks.FinalTest(x[:9], y[:9])
    validating = cross_validation(24, calls)
    runs = [run(validating, testing), run()]
    refused = [
        fails(run, cross_validation(24, calls), dataset=True),
        fails(run, dtk.callbacks.AutoBatchSize()),
        fails(run, dtk.callbacks.BatchNormStatistics(x)),
    ]
    return calls.noted, testing.result, runs, refused


# HalveRate.


def halved(directory=None, gain=0.99, crash=None):
    """A rule that is never content: rates of every step, and what was said."""
    import keras

    import dtk

    rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    strategy()  # before the optimizer: TensorFlow's collectives come first
    x, y = data(16)
    halving = dtk.callbacks.HalveRate(16, (x, y), gain, cuts=2)
    more = [] if directory is None else [dtk.callbacks.Checkpoint(directory, 3)]
    more += [] if crash is None else [crash_at(*crash)]
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        model, _ = fit([halving, Rates(), *more], optimizer=keras.optimizers.SGD(0.08), epochs=3)
    return rates, int(model.optimizer.iterations), screen.getvalue()


def halving_refused():
    import keras

    import dtk

    strategy()  # before the optimizer: TensorFlow's collectives come first
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    halving = dtk.callbacks.HalveRate(16, data())
    return fails(fit, [halving], optimizer=keras.optimizers.SGD(decay))


# FinalTest.


def tested(crash=False):
    """Result, history, screen, and what `evaluate` says after `fit`."""
    import keras

    import dtk

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


# BatchNormStatistics.


def normalized(form, batches, size=16, kind="world", synchronized=False, **options):
    """Statistics after training, and the same training without the callback."""
    import keras
    import tensorflow as tf

    import dtk

    x, y = data()
    x = x * 3 + np.arange(37, dtype="float32")[:, None]  # ranks' rows differ in their mean
    given, of_rows = x, size
    if form == "dataset":
        given, of_rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(size), None

    def run(*callbacks):
        keras.utils.set_random_seed(3)
        norms = [keras.layers.BatchNormalization(synchronized=synchronized) for _ in range(2)]
        with strategy(kind).scope():
            layers = [norms[0], keras.layers.Dense(3), keras.layers.Dropout(0.3), norms[1]]
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"], **options)
        held_out = (x[:9], y[:9])
        model.fit(
            x,
            y,
            batch_size=16,
            epochs=2,
            verbose=0,
            callbacks=callbacks,
            validation_data=held_out,
        )
        assert norms[0].momentum == 0.99
        weights = [v.numpy().tobytes() for v in model.trainable_variables]
        found = [(n.moving_mean.numpy(), n.moving_variance.numpy()) for n in norms]
        val_loss = model.history.history["val_loss"][-1]
        evaluated = model.evaluate(*held_out, verbose=0)[0]
        return weights, found, (val_loss, evaluated), model.history.history["loss"]

    statistics = dtk.callbacks.BatchNormStatistics(given, batches, of_rows)
    return run(statistics), run() if synchronized else None, x


def normalized_in_executions():
    return normalized("arrays", 2, synchronized=True, steps_per_execution=3)


def normalization_refused():
    import keras

    import dtk

    def run(*layers):
        with strategy().scope():
            model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x, y = data()
        model.fit(x, y, verbose=0, callbacks=[dtk.callbacks.BatchNormStatistics(x)])

    return [fails(run), fails(run, keras.layers.BatchNormalization(renorm=True))]
