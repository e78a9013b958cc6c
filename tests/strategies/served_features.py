"""What the tests of datasets, warm starts and exchanges run on the chief of parameter servers."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from strategies.bodies import digits, flat, served_with
from strategies.served_bodies import line


@contextlib.contextmanager
def exchanging(strategy, exchange):
    """Under a strategy of this process, which has none otherwise."""
    if strategy is not None:
        strategy.exchange = exchange
    try:
        yield
    finally:
        if strategy is not None:
            strategy.exchange = None


LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.2),
    "normalisation": lambda: keras.layers.BatchNormalization(),
}


def network(*more):
    """A classifier with some of LAYERS, which draw their seeds after the model's has been set."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            *(LAYERS[name]() for name in more),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# Pipelines of the workers' own.


def shard(count, index, rows):
    """Every `count`-th of the digits' first 160, in batches of `rows`."""
    data = tf.data.Dataset.from_tensor_slices(tuple(a[:160] for a in digits()))
    return data.shard(count, index).batch(rows, drop_remainder=True)


def pipelines(consistency, slices, epochs=2):
    """Ten steps an epoch; with a consistency of None in one process, from the same batches."""
    strategy = served_with(consistency) if consistency else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network()
    if strategy is None:
        shards = [shard(slices, index, 16 // slices) for index in range(slices)]
        data = tf.data.Dataset.zip(*shards).map(
            lambda *parts: tuple(tf.concat(column, 0) for column in zip(*parts, strict=True))
        )
    else:
        data = strategy.distribute_datasets_from_function(
            lambda context: shard(
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.get_per_replica_batch_size(16),
            )
        )
    steps = 10 if strategy else None
    shuffle = {"shuffle": False}
    history = model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0, **shuffle).history
    evaluated = model.evaluate(data, steps=steps, verbose=0)
    return flat(model.get_weights()), history, evaluated, int(model.optimizer.iterations.numpy())


def _fit_from(dataset_fn, steps=2, consistency="sync"):
    strategy = served_with(consistency)
    with strategy.scope():
        model = network()
    data = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)
    return model, data


def _raises(context):
    raise OSError("no such file: rows-00001")


def tuple_of(*row):
    return row


def _made_before(change):
    data = shard(1, 0, 4)
    return _fit_from(lambda context: change(data))


def _uneven(context):
    return shard(1, 0, 8 + context.input_pipeline_id)


WRONG = {
    "raises": lambda: _fit_from(_raises),
    "rows": lambda: _fit_from(lambda context: shard(1, 0, 4).unbatch()),
    "no dataset": lambda: _fit_from(lambda context: [1, 2]),
    "any size": lambda: _fit_from(lambda context: shard(1, 0, 4).unbatch().batch(4)),
    "no batch": lambda: _fit_from(lambda context: shard(1, 0, 4).take(0)),
    "uneven": lambda: _fit_from(_uneven),
    "made before": lambda: _made_before(lambda data: data),
    "made from what was made before": lambda: _made_before(lambda data: data.map(tuple_of)),
    "no steps": lambda: _fit_from(lambda context: shard(1, 0, 4), steps=None),
    "predict": lambda: (lambda pair: pair[0].predict(pair[1], steps=1, verbose=0))(
        _fit_from(lambda context: shard(1, 0, 4))
    ),
    "loss scaling": lambda: _push_rarely("loss scaling"),
    "accumulation": lambda: _push_rarely("accumulation"),
}


def _push_rarely(what):
    from dtk.exchange import Downpour

    strategy = served_with("async")
    optimizer = keras.optimizers.SGD(
        gradient_accumulation_steps=2 * (what == "accumulation") or None
    )
    if what == "loss scaling":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with exchanging(strategy, Downpour(2)), strategy.scope():
        model = line()
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)


def wrong(name):
    """Class, message and notes of what a mistake raised."""
    try:
        WRONG[name]()
    except Exception as error:
        return type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing", ""


# Warm starts.


def warmed_up(consistency, epochs=3):
    """By epoch: weights, and the statistics of its schedule. 8 steps of 20 rows an epoch."""
    strategy = served_with(consistency) if consistency else None
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            statistics = strategy.schedule_of(model).statistics if strategy else None
            seen.append((flat(model.get_weights()), statistics))

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = network("dropout")
    x, y = digits()
    model.fit(x[:160], y[:160], batch_size=20, epochs=epochs, verbose=0, callbacks=[Look()])
    return seen, int(model.optimizer.iterations.numpy())


# Exchanges.


def pushed(consistency, exchange, *more):
    """Weights, steps, the history of 3 epochs of 13 steps, and bytes by worker."""
    strategy = served_with(consistency) if consistency else None
    with exchanging(strategy, exchange):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = network(*more)
        before = strategy.traffic if strategy else []
        x, y = digits()
        history = model.fit(x[:200], y[:200], batch_size=16, epochs=3, verbose=0).history
    moved = [
        {name: after[name] - old[name] for name in after}
        for after, old in zip(strategy.traffic if strategy else [], before, strict=True)
    ]
    return flat(model.get_weights()), int(model.optimizer.iterations.numpy()), history, moved


def constant_gradients(consistency, exchange, steps=100, inputs=3):
    """Weights after constant gradients of -rate * (1 ... 3) in all, and the optimizer's count."""
    strategy = served_with(consistency)
    with exchanging(strategy, exchange):
        with strategy.scope():
            model = line(inputs=inputs)
            model.layers[0].kernel.assign(tf.zeros((inputs, 1)))
        x = np.tile(np.linspace(1, 3, inputs, dtype="float32"), (8 * steps, 1))
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return flat(model.get_weights()), int(model.optimizer.iterations.numpy())


def constant_gradients_with(name, consistency, steps=60):
    """What is left of constant gradients in weights and slots, whatever the order of steps."""
    strategy = served_with(consistency) if consistency else None
    optimizer = {
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01),
        "schedule": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.InverseTimeDecay(0.1, 10, 1.0)
        ),
        "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    }[name]()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = line()
        model.compile(optimizer, loss=lambda y, prediction: prediction)
        model.layers[0].kernel.assign(tf.ones((3, 1)))
    x = np.tile(np.float32([1, 2, 3]), (8 * steps, 1))
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return flat([v.numpy() for v in [*model.weights, *model.optimizer.variables]])


# Callbacks.


def with_callbacks(name, directory, consistency):
    """Weights, steps and history under a strategy of this process, or of one alone."""
    import dtk
    from dtk.callbacks import BatchSizeSchedule, BroadcastVariables, Checkpoint, LearningRateScaling

    alone = consistency is None
    strategy = dtk.strategies.AllReduceStrategy("local") if alone else served_with(consistency)
    callbacks = {
        "broadcast": lambda: [BroadcastVariables()],
        "batch sizes": lambda: [BatchSizeSchedule([16, 32, 48])],
        "rate": lambda: [LearningRateScaling(2.0, warmup_epochs=1.5)],
        "checkpoint": lambda: [Checkpoint(directory, save_freq=7)],
    }
    x, y = digits()

    def fit(epochs):
        with strategy.scope():
            model = network("dropout") if name == "checkpoint" else network()
        history = model.fit(
            x[:200], y[:200], batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks[name]()
        )
        return model, history.history

    if name == "checkpoint":
        fit(2)
    model, history = fit(3)
    return flat(model.get_weights()), int(model.optimizer.iterations.numpy()), history


def reported(consistency):
    """What ServerReport printed, its histograms, and the logs."""
    import io

    from dtk.callbacks import ServerReport

    strategy = served_with(consistency)
    with strategy.scope():
        model = network()
    x, y = digits()
    report = ServerReport()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        history = model.fit(
            x[:160], y[:160], batch_size=16, epochs=2, verbose=0, callbacks=[report]
        ).history
    return told.getvalue(), report.epochs, history


def warming_rates(shape, warm_start):
    """The learning rate of each step, and whether it was taken asynchronously."""
    from dtk.callbacks import AsynchronousWarmup
    from dtk.strategies import Async

    strategy = served_with(Async(warm_start))
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(model.optimizer.learning_rate.numpy()))

    with strategy.scope():
        model = line(0.1)
    x = np.ones((8 * 6, 3), "float32")
    callbacks = [AsynchronousWarmup(0.25, 3, shape), Look()]
    model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
    return rates


def saved_steps(directory):
    """What checkpoints taken in the middle of asynchronous training say, against the weights."""
    from dtk.callbacks import Checkpoint

    strategy = served_with("async")
    with strategy.scope():
        model = line()
        model.layers[0].kernel.assign(tf.zeros((3, 1)))
    x = np.tile(np.float32([1, 2, 3]), (8 * 40, 1))
    saver = Checkpoint(directory, save_freq=7, max_to_keep=None)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[saver])
    found = []
    for name in reversed(saver.files.names()):
        saved = saver.load_weights(model, name)
        found.append((saved.step or 40, saved.iterations, float(model.get_weights()[0][0, 0])))
    return found


# What happens inside of `fit`, and after it.


class AlwaysDropping(keras.layers.Layer):
    """Dropout outside of training, too."""

    def build(self, shape):
        self.seed = keras.random.SeedGenerator()

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.seed)


def masks():
    """Losses of epochs whose weights and rows never change, only their masks; predictions, too."""
    strategy = served_with("async")
    keras.utils.set_random_seed(6)
    with strategy.scope():
        model = keras.Sequential([keras.Input((50,)), AlwaysDropping()])
        model.compile(keras.optimizers.SGD(0.0), loss=lambda y, prediction: prediction)
    x = np.random.default_rng(0).random((1, 50)).repeat(16, 0).astype("float32")
    losses = [
        loss
        for _ in range(2)
        for loss in model.fit(x, x, batch_size=4, epochs=2, verbose=0).history["loss"]
    ]
    predicted = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
    evaluated = [model.evaluate(x, x, batch_size=8, verbose=0) for _ in range(2)]
    return losses, np.concatenate(predicted), evaluated


def asked_in_the_middle(consistency):
    """Predictions, evaluations and single batches from callbacks. Steps, and what they gave."""
    strategy = served_with(consistency)
    x, y = (a[:64] for a in digits())
    given = []

    class Ask(keras.callbacks.Callback):
        def ask(self):
            given.append(self.model.predict(x[:5], verbose=0).shape)
            given.append(self.model.predict_on_batch(x[:3]).shape)
            given.append(len(self.model.evaluate(x[:9], y[:9], batch_size=4, verbose=0)))
            given.append(len(self.model.test_on_batch(x[:9], y[:9])))

        def on_train_begin(self, logs=None):
            self.ask()

        def on_epoch_begin(self, epoch, logs=None):
            self.ask()

        def on_train_batch_begin(self, batch, logs=None):
            if batch in (0, 2):
                self.ask()

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.ask()

    with strategy.scope():
        model = network()
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Ask()])
    return int(model.optimizer.iterations.numpy()), given


def left_in_validation(consistency):
    """Leaves `fit` while it validates; then everything works as before. Steps of the second."""
    strategy = served_with(consistency)
    x, y = (a[:64] for a in digits())

    class Leave(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            raise KeyError("enough")

    with strategy.scope():
        model = network()
    data = {"validation_data": (x, y), "batch_size": 8, "verbose": 0}
    with contextlib.suppress(KeyError):
        model.fit(x, y, callbacks=[Leave()], **data)
    before = int(model.optimizer.iterations.numpy())
    history = model.fit(x, y, epochs=2, **data).history
    return int(model.optimizer.iterations.numpy()) - before, sorted(history)


class Taken(keras.layers.Layer):
    """Looks rows up in a weight that is no embedding layer's, so that its gradient is sparse."""

    def build(self, shape):
        self.table = self.add_weight(shape=(5, 4), initializer="ones")

    def call(self, ids):
        return keras.ops.sum(keras.ops.take(self.table, ids, axis=0), axis=(1, 2))


def sparse_gradient_of_a_lone_weight(consistency):
    """The weight after two steps; rows 1 and 3 are taken three and two times."""
    strategy = served_with(consistency) if consistency else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((5,), dtype="int32"), Taken()])
        model.compile(keras.optimizers.SGD(0.1), loss=lambda y, prediction: prediction)
    ids = np.array([[1, 1, 1, 3, 3]] * 8, "int32")
    model.fit(ids, np.zeros(8), batch_size=4, verbose=0)
    return model.get_weights()[0]
