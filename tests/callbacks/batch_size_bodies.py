"""What the tests of callbacks that choose batch sizes run, on every rank at once."""

from __future__ import annotations

import contextlib
import random

import numpy as np

from callbacks.bodies import Crash, compiled, crash_at, data, everything, fails, strategy, untried

ROWS, BATCH = 96, 8


def recorder(steps, rates):
    """Notes for every epoch how many steps it had, and the rate of its first."""
    import keras

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.inside = False

        def on_train_batch_begin(self, batch, logs=None):
            if not self.inside:
                self.inside = True
                rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

                steps.append(0)

        def on_train_batch_end(self, batch, logs=None):
            # Not optimizer.iterations: Keras counts the attempt to read beyond the end.
            steps[-1] += 1

    return Recorder()


def train(callbacks, optimizer, epochs=4, form="arrays", kind="world", **options):
    """Returns steps of each epoch, their rates, weights and history."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    model = compiled(optimizer, kind, **options)
    x, y = data(ROWS)
    given = {"x": x, "y": y, "batch_size": BATCH}
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if form == "dataset":
        given = {"x": rows.batch(BATCH)}
    if form == "shuffled":
        given = {"x": rows.shuffle(ROWS).batch(BATCH)}
    steps, rates = [], []
    model.fit(
        **given,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks, recorder(steps, rates)],
    )
    return steps, rates, everything(model), model.history.history


# GrowBatchInsteadOfDecay.


def grown(max_batch_size=None, form="arrays", kind="world"):
    import keras

    import dtk

    strategy(kind)  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    growing = dtk.callbacks.GrowBatchInsteadOfDecay(
        [0.1, 0.05, 0.025, 0.0125], max_batch_size, batch_size=given
    )
    return train([growing], keras.optimizers.SGD(1.0, momentum=0.9), form=form, kind=kind)


def growing_refused():
    import keras

    import dtk

    strategy()  # before the optimizer: TensorFlow's collectives come first
    grow = dtk.callbacks.GrowBatchInsteadOfDecay
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    beside = [grow([0.1]), dtk.callbacks.BatchSizeSchedule([8])]
    scaled = [grow([0.1]), dtk.callbacks.LearningRateScaling()]
    return [
        fails(train, [grow([0.1], max_batch_size=4)], "sgd"),
        fails(train, [grow([0.1])], "sgd", form="dataset"),
        fails(train, [grow([0.1])], keras.optimizers.SGD(decay)),
        fails(train, beside, "sgd"),
        fails(train, scaled, "sgd"),
        fails(train, [grow(lambda epoch: 0.1 - 0.1 * epoch)], "sgd"),
    ]


# AutoBatchSize.


def all_state(model):
    """Everything a step may change, as this process holds it, bit for bit."""
    from dtk.trainer.replica import snapshot

    kept = snapshot.Snapshot(snapshot.changed_by_training(model))._kept
    numpy_state = np.random.get_state(legacy=False)["state"]
    return (
        [value.tobytes() for _, value in kept],
        random.getstate(),
        (numpy_state["pos"], numpy_state["key"].tobytes()),
    )


def drawing(kind="world"):
    """A model whose steps draw from Keras's, Python's and numpy's generators."""
    import keras
    import tensorflow as tf

    class Draws(keras.layers.Layer):
        def call(self, rows):
            def draw(values):
                return values + np.float32(0.0 * (random.random() + np.random.rand()))

            return tf.ensure_shape(tf.numpy_function(draw, [rows], tf.float32), rows.shape)

    with strategy(kind).scope():
        layers = [Draws(), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", metrics=["mae"])
    return model


def tried(kind="world"):
    """Sizes tried, and which kinds of state a trial has changed in spite of all; and in itself."""
    import keras

    import dtk

    left, within = [], []

    class Watched(dtk.callbacks.AutoBatchSize):
        def _trial(self, size):
            before = all_state(self.model)
            loss = super()._trial(size)
            pairs = zip(before, all_state(self.model), strict=True)
            left.append([size, *(one == other for one, other in pairs)])
            return loss

        def _train(self, size):
            before = all_state(self.model)
            loss = super()._train(size)
            pairs = zip(before, all_state(self.model), strict=True)
            within.append([one == other for one, other in pairs])
            return loss

    keras.utils.set_random_seed(3)
    model = drawing(kind)
    x, y = data(ROWS)
    searching = Watched(trial_batches=3, multiple=8, margin=100.0)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[searching])
    return left, within, searching.trials


def searched_in_vain(kind="world"):
    """Trials that leave the size as it is, against no trials: both runs."""
    import dtk

    runs = []
    for callbacks in ([dtk.callbacks.AutoBatchSize(max_batch_size=8, multiple=8)], []):
        steps, _, weights, history = train(callbacks, "adam", 3, kind=kind, dropout=0.3)
        runs.append((steps, weights.tobytes(), history))
    return runs


def searched(rate=1e-6, form="arrays", epochs=5, **options):
    import keras

    import dtk

    strategy()  # before the optimizer: TensorFlow's collectives come first
    given = BATCH if form == "dataset" else None
    searching = dtk.callbacks.AutoBatchSize(multiple=8, batch_size=given, **options)
    steps, rates, _, _ = train([searching], keras.optimizers.SGD(rate), epochs, form)
    return steps, rates, searching.trials


def searched_seldom():
    return searched(frequency=2, scale_rate=False)


def searched_and_resumed(directory, form):
    """Steps, rates and weights of a run, and of what is left of it after a crash."""
    import keras

    import dtk

    def run(*callbacks):
        searching = dtk.callbacks.AutoBatchSize(multiple=8, margin=0.5, batch_size=8)
        optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
        return train([*callbacks, searching], optimizer, 3, form, dropout=0.3)[:3]

    whole = run()
    with contextlib.suppress(Crash):
        run(dtk.callbacks.Checkpoint(directory, 5), crash_at(1, 4))
    return whole, run(dtk.callbacks.Checkpoint(directory, 5))


def rows_of_a_trial():
    """Rows of every batch of 8 of 24, in a script that sets no seed: 3, a trial's 2, and 3."""
    import keras
    import tensorflow as tf

    import dtk
    from dtk.compat import tf_replicas
    from dtk.trainer.shuffle_seed import ShuffleSeed

    chosen, order = strategy(), []
    before, chosen.shuffle_seed = chosen.shuffle_seed, ShuffleSeed(7)
    chosen.shuffle_seed.restore(7, in_force=tf_replicas.global_seed())

    class Rows(keras.layers.Layer):
        def call(self, rows):
            tf.py_function(lambda values: order.append(values.numpy().ravel().tolist()), [rows], [])
            return rows

    with chosen.scope():
        model = keras.Sequential([keras.Input((1,)), Rows(), keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    untried(model)
    x = np.arange(24.0, dtype="float32")[:, None]
    searching = dtk.callbacks.AutoBatchSize(trial_batches=2, max_batch_size=8, multiple=8)
    try:
        model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=[searching])
    finally:
        chosen.shuffle_seed = before
    return order


def search_refused():
    import keras

    import dtk

    strategy()  # before the optimizer: TensorFlow's collectives come first
    auto = dtk.callbacks.AutoBatchSize
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9)
    return [
        fails(train, [auto()], "sgd", form="dataset"),
        fails(train, [auto()], keras.optimizers.SGD(decay)),
        fails(train, [auto(), dtk.callbacks.BatchSizeSchedule([8])], "sgd"),
    ]
