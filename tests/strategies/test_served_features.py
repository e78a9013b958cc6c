"""Parameter servers: pipelines on workers, warm starts, sparing exchanges, callbacks."""

from __future__ import annotations

import contextlib
import io
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.callbacks import (
    AsynchronousWarmup,
    BatchSizeSchedule,
    Checkpoint,
    ServerReport,
)
from dtk.errors import NotDistributedError
from dtk.exchange import Downpour, codec
from dtk.parameter_server.consistency_models import Async, BoundedDelay, SerialStart
from dtk.parameter_server.job_context import WholeStepNeeded

from support.bodies import digits, flat, scope_of, served_with
from support.served_bodies import check_mistake, exchanging, line, partitioned

TOLERANCE = 1e-5

pytestmark = pytest.mark.worlds(("served", 2))


def close(mine, expected):
    return np.linalg.norm(mine - expected) <= TOLERANCE * np.linalg.norm(expected)


LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.2),
    "normalisation": lambda: keras.layers.BatchNormalization(),
}
# Bytes of a network's weights, and of its moving statistics.
MODEL, STATISTICS = 4 * (64 * 32 + 32 + 320 + 10), 4 * 2 * 32


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


def network_under(strategy, *more):
    with scope_of(strategy):
        return network(*more)


def steps_of(model):
    return int(model.optimizer.iterations.numpy())


def of_one_row(consistency):
    """Weights after steps of one row, by a loss of the script's own."""
    x, y = digits()
    with scope_of(served_with(consistency)):
        model = network()
        model.compile("sgd", lambda y, logits: keras.ops.mean(keras.ops.square(logits - y)))
    model.fit(x[:3], y[:3], batch_size=1, verbose=0, shuffle=False)
    return flat(model.get_weights())


def test_a_step_may_have_fewer_rows_than_there_are_workers(pool):
    """The self-test counted a slice that no worker is sent, and ended in an IndexError."""
    (mine,) = pool.run(of_one_row, "sync")
    assert close(mine, of_one_row(None))


# Steps that need all rows of a batch in one place.


def by_positives(y, logits):
    """Summed, and divided by the number of positives of the batch."""
    positive = keras.ops.cast(keras.ops.reshape(y, (-1,)) == 3, "float32")
    losses = keras.ops.square(logits[:, 0] - positive)
    return keras.ops.sum(losses) / keras.ops.maximum(keras.ops.sum(positive), 1.0)


class Likeness(keras.layers.Layer):
    """Compares each row with all of them."""

    def call(self, x):
        rows, first = dtk.layers.gather_over_batch(x)
        alike = keras.ops.softmax(keras.ops.matmul(rows, keras.ops.transpose(rows)))
        return keras.ops.matmul(alike, rows)[first : first + keras.ops.shape(x)[0]]


OF_ALL_ROWS = {
    "by positives": (by_positives, [], False),
    "along axis 0": (keras.losses.CosineSimilarity(axis=0), [], False),
    "compared": (keras.losses.MeanSquaredError(), [Likeness], False),
    "normalized": (
        keras.losses.MeanSquaredError(),
        [lambda: keras.layers.BatchNormalization(synchronized=True)],
        False,
    ),
    "by weights": (keras.losses.MeanSquaredError("mean_with_sample_weight"), [], True),
}


def of_all_rows(consistency, name):
    """Weights, losses of epochs and an evaluation; and what was said."""
    loss, layers, weighted = OF_ALL_ROWS[name]
    x, y = digits()
    x, y = x[:50], y[:50].astype("float32").reshape(-1, 1)
    weights = np.linspace(0.1, 2.0, 50) if weighted else None
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        with scope_of(served_with(consistency)):
            keras.utils.set_random_seed(4)
            model = keras.Sequential(
                [keras.Input((8, 8, 1)), keras.layers.Flatten(), *(make() for make in layers)]
            )
            model.add(keras.layers.Dense(1))
            model.compile(keras.optimizers.SGD(0.01), loss)
        history = model.fit(x, y, 16, 2, sample_weight=weights, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x, y, 16, sample_weight=weights, verbose=0)
        predicted = model.predict(x, 16, verbose=0)
    return flat(model.get_weights()), history["loss"], evaluated, predicted, said.getvalue()


def all_of_all_rows(consistency):
    return {name: of_all_rows(consistency, name) for name in OF_ALL_ROWS}


def test_steps_that_need_all_rows_are_computed_by_one_worker(pool):
    """The first two were refused by the self-test, the last two when they were traced."""
    (mine,) = pool.run(all_of_all_rows, "sync", timeout=120)
    for name in OF_ALL_ROWS:
        weights, losses, evaluated, predicted, said = mine[name]
        expected, expected_losses, expected_evaluated, expected_rows, _ = of_all_rows(None, name)
        assert close(weights, expected), name
        np.testing.assert_allclose(losses, expected_losses, TOLERANCE, err_msg=name)
        np.testing.assert_allclose(evaluated, expected_evaluated, TOLERANCE, err_msg=name)
        np.testing.assert_allclose(predicted, expected_rows, 1e-4, 1e-5, err_msg=name)
        assert "One worker computes all rows of each step" in said, said


# What does not add up over slices or steps: a script's metrics, and the state of its layers.


class Largest(keras.metrics.Metric):
    """The largest error of rows that are not masked."""

    def __init__(self, name="largest", first=0.0):
        super().__init__(name=name)
        self.first = first
        begin = keras.initializers.Constant(first)
        self.found = self.add_variable((), begin, name="found")

    def reset_state(self):
        self.found.assign(self.first)

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.abs(y_true - y_pred)[..., 0]
        mask = keras.src.backend.get_keras_mask(y_pred)
        errors = errors if mask is None else keras.ops.where(mask, errors, 0.0)
        self.found.assign(keras.ops.maximum(self.found, keras.ops.max(errors)))

    def result(self):
        return 1.0 * self.found


class Least(Largest):
    """The smallest error."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = keras.ops.abs(y_true - y_pred)
        self.found.assign(keras.ops.minimum(self.found, keras.ops.min(errors)))


class Count(Largest):
    """The rows, which add up."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.found.assign_add(keras.ops.cast(keras.ops.shape(y_true)[0], "float32"))


def counted(consistency, exchange=None):
    """Logs of metrics at weights that stay, with some masked rows; and what was said."""
    x = np.random.default_rng(0).normal(size=(21, 2, 3)).astype("float32")
    x[3:5], said, strategy = 0.0, io.StringIO(), served_with(consistency)
    with contextlib.redirect_stderr(said), exchanging(strategy, exchange):
        with scope_of(strategy):
            keras.utils.set_random_seed(2)
            layers = [keras.layers.Masking(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2, 3)), *layers])
            metrics = [Largest(), Least("least", 1e9), Count("count")]
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=metrics)
        y = 9.0 * (x == 0).all(-1, keepdims=True) + x[..., :1]
        more = {"validation_data": (x, y), "validation_batch_size": 4}
        logs = model.fit(x, y, 5, 2, shuffle=False, verbose=0, **more).history
    return {key: logs[key] for key in logs if key.endswith(("largest", "least", "count"))}, said


def counted_in_all_ways():
    ways = [("sync", None), ("async", None), ("async", Downpour(push_every=2))]
    return [(logs, said.getvalue()) for way in ways for logs, said in [counted(*way)]]


def test_metrics_that_do_not_add_up_are_counted_as_by_one_process(pool):
    """Maxima of slices and steps were added up, and a minimum stayed at its first value."""
    (mine,) = pool.run(counted_in_all_ways, timeout=120)
    expected, _ = counted(None)
    for logs, said in mine:
        assert logs.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(logs[name], values, TOLERANCE, err_msg=name)
        told = re.findall(r"'(\w+)' (?:is neither|does not add up).*the chief counts them", said)
        assert sorted(told) == ["largest", "least"], said


class Noted(keras.layers.Layer):
    """Keeps something of the rows that it has seen."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def build(self, shape):
        self.kept = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")
        self.calls = self.add_weight((), "zeros", "int32", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.kept.assign(self.change(self.kept, x))
            self.calls.assign_add(1)
        return x


CHANGES = {
    "a maximum": lambda kept, x: keras.ops.maximum(kept, keras.ops.max(x)),
    "rows": lambda kept, x: kept + keras.ops.cast(keras.ops.shape(x)[0], "float32"),
    "a moving average": lambda kept, x: 0.9 * kept + 0.1 * keras.ops.mean(x),
    "a moving variance": lambda kept, x: 0.9 * kept + 0.1 * keras.ops.var(x),
    "the last": lambda kept, x: keras.ops.mean(x),
}


def noted(consistency, *names):
    """Weights and state after two epochs, or what was raised; and whether steps were joined."""
    x, said = np.random.default_rng(0).normal(size=(21, 3)).astype("float32"), io.StringIO()
    with contextlib.redirect_stderr(said):
        with scope_of(served_with(consistency)):
            keras.utils.set_random_seed(2)
            layers = [Noted(CHANGES[name]) for name in names]
            model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
            if consistency == "async":
                model.add(keras.layers.BatchNormalization())
            model.compile(keras.optimizers.SGD(0.01), "mse")
        try:
            model.fit(x, x[:, :1], 5, 2, shuffle=False, verbose=0)
        except NotDistributedError as error:
            return str(error), steps_of(model)
    if consistency == "async":
        return [float(layer.kept.numpy()) for layer in model.layers[: len(names)]]
    return flat(model.get_weights()), "One worker computes all rows" in said.getvalue()


def noted_in_slices():
    return noted("sync", "a maximum", "rows"), noted("sync", "a moving average", "the last")


def test_state_that_is_no_mean_of_slices_is_computed_by_one_worker(pool):
    """Shares of maxima and of rows were added up, and the self-test said that they agree."""
    (((joined, is_joined), (in_slices, is_one)),) = pool.run(noted_in_slices)
    assert is_joined and close(joined, noted(None, "a maximum", "rows")[0])
    assert not is_one and close(in_slices, noted(None, "a moving average", "the last")[0])


def noted_at_once():
    fine = noted("async", "rows", "a moving variance")
    return noted("async", "a maximum"), noted("async", "the last"), fine


def test_state_whose_changes_do_not_add_up_is_refused_where_steps_do_not_wait(pool):
    """The maximum became one that no row has; counts, and averages that move a little, go on."""
    ((*refused, fine),) = pool.run(noted_at_once)
    for message, steps in refused:
        assert "/kept' from 0 to " in message and steps == 0
        assert "self.kept.assign(0.9 * self.kept + 0.1 * new)" in message
    assert fine[0] == 42 and 0 < fine[1] < 2


# Pipelines on workers.


def shard(count, index, rows):
    """Every `count`-th of the digits' first 160, in batches of `rows`."""
    data = tf.data.Dataset.from_tensor_slices(tuple(a[:160] for a in digits()))
    return data.shard(count, index).batch(rows, drop_remainder=True)


def pipelines(consistency, slices, epochs=2):
    """Ten steps an epoch; with a consistency of None in one process, from the same batches."""
    strategy = served_with(consistency)
    model = network_under(strategy)
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
    history = model.fit(data, epochs=epochs, steps_per_epoch=steps, verbose=0, shuffle=False)
    evaluated = model.evaluate(data, steps=steps, verbose=0)
    return flat(model.get_weights()), history.history, evaluated, steps_of(model)


@pytest.mark.full("a cheaper test holds its rule")
def test_synchronous_workers_that_read_for_themselves_equal_one_process(pool):
    """Breaks when a worker reads another's rows, or its gradient counts for more than its rows."""
    ((weights, history, evaluated, steps),) = pool.run(pipelines, "sync", 2, timeout=120)
    expected, logs, plain, _ = pipelines(None, 2)
    assert steps == 20 and close(weights, expected)
    np.testing.assert_allclose(history["loss"], logs["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(evaluated, plain, rtol=TOLERANCE)


def test_asynchronous_workers_that_read_for_themselves(pool):
    """More steps than a pipeline has batches: it begins anew."""
    ((_, history, _, steps),) = pool.run(pipelines, "async", 1, 4, timeout=120)
    assert steps == 40 and history["loss"][-1] < history["loss"][0]


# Mistakes.


def _fit_from(dataset_fn, steps=2):
    strategy = served_with("sync")
    model = network_under(strategy)
    data = strategy.distribute_datasets_from_function(dataset_fn)
    model.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False)
    return model, data


def _raises(context):
    raise OSError("no such file: rows-00001")


def _made_before(change):
    data = shard(1, 0, 4)
    return _fit_from(lambda context: change(data))


def _predict():
    model, data = _fit_from(lambda context: shard(1, 0, 4))
    model.predict(data, steps=1, verbose=0)


def _push_rarely(optimizer):
    strategy = served_with("async")
    with exchanging(strategy, Downpour(2)), strategy.scope():
        model = line()
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0)


class Late(keras.Sequential):
    """From the sixth step on, its loss has a term of the whole batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.compute_loss(x, y, self(x, training=True)))
            root = tf.sqrt(tf.reduce_mean(tf.square(self(x))))
            loss += tf.cond(self.optimizer.iterations < 5, lambda: 0.0, lambda: root)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def _begin_late():
    strategy = served_with("sync")
    images, labels = digits()
    with strategy.scope():
        model = Late([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images[:160], labels[:160], batch_size=16, verbose=0)


def _pipelines_after_all_rows():
    """They cannot be joined, whatever the arrays before were."""
    strategy = served_with("sync")
    images, labels = digits()
    rows = images[:16], labels[:16].astype("float32").reshape(-1, 1), np.ones(16, "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile("sgd", keras.losses.MeanSquaredError("mean_with_sample_weight"))
    model.fit(*rows[:2], 8, sample_weight=rows[2], verbose=0)
    data = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices(rows).batch(4, drop_remainder=True)
    )
    model.fit(data, steps_per_epoch=2, verbose=0)


MISTAKES = {
    "all rows": (
        _pipelines_after_all_rows,
        *(WholeStepNeeded, "exchange numbers within a step", "a batch is cut over 2"),
    ),
    "late term": (
        _begin_late,
        *(NotDistributedError, "step 8 of the train_step of model 'late", "and step 4 did"),
        "steps since 4 may be wrong",
    ),
    "raises": (
        lambda: _fit_from(_raises),
        *(OSError, "no such file: rows-00001", "raised by dataset_fn, for worker 0"),
    ),
    "rows": (
        lambda: _fit_from(lambda context: shard(1, 0, 4).unbatch()),
        *(ValueError, "single rows", "TensorSpec(shape=(8, 8, 1)", ".batch(context."),
    ),
    "no dataset": (
        lambda: _fit_from(lambda context: [1, 2]),
        *(TypeError, "returned a list", "tf.data.Dataset of batches"),
    ),
    "any size": (
        lambda: _fit_from(lambda context: shard(1, 0, 4).unbatch().batch(4)),
        *(ValueError, "batches of any size", "drop_remainder=True"),
    ),
    "no batch": (
        lambda: _fit_from(lambda context: shard(1, 0, 4).take(0)),
        *(ValueError, "dataset_fn gave worker", "without a batch"),
    ),
    "uneven": (
        lambda: _fit_from(lambda context: shard(1, 0, 8 + context.input_pipeline_id)),
        *(ValueError, "gave worker 1 batches of", "shape=(9, 8", "shape=(8, 8", "alike"),
    ),
    "made before": (
        lambda: _made_before(lambda data: data.map(lambda *row: row)),
        *(ValueError, "whole pipeline inside dataset_fn"),
    ),
    "no steps": (
        lambda: _fit_from(lambda context: shard(1, 0, 4), steps=None),
        *(ValueError, "steps_per_epoch="),
    ),
    "predict": (_predict, ValueError, "predict", "in order", "arrays or a tf.data.Dataset"),
    "loss scaling": (
        lambda: _push_rarely(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        *(ValueError, "Downpour(push_every=2", "scales its loss"),
    ),
    "accumulation": (
        lambda: _push_rarely(keras.optimizers.SGD(gradient_accumulation_steps=2)),
        *(ValueError, "Downpour(push_every=2", "accumulates them"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(pool, name):
    check_mistake(pool, __name__, name)


# Warm starts.


def warmed_up(consistency, epochs=3):
    """Weights after 10 steps, the statistics of each epoch, and steps: 8 of 20 rows an epoch."""
    strategy = served_with(consistency)
    weights, statistics = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if len(weights) < 10:  # to read them takes time, in which other steps would be applied
                weights.append(flat(model.get_weights()))

        def on_epoch_end(self, epoch, logs=None):
            statistics.append(strategy.schedule_of(model).statistics if strategy else None)

    model = network_under(strategy, "dropout")
    x, y = digits()
    model.fit(x[:160], y[:160], batch_size=20, epochs=epochs, verbose=0, callbacks=[Look()])
    return weights, statistics, steps_of(model)


# CNTK's parallelizationStartEpoch counts from 1: 2 is SerialStart(epochs=1), and 3 epochs=2; its
# distributed_after=200 is over as soon as 200 rows were seen (microsoft/CNTK, Source/SGDLib/SGD.cpp
# and Source/CNTKv2LibraryDll/DataParallelDistributedLearner.cpp).
@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize(
    "warm_start, serial", [(SerialStart(epochs=1), 8), (SerialStart(samples=200), 10)], ids=str
)
def test_the_first_steps_of_a_warm_start_are_those_of_one_process(pool, warm_start, serial):
    ((weights, statistics, steps),) = pool.run(warmed_up, Async(warm_start), timeout=120)
    expected, *_ = warmed_up(None, epochs=2)
    assert steps == 24
    for step in range(serial):
        assert close(weights[step], expected[step]), f"step {step} was not that of plain Keras"
    assert statistics[0].histogram == {0: 8}
    fresh = [sum(age * n for age, n in one.histogram.items()) for one in statistics[1:]]
    assert sum(fresh) > 0, "no step was ever asynchronous"
    assert statistics[1].histogram.get(0, 0) >= serial - 8


def warming_rates(shape, warm_start, file=None):
    """The learning rate of each step; with a file the model is saved and loaded after an epoch."""
    strategy = served_with(Async(warm_start))
    rates = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(model.optimizer.learning_rate.numpy()))

    def fit(epochs):
        callbacks = [AsynchronousWarmup(0.25, 3, shape), Look()]
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks)

    with strategy.scope():
        model = line(0.1)
    x = np.ones((8 * 6, 3), "float32")
    if file is None:
        fit(3)
        return rates
    for epochs in (1, 1, 1):
        fit(epochs)
        model.save(file)
        with strategy.scope():
            model = keras.models.load_model(file, safe_mode=False)
    return rates


STAIRS = [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 9


@pytest.mark.full_but("*model.keras*")  # which is not loaded before its second epoch
@pytest.mark.parametrize(
    "shape, warm_start, file, factors",
    [
        ("staircase", None, None, STAIRS),
        ("staircase", None, "model.keras", STAIRS),
        ("linear", SerialStart(epochs=1), None, [1.0] * 7 + [0.25, 0.5, 0.75] + [1.0] * 8),
    ],
)
def test_the_rate_of_asynchronous_steps_warms_up(pool, tmp_path, shape, warm_start, file, factors):
    """Of serial ones it does not; the first asynchronous step is announced one step late. A loaded
    model began with a part of a part, and ended with less than the whole rate.
    """
    (rates,) = pool.run(warming_rates, shape, warm_start, file and str(tmp_path / file))
    np.testing.assert_allclose(rates, 0.1 * np.array(factors), rtol=1e-5)


# Sparing exchanges.


def push_often(consistency, exchange, *more):
    """Weights, steps, the history of 3 epochs of 13 steps, and bytes pulled and pushed."""
    strategy = served_with(consistency)
    with exchanging(strategy, exchange) as moved:
        model = network_under(strategy, *more)
        x, y = digits()
        history = model.fit(x[:200], y[:200], batch_size=16, epochs=3, verbose=0).history
    traffic = [sum(worker[way] for worker in moved) for way in ("pulled", "pushed")]
    return flat(model.get_weights()), steps_of(model), history, *traffic


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize(
    "exchange, more",
    [
        (Downpour(4), ()),
        (Downpour(4), ("dropout", "normalisation")),
    ],
    ids=str,
)
def test_pushing_every_fourth_step_of_plain_sgd_is_plain_sgd(pool, exchange, more):
    """One at a time, a worker's own steps are those the server takes when they are pushed."""
    ((weights, steps, history, pulled, pushed),) = pool.run(
        push_often, BoundedDelay(0), exchange, *more, timeout=120
    )
    expected, _, logs, *_ = push_often(None, None, *more)
    assert steps == 39, "the optimizer counts every batch"
    assert close(weights, expected)
    np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-4)
    model = MODEL + (STATISTICS if more else 0)
    pushes = 3 * 4  # of 4, 4, 4 and 1 batches
    assert pushed == pushes * model
    # moving statistics, too
    assert pulled == pushes * (model + (STATISTICS if more else 0))


def constant_gradients(consistency, exchange, steps=100, inputs=3):
    """Weights after constant gradients of -rate * (1 ... 3) in all, and the optimizer's count."""
    strategy = served_with(consistency)
    with exchanging(strategy, exchange), strategy.scope():
        model = line(inputs=inputs)
        model.layers[0].kernel.assign(tf.zeros((inputs, 1)))
        x = np.tile(np.linspace(1, 3, inputs, dtype="float32"), (8 * steps, 1))
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return flat(model.get_weights()), steps_of(model)


@pytest.mark.full_but("*async-Downpour*")
@pytest.mark.parametrize(
    "consistency, exchange",
    [
        ("async", None),
        ("async", Downpour(1, significant=1e-9)),
        (BoundedDelay(2), Downpour(3, significant=1e-9)),
    ],
    ids=str,
)
def test_every_gradient_is_applied_once(pool, consistency, exchange):
    """A lost update, or one applied twice, would show in the sum of constant gradients."""
    ((weights, steps),) = pool.run(constant_gradients, consistency, exchange)
    assert steps == 100
    np.testing.assert_allclose(weights, [-1.0, -2.0, -3.0], rtol=1e-5)


@pytest.mark.full("a cheaper test holds its rule")
def test_fetching_less_often_than_pushing(pool):
    """A worker goes on with its own weights after a push; no gradient is lost by that."""
    ((_, steps, history, pulled, pushed),) = pool.run(
        push_often, "async", Downpour(1, fetch_every=4), "normalisation", timeout=120
    )
    assert steps == 39 and history["loss"][-1] < history["loss"][0]
    assert pushed == 39 * (MODEL + STATISTICS)
    # A fetch for four steps of a worker, and a new one for the first in each epoch or two.
    assert pulled < 0.5 * 39 * (MODEL + 2 * STATISTICS)


@pytest.mark.full("a cheaper test holds its rule")
def test_what_is_not_significant_waits_on_the_worker(pool):
    """Steps of 0.01, 0.02 and 0.03 are pushed once they add up to more than 0.05."""
    ((weights, steps),) = pool.run(constant_gradients, BoundedDelay(0), Downpour(significant=0.05))
    assert steps == 100
    missing = np.abs(weights - np.array([-1.0, -2.0, -3.0]))
    assert (missing <= 2 * 0.05 + 1e-5).all(), "more is missing than two workers may keep"
    assert missing.max() > 1e-3, "nothing was kept back"


@pytest.mark.full("a cheaper test holds its rule")
def test_significant_entries_or_a_few_bits_are_less_to_send(pool):
    """What is not sent at once is sent later: the losses stay close."""
    whole, sifted, coded = (
        pool.run(push_often, BoundedDelay(0), exchange, timeout=120)[0]
        for exchange in (Downpour(), Downpour(significant=2e-3), Downpour(bits=1))
    )
    assert sifted[4] < 0.6 * whole[4]
    assert sifted[2]["loss"][-1] < 1.1 * whole[2]["loss"][-1]
    code = 32 * (64 // 8 + 8) + 10 * (32 // 8 + 8) + 4 * (32 + 10)
    assert coded[4] == whole[4] // MODEL * code
    assert coded[2]["loss"][-1] < 1.3 * whole[2]["loss"][-1]


def test_what_a_code_loses_is_pushed_later(pool):
    """One bit makes the same of gradients from 1 to 3; only what is kept tells them apart."""
    ((weights, steps),) = pool.run(constant_gradients, BoundedDelay(0), Downpour(bits=1), 100, 24)
    assert steps == 100
    given, kept, most = np.linspace(1, 3, 24, dtype="float32")[None], 0.0, 0.0
    for _ in range(100):
        wanted = given + kept
        kept = wanted - codec.decode(codec.encode(tf.constant(wanted), 1), 24, 1).numpy()
        most = max(most, np.abs(kept).max())
    missing = np.abs(weights + given[0])
    assert missing.max() <= 2 * 0.01 * most + 1e-4, "more is missing than two workers may keep"
    assert 2 * 0.01 * most < 0.5, "and without keeping it, 1 would be missing at either end"


def constant_gradients_with(name, consistency, steps=60):
    """What is left of constant gradients in weights and slots, whatever the order of steps."""
    optimizer = {
        "adam": lambda: keras.optimizers.Adam(0.01),
        "schedule": lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.InverseTimeDecay(0.1, 10, 1.0)
        ),
    }[name]()
    with scope_of(served_with(consistency)):
        model = line()
        model.compile(optimizer, loss=lambda y, prediction: prediction)
        model.layers[0].kernel.assign(tf.ones((3, 1)))
    x = np.tile(np.float32([1, 2, 3]), (8 * steps, 1))
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return flat([v.numpy() for v in [*model.weights, *model.optimizer.variables]])


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("name", ["adam", "schedule"])
def test_no_slot_loses_an_update(pool, name):
    """Constant gradients leave the same behind in whatever order asynchronous steps are applied."""
    (mine,) = pool.run(constant_gradients_with, name, "async")
    assert close(mine, constant_gradients_with(name, None))


# Callbacks.


def with_callbacks(name, directory, consistency):
    """Weights, steps and history under a strategy of this process, or of one alone."""
    strategy = served_with(consistency) or dtk.strategies.AllReduceStrategy("local")
    callbacks = {
        "batch sizes": lambda: [BatchSizeSchedule([16, 32, 48])],
        "checkpoint": lambda: [Checkpoint(directory, save_freq=7)],
    }
    x, y = digits()
    for epochs in (2, 3) if name == "checkpoint" else (3,):
        model = network_under(strategy, *(["dropout"] if name == "checkpoint" else []))
        history = model.fit(
            x[:200], y[:200], batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks[name]()
        )
    return flat(model.get_weights()), steps_of(model), history.history


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("name", ["batch sizes", "checkpoint"])
def test_callbacks(pool, name, tmp_path):
    """Of dtk's own, on workers as in one process."""
    ((weights, steps, history),) = pool.run(
        with_callbacks, name, tmp_path / "served", BoundedDelay(0), timeout=120
    )
    expected = with_callbacks(name, tmp_path / "alone", None)
    assert steps == expected[1] and close(weights, expected[0])
    np.testing.assert_allclose(history["loss"], expected[2]["loss"], rtol=1e-4)


def saved_steps(directory):
    """What checkpoints taken in the middle of asynchronous training say, against the weights."""
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


def test_a_checkpoint_in_the_middle_has_every_step_it_counts(pool, tmp_path):
    """Steps under way when it was taken would be passed over on resuming, and be lost."""
    (found,) = pool.run(saved_steps, tmp_path)
    assert [step for step, _, _ in found] == [7, 14, 21, 28, 35, 40]
    for step, iterations, weight in found:
        assert iterations == step
        np.testing.assert_allclose(weight, -0.01 * step, rtol=1e-5)


def reported(consistency):
    """What ServerReport printed, its histograms, and the logs."""
    model = network_under(served_with(consistency))
    x, y = digits()
    report = ServerReport()
    with contextlib.redirect_stdout(io.StringIO()) as told:
        history = model.fit(
            x[:160], y[:160], batch_size=16, epochs=2, verbose=0, callbacks=[report]
        ).history
    return told.getvalue(), report.epochs, history


def test_the_report(pool):
    ((told, epochs, history),) = pool.run(reported, "async")
    assert [sum(histogram.values()) for histogram in epochs] == [10, 10]
    assert history["pushed_bytes"] == history["pulled_bytes"] == [MODEL, MODEL]
    assert "ServerReport: 2 servers hold" in told
    assert told.count(f"pulled {MODEL / 1e3:.1f} kB and pushed {MODEL / 1e3:.1f} kB in each") == 2
    ages = re.search(r"staleness \(missing steps x times\): (.*)", told)[1]
    assert sum(int(part.split(" x ")[1]) for part in ages.split(", ")) == 20


# Random numbers and sparse gradients.


class AlwaysDropping(keras.layers.Layer):
    """Dropout outside of training, too."""

    def build(self, shape):
        self.seed = keras.random.SeedGenerator()

    def call(self, x):
        return keras.random.dropout(x, 0.5, seed=self.seed)


def masks():
    """Losses of epochs whose weights and rows never change, only their masks; predictions, too."""
    keras.utils.set_random_seed(6)
    with served_with("async").scope():
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


@pytest.mark.full("a cheaper test holds its rule")
def test_random_layers_never_repeat_themselves(pool):
    """Breaks when epochs, calls or batches begin again with the same masks."""
    ((losses, predicted, evaluated),) = pool.run(masks)
    assert len(set(losses)) == 4, losses
    assert len({row.tobytes() for row in predicted}) == 32, "two rows have the same mask"
    assert evaluated[0] != evaluated[1]


class Taken(keras.layers.Layer):
    """Looks rows up in a weight that is no embedding layer's, so that its gradient is sparse."""

    def build(self, shape):
        self.table = self.add_weight(shape=(5, 4), initializer="ones")

    def call(self, ids):
        return keras.ops.sum(keras.ops.take(self.table, ids, axis=0), axis=(1, 2))


def sparse_gradient_of_a_lone_weight(consistency):
    """The weight after two steps; rows 1 and 3 are taken three and two times."""
    with scope_of(served_with(consistency)):
        model = keras.Sequential([keras.Input((5,), dtype="int32"), Taken()])
        model.compile(keras.optimizers.SGD(0.1), loss=lambda y, prediction: prediction)
    ids = np.array([[1, 1, 1, 3, 3]] * 8, "int32")
    model.fit(ids, np.zeros(8), batch_size=4, verbose=0)
    return model.get_weights()[0]


def test_a_sparse_gradient_of_a_lone_weight(pool):
    """Breaks when its row numbers are lost on the way to the server."""
    (mine,) = pool.run(sparse_gradient_of_a_lone_weight, "sync")
    expected = sparse_gradient_of_a_lone_weight(None)
    np.testing.assert_allclose(mine, expected, rtol=1e-5)


# Files of models in parts.

WORDS = np.arange(160).reshape(32, 5) % 12


def of_words():
    """A model with a table of 12 rows, and an optimizer with two loops over its variables."""
    keras.utils.set_random_seed(4)
    table = keras.layers.Embedding(12, 3)
    layers = [table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,), dtype="int64"), *layers])
    inner = keras.optimizers.Adam(0.01, use_ema=True)
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), "mse")
    return model


def trained_on_words(model, **more):
    targets = np.linspace(0, 1, len(WORDS), dtype="float32")[:, None]
    model.fit(WORDS, targets, batch_size=16, shuffle=False, verbose=0, **more)
    return flat(model.get_weights())


def saved_in_parts(folder):
    """Weights of training that goes on after each kind of file, with and without parts."""
    strategy = served_with("sync")

    def made(parts, make):
        with partitioned(strategy, parts, rows=12), strategy.scope():
            return make()

    model = made(2, of_words)
    trained_on_words(model)
    before, outputs = model.get_weights(), model.predict(WORDS, verbose=0)
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    state = tf.train.Checkpoint(model=model)
    saved = state.save(f"{folder}/state")
    model.export(f"{folder}/exported", verbose=False)
    exported = tf.saved_model.load(f"{folder}/exported")
    np.testing.assert_allclose(exported.serve(tf.constant(WORDS)), outputs, rtol=1e-5, atol=1e-6)
    found = [trained_on_words(model)]
    loads = (model.load_weights, f"{folder}/model.weights.h5"), (state.restore, saved)
    for load, path in loads:
        model.set_weights([0 * value for value in before])
        load(path)
        for value, wanted in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(value, wanted)
    for parts in (1, 2):
        loaded = made(parts, lambda: keras.models.load_model(f"{folder}/model.keras"))
        found.append(trained_on_words(loaded))
    for parts, epochs in ((2, 1), (1, 2)):  # the second goes on where the first has ended
        callback = Checkpoint(f"{folder}/resumed")
        weights = trained_on_words(made(parts, of_words), epochs=epochs, callbacks=[callback])
    return found, [weights, trained_on_words(made(1, of_words), epochs=2)]


def test_models_in_parts_are_saved_whole(pool, tmp_path):
    """Nothing could save them, and a load into parts lost the optimizer's slots."""
    ((loaded, resumed),) = pool.run(saved_in_parts, str(tmp_path))
    for first, *others in (loaded, resumed):
        for found in others:
            assert close(found, first)
