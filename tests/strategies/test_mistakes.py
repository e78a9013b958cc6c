"""What a user can get wrong, and what dtk says. Never a hang, never silence."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.local import LocalCommunicator
from dtk.strategies import AllReduceStrategy, start
from dtk.trainer.replica import self_test

from support import bodies, cases
from support import world as harness

MISTAKES = {}
EXPECTED = {}


def mistake(kind, *message):
    def register(function):
        name = function.__name__.replace("_", " ")
        MISTAKES[name] = function
        EXPECTED[name] = (kind, message)
        return function

    return register


def make(name):
    """Class and message of what the mistake raised."""
    try:
        MISTAKES[name](bodies.strategy())
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def tiny(strategy, units=(10,), **kwargs):
    """A model that takes little to trace."""

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(number) for number in units]
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])

    return cases.compiled(strategy, build, **{"optimizer": keras.optimizers.SGD(0.1), **kwargs})


@mistake(
    "NotDistributedError",
    "rank {rank}: fit of model",
    "compiled outside strategy.scope()",
    "each of the 2 processes would train a model of its own",
    "`with dtk.strategies.undistributed():`",
)
def built_and_compiled_outside(strategy):
    x, y = cases.rows(8)
    cases.compiled(None).fit(x, y, verbose=0)


@mistake("NotDistributedError", "train_on_batch of model", "compiled outside strategy.scope()")
def single_batches_of_a_model_compiled_outside(strategy):
    x, y = cases.rows(8)
    cases.compiled(None).train_on_batch(x, y)


@mistake("NotDistributedError", "rank {rank}: this model is one of legacy Keras", "Unset TF_USE_")
def a_model_of_legacy_keras(strategy):
    """Its parts would be weighed alike: .29 apart where the last batch has one row."""

    def run_step(rows):
        return rows

    run_step.__module__ = "tf_keras.src.engine.training"  # it is not installed here
    strategy.run(run_step, args=(tf.ones(1),))


def looped(strategy, in_scope=False, convert=True, wrap=lambda optimizer: optimizer):
    """A step of a loop of the script's own, which calls it outside `strategy.run`."""
    x, y = cases.rows(8)
    with strategy.scope() if in_scope else contextlib.nullcontext():
        model = cases.small()
        optimizer = wrap(keras.optimizers.Adam())

    def train_step(images, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(images))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    step = tf.function(train_step) if convert else train_step
    step(tf.constant(x), tf.constant(y))
    return model.get_weights()


REFUSED_LOOP = (
    "rank {rank}: optimizer 'adam",
    "applied outside strategy.run, in a job of 2 processes",
    "train_set = strategy.experimental_distribute_dataset(train_set)",
    "return strategy.run(train_step, args=batch)",
    "`with dtk.strategies.undistributed():`",
)


@mistake("NotDistributedError", *REFUSED_LOOP)
def an_eager_loop_without_run(strategy):
    looped(strategy, convert=False)


@mistake("NotDistributedError", "optimizer 'loss_scale", *REFUSED_LOOP[1:])
def a_loop_without_run_inside_the_scope_and_scaled_losses(strategy):
    with strategy.scope():
        looped(strategy, in_scope=True, wrap=keras.optimizers.LossScaleOptimizer)


@mistake("NotDistributedError", *REFUSED_LOOP)
def a_loop_without_run_beside_a_model_in_parts(strategy):
    parts = strategy.size
    dtk.strategies.AllReduceStrategy(strategy.communicator, model_parallel=parts)
    looped(strategy)


@mistake("nothing")
def a_loop_that_says_it_trains_alone(strategy):
    with dtk.strategies.undistributed():
        looped(strategy, in_scope=True)


@mistake(
    "NotDistributedError",
    "rank {rank}: layer 'remembers'",
    "every row of a batch of 8, and each of 2 replicas",
    "`keras.layers.LSTM(..., stateful=False)`",
)
def a_layer_that_keeps_the_state_of_every_row(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input(batch_shape=(8, 5, 3)),
                keras.layers.LSTM(4, stateful=True, name="remembers"),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    model.fit(np.ones((16, 5, 3)), np.ones((16, 1)), batch_size=8, verbose=0)


class OfEight(keras.layers.Layer):
    def call(self, x):
        return tf.reshape(x, (8, 64))


@mistake(
    "NotDistributedError",
    "rank {rank}: Input to reshape is a tensor with 320 values, but the requested shape has 512 (",
    "of_eight",
    "/Reshape): the train_step of model 'eights' failed on 5 rows",
    "If the model is made for one size of batch",
    "write -1 or keras.ops.shape(x)[0]",
)
def a_layer_made_for_one_size_of_batch(strategy):
    x, y = cases.rows(16)
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        outputs = keras.layers.Dense(10)(OfEight()(inputs))
        model = keras.Model(inputs, outputs, name="eights")
        model.compile("sgd", cases.crossentropy())
    model.fit(x, y, batch_size=8, verbose=0)


class OfPairs(keras.Model):
    def __init__(self):
        super().__init__()
        self.embed = keras.layers.Dense(3)

    def train_step(self, data):
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.embed(anchors) - self.embed(positives)) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@mistake("NotDistributedError", "rank {rank}: slice index 1", "let the dataset give a tuple")
def pairs_in_one_array(strategy):
    with strategy.scope():
        model = OfPairs()
        model.compile("sgd")
    pairs = np.ones((4, 2, 10, 8), "float32")
    model.fit(tf.data.Dataset.from_tensor_slices(pairs), verbose=0)


@mistake("InvalidArgumentError", "Received a label value of 12 which is outside the valid range")
def labels_that_no_class_has(strategy):
    """Once explained by a size of batch that the model was made for."""
    x, y = cases.rows(16)
    crossentropy = cases.crossentropy()
    model = tiny(strategy, loss=lambda y, p: crossentropy(y, p))
    model.fit(x, np.full_like(y, 12), batch_size=8, verbose=0)


@mistake("ValueError", "rank {rank}: jit_compile=True: layer", "synchronized=False")
def jit_set_as_an_attribute(strategy):
    x, y = cases.rows(8)
    model = cases.compiled(strategy)
    model.jit_compile = True
    model.fit(x, y, verbose=0)


@mistake("ValueError", "jit_compile=True: layer 'batch_norm", "leave jit_compile out")
def jit_asked_for(strategy):
    cases.compiled(strategy, jit_compile=True)


@mistake("ValueError", "was made for another strategy (OneDeviceStrategy)", "scope")
def optimizer_of_another_strategy(strategy):
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        optimizer = keras.optimizers.SGD()
    cases.compiled(strategy, optimizer=optimizer)


def another_dtk_strategy():
    """One that talks to nobody."""
    return AllReduceStrategy(LocalCommunicator())


@mistake("ValueError", "inside the scope of another strategy (AllReduceStrategy)", "leave that")
def scopes_of_two_dtk_strategies(strategy):
    with another_dtk_strategy().scope(), strategy.scope():
        pass


@mistake("ValueError", "under another strategy (AllReduceStrategy)", "the same one")
def model_of_another_dtk_strategy(strategy):
    model = cases.compiled(another_dtk_strategy())
    with strategy.scope():
        model.compile(optimizer="sgd", loss="mse")


@mistake("DisagreementError", "rank {rank}: ranks disagree on the dtk version", "0.1.0", "9.9.9")
def another_version_of_dtk_on_rank_1(strategy):
    with mock.patch.object(start, "__version__", "9.9.9" if strategy.rank == 1 else "0.1.0"):
        AllReduceStrategy(strategy.communicator)


@mistake("DisagreementError", "ranks disagree on the script", "script_0.py", "script_1.py")
def another_script_on_rank_1(strategy):
    with mock.patch.object(sys, "argv", [f"script_{strategy.rank}.py"]):
        AllReduceStrategy(strategy.communicator)


class Alone(cases.Subclassed):
    """Applies its gradients by hand, without any optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        for v, g in zip(
            self.trainable_variables,
            tape.gradient(loss, self.trainable_variables),
            strict=True,
        ):
            v.assign_sub(0.1 * g)
        return {"loss": loss}


@mistake("NotDistributedError", "rank {rank}: ", "without reducing any gradient over 2 replicas")
def a_step_that_reduces_nothing(strategy):
    x, y = cases.rows(8)
    cases.compiled(strategy, Alone).fit(x, y, verbose=0)


class Clipping(cases.Subclassed):
    """Clips gradients as large as those of the first batch are not."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1e3)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@mistake("NotDistributedError", "rank {rank}: ", "1,000,000 times as large", "global_clipnorm=")
def a_step_that_clips(strategy):
    x, y = cases.rows(8)
    cases.compiled(strategy, Clipping).fit(x, y, verbose=0)


@mistake("ValueError", "rank {rank}: ", "scales losses and is not built", "optimizer.build(")
def a_loop_that_scales_losses_before_it_builds(strategy):
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(weight * 2.0)
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    tf.function(lambda: strategy.run(step))()


@mistake("DisagreementError", "rank {rank}: ranks disagree on the number of var", "has 4", "has 6")
def different_models(strategy):
    tiny(strategy, [10] * (1 + strategy.rank)).fit(*cases.rows(8), verbose=0)


@mistake("DisagreementError", "ranks disagree on the variable 0", "(64, 10)", "(64, 11)")
def different_shapes(strategy):
    tiny(strategy, [10 + strategy.rank, 10]).fit(*cases.rows(8), verbose=0)


@mistake("DisagreementError", "ranks disagree on the steps per epoch", "has 2", "has 3")
def different_steps(strategy):
    x, y = cases.rows(8)
    steps = 2 + strategy.rank
    tiny(strategy).fit(x, y, batch_size=4, steps_per_epoch=steps, verbose=0)


@mistake("DisagreementError", "ranks disagree on the initial epoch", "has 0", "has 2")
def different_initial_epochs(strategy):
    x, y = cases.rows(8)
    tiny(strategy).fit(x, y, epochs=4, initial_epoch=2 * strategy.rank, verbose=0)


@mistake("DisagreementError", "ranks disagree on the training data", "8 rows", "12 rows", "shard")
def different_numbers_of_rows(strategy):
    x, y = cases.rows(8 + 4 * strategy.rank)
    tiny(strategy).fit(x, y, batch_size=4, verbose=0)


@mistake("DisagreementError", "ranks disagree on the data", "8 rows", "12 rows")
def predict_different_numbers_of_rows(strategy):
    x, _ = cases.rows(8 + 4 * strategy.rank)
    tiny(strategy).predict(x, verbose=0)


@mistake("DisagreementError", "callbacks of dtk", "['ProgressPrinter']", "[]", "every rank")
def a_callback_on_rank_0_alone(strategy):
    x, y = cases.rows(8)
    callbacks = [dtk.callbacks.ProgressPrinter()] if strategy.is_chief else []
    tiny(strategy).fit(x, y, callbacks=callbacks, verbose=0)


@mistake("DisagreementError", "after epoch 1", "learning_rate", "same callbacks on every rank")
def another_learning_rate_on_rank_0(strategy):
    class Halve(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.005

    x, y = cases.rows(8)
    callbacks = [Halve()] if strategy.is_chief else []
    tiny(strategy).fit(x, y, epochs=2, callbacks=callbacks, verbose=0)


@mistake("DisagreementError", "ranks disagree on the random seed", "rank 0 has 7", "rank 1 has 8")
def seeds_by_rank(strategy):
    x, y = cases.rows(8)
    model = tiny(strategy)
    keras.utils.set_random_seed(7 + strategy.rank)
    model.fit(x, y, verbose=0)


@mistake("ValueError", "must be a batch of rows", ".batch(global_batch_size)")
def unbatched_dataset(strategy):
    x, y = cases.rows(8)
    dataset = tf.data.Dataset.from_tensor_slices((np.float32(y), np.float32(y)))
    del x
    tiny(strategy).fit(dataset, verbose=0, shuffle=False)


def of_each_rank(strategy, rows=16):
    """What Horovod's scripts give each rank."""
    x, y = cases.rows(rows)
    return tf.data.Dataset.from_tensor_slices((x, y)).shard(strategy.size, strategy.rank).batch(4)


@mistake("DisagreementError", "on the first batch", "no shard(size, rank)", "num_parallel_calls")
def a_shard_per_rank(strategy):
    tiny(strategy).fit(of_each_rank(strategy), verbose=0, shuffle=False)


@mistake("DisagreementError", "on the first batch", "make it anew for each fit, on all ranks")
def a_shuffled_dataset_that_one_rank_has_read_further(strategy):
    """As read-ahead does where a fit ends within it: TensorFlow's tutorial on imbalanced data."""
    x, y = cases.rows(16)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).repeat().batch(4)
    if strategy.rank == 1:
        next(iter(dataset))
    tiny(strategy).fit(dataset, steps_per_epoch=2, verbose=0, shuffle=False)


@mistake("DisagreementError", "at the first batch, ranks have read different", "dtk.data.shard")
def predict_a_shard_per_rank(strategy):
    tiny(strategy).predict(of_each_rank(strategy).map(lambda x, y: x), verbose=0)


@mistake("DisagreementError", "after step 4, ranks have read different batches", "ranks [1]")
def a_generator_that_differs_later(strategy):
    x, y = cases.rows(32)

    def batches():
        for i in range(8):
            differs = 0.5 if i == 3 and strategy.rank else 0.0
            yield x[4 * i : 4 * i + 4] + np.float32(differs), y[4 * i : 4 * i + 4]

    spec = (tf.TensorSpec([None, 8, 8, 1]), tf.TensorSpec([None], tf.int64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    tiny(strategy).fit(dataset, verbose=0, shuffle=False)


@mistake("DisagreementError", "after evaluate, ranks have read different batches", "ranks [1]")
def evaluate_rows_that_differ_later(strategy):
    x, y = cases.rows(16)
    x[12] += 0.1 * strategy.rank
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    tiny(strategy).evaluate(dataset, verbose=0)


@mistake("DisagreementError", "at the end of the data, ranks have read different", "ranks [1]")
def predict_rows_that_differ_later(strategy):
    x, _ = cases.rows(16)
    x[12] += 0.1 * strategy.rank
    tiny(strategy).predict(tf.data.Dataset.from_tensor_slices(x).batch(4), verbose=0)


@mistake("DisagreementError", "on the training data", "hash of all bytes", "set_random_seed(7)")
def arrays_that_differ_in_the_middle(strategy):
    x, y = cases.rows(16)
    y[8] = strategy.rank
    tiny(strategy).fit(x, y, batch_size=4, verbose=0)


class OfPython(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.py_function(tf.identity, [x], x.dtype), x.shape)


@mistake("ValueError", "jit_compile=True: ", "calls Python within the step", "no Python; leave jit")
def a_function_of_python_under_xla(strategy):
    x, y = cases.rows(16)
    with strategy.scope():
        layers = [keras.layers.Flatten(), OfPython(), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
        model.compile(loss=cases.crossentropy(), jit_compile=True)
    model.fit(x, y, verbose=0)


@mistake("DisagreementError", "ranks disagree on the batch of train_on_batch", "hash of all bytes")
def single_batches_that_differ(strategy):
    x, y = cases.rows(16)
    part = slice(8 * strategy.rank, 8 * strategy.rank + 8)
    tiny(strategy).train_on_batch(x[part], y[part])


class InBatch(cases.Subclassed):
    """Contrasts rows with each other."""

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            z = tf.math.l2_normalize(self(x, training=True), 1)
            rows = tf.eye(tf.shape(z)[0])
            likeness = tf.matmul(z, z, transpose_b=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(rows, likeness))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss}


@mistake(
    "NotDistributedError",
    "does not add up over 2 replicas: 5 rows computed by one, and as parts of [3, 2] rows",
    "gradient 0 is",
    "neither a mean",
    "Nothing was updated",
    "self_test=False",
)
def a_loss_between_rows(strategy):
    x, y = cases.rows(16)
    cases.compiled(strategy, InBatch).fit(x, y, batch_size=8, verbose=0)


@mistake(
    "NotDistributedError",
    "layer softmax along axis 0",
    "rows, first = dtk.layers.gather_over_batch(x)",
)
def a_layer_of_keras_along_the_batch(strategy):
    x, y = cases.rows(16)

    def build():
        layers = [keras.layers.Softmax(axis=0, name="softmax"), keras.layers.Dense(10)]
        return keras.Sequential([*cases.dense_layers(), *layers])

    cases.compiled(strategy, build).fit(x, y, verbose=0)


@mistake(
    "NotDistributedError",
    "loss 'wide' is not made of means or sums over rows, as its graph shows",
    "gathered up to 268 kB a step (loss 'wide': 384 kB)",
    "sum_over_batch",
)
def outputs_too_large_to_gather(strategy):
    def wide(y_true, y_pred):
        return tf.sqrt(tf.reduce_mean(tf.square(y_true - y_pred)))

    def build():
        width = keras.layers.UpSampling1D(6_000)
        return keras.Sequential([keras.Input((1, 1)), keras.layers.Dense(1), width])

    model = cases.compiled(strategy, build, loss=wide)
    with mock.patch.object(self_test, "MOST_GATHERED", self_test.MOST_GATHERED // 1000):
        model.fit(np.ones((8, 1, 1)), np.zeros((8, 6_000, 1), "float32"), 8, verbose=0)


@mistake("ValueError", "jit_compile=True", "sums over replicas in a function with")
def a_loss_of_the_whole_batch_under_xla(strategy):
    x, y = np.ones((8, 4), "float32"), np.ones((8, 1))

    def build():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])

    model = cases.compiled(strategy, build, loss=keras.losses.Dice(), jit_compile=True)
    model.fit(x, y, verbose=0)


@mistake("UncompilableError", "jit_compile=True", "call the optimizer", "outside of that function")
def an_optimizer_of_a_loop_under_xla(strategy):
    with strategy.scope():
        model, optimizer = cases.small(sync=False), keras.optimizers.SGD()

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    strategy.run(step, args=cases.rows(8))


def centred(values):
    return values - keras.ops.mean(values, axis=0, keepdims=True)


@mistake("NotDistributedError", "tried because of operation Mean", "the gradient of")
def an_operation_between_rows(strategy):
    def build():
        images = keras.Input((8, 8, 1))
        return keras.Model(images, keras.layers.Dense(10)(centred(keras.layers.Flatten()(images))))

    x, y = cases.rows(8)
    cases.compiled(strategy, build).fit(x, y, verbose=0)


@mistake("NotDistributedError", "tried because of activation centred", "the gradient of")
def an_activation_between_rows(strategy):
    def build():
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten()]
        layers += [keras.layers.Dense(4, centred), keras.layers.Dense(10)]
        return keras.Sequential(layers)

    x, y = cases.rows(8)
    cases.compiled(strategy, build).fit(x, y, verbose=0)


@mistake("InvalidArgumentError", "have other shapes on other ranks", "output_sequence_length=")
def text_padded_to_the_longest_row_of_a_rank(strategy):
    texts = tf.data.Dataset.from_tensor_slices([["a b c"], ["a"], ["b"], ["a"]]).batch(4)
    with strategy.scope():
        layer = keras.layers.TextVectorization(vocabulary=["a", "b", "c"])
        model = keras.Sequential([keras.Input((1,), dtype="string"), layer])
    model.predict(texts, verbose=0)


@mistake("NotDistributedError", "without output_sequence_length", "pads the rows of each worker to")
def text_that_is_trained_padded_to_the_longest_row_of_a_rank(strategy):
    texts = tf.data.Dataset.from_tensor_slices(([["a b c"], ["a"], ["b"], ["a"]], [1.0] * 4))

    def build():
        layers = [keras.layers.TextVectorization(vocabulary=["a", "b", "c"])]
        layers += [keras.layers.Embedding(5, 2), keras.layers.GlobalAveragePooling1D()]
        return keras.Sequential([keras.Input((1,), dtype="string"), *layers, keras.layers.Dense(1)])

    cases.compiled(strategy, build, loss="mse", metrics=[]).fit(texts.batch(4), verbose=0)


class EverySecondTime(cases.Subclassed):
    """Applies gradients in a branch."""

    def train_step(self, data):
        x, y = data

        def apply():
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return loss

        return {"loss": tf.cond(self.optimizer.iterations % 2 == 0, apply, lambda: 0.0)}


@mistake("NotDistributedError", "rank {rank}: ", "in a branch or a loop", "self_test=False")
def gradients_applied_in_a_branch(strategy):
    x, y = cases.rows(8)
    model = cases.compiled(strategy, EverySecondTime)
    model.build(x.shape)
    model.optimizer.build(model.trainable_variables)
    model.fit(x, y, verbose=0)


@mistake("NotDistributedError", "does not add up over 2 replicas", "neither a mean")
def a_loss_between_rows_after_a_callback_has_evaluated(strategy):
    x, y = cases.rows(16)
    model = cases.compiled(strategy, InBatch)
    evaluating = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: model.evaluate(x, y, verbose=0)
    )
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[evaluating])


class Largest(keras.Sequential):
    """Logs a number that is no mean over rows."""

    def train_step(self, data):
        of_rows = tf.reduce_sum(data[0], [1, 2, 3])
        return super().train_step(data) | {"largest": tf.reduce_max(of_rows)}


def fit_with(layer, strategy, kind=keras.Sequential):
    x, y = cases.rows(16)

    def build():
        layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), layer()]
        return kind([*layers, keras.layers.Dense(10)])

    cases.compiled(strategy, build).fit(x, y, batch_size=8, verbose=0)


class Summing(keras.layers.Layer):
    """Keeps a number of a batch that is no mean over its rows."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

    def call(self, x):
        self.seen.assign(tf.reduce_sum(x))
        return x


@mistake(
    "NotDistributedError",
    "assigns other values to the variable",
    "seen'. Replicas average what they assign",
)
def a_layer_whose_state_is_a_sum(strategy):
    fit_with(Summing, strategy)


@mistake(
    "NotDistributedError",
    "assigns other values to the variable",
    "log 'largest' 0 is",
    "Replicas average what they assign",
)
def a_layer_whose_state_is_a_sum_beside_an_odd_number(strategy):
    fit_with(Summing, strategy, Largest)


class Scaling(Summing):
    """Scales rows by a number of the batch."""

    def call(self, x):
        return super().call(x) / self.seen


@mistake(
    "NotDistributedError",
    "the gradient of",
    " %; the step assigns other values",
    "seen'. Losses",
)
def a_layer_that_scales_by_a_sum(strategy):
    fit_with(Scaling, strategy)


@mistake("ValueError", "expected a dense tensor [rows, ...], in a loss, a step, or the call of a")
def rows_gathered_outside_of_a_layer(strategy):
    dtk.layers.gather_over_batch(keras.Input((4,)))


@mistake("ValueError", "was given 3.0; expected a dense tensor [rows, ...]")
def one_number_gathered(strategy):
    dtk.layers.gather_over_batch(3.0)


@mistake("ValueError", "exchange='17bit'", "expected one of 'auto', 'fp16', 'bf16', '1bit'")
def unknown_exchange(strategy):
    AllReduceStrategy(strategy.communicator, exchange="17bit")


@mistake("DisagreementError", "ranks disagree on the exchange", "Quantized(bits=1)")
def another_exchange_on_rank_1(strategy):
    AllReduceStrategy(strategy.communicator, exchange="1bit" if strategy.rank else None)


class OfEvenRows(keras.Sequential):
    """Needs an even number of rows, which all workers have."""

    def predict_step(self, data):
        pairs = tf.reshape(super().predict_step(data), [-1, 2, 10])
        return tf.reshape(pairs, [-1, 10])


def of_pairs():
    x, _ = cases.rows(16)
    model = cases.compiled(bodies.strategy(), lambda: OfEvenRows(cases.dense_layers()))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return np.shape(model.predict(x, 16, verbose=0)), said.getvalue()


@pytest.mark.worlds(("collective", 2))
def test_predictions_of_rows_that_cannot_be_tried_stay(pool):
    (shape, said), (other, _) = pool.run(of_pairs)
    assert shape == other == (16, 10)
    assert "could not be tried on 5 rows: InvalidArgumentError" in said


class Sharpness(keras.Sequential):
    """Moves weights along the gradient of its rows before it differentiates (SAM)."""

    def train_step(self, data):
        x, y = data
        for last in (False, True):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            if not last:
                moves = [0.05 * g / (tf.linalg.global_norm(gradients) + 1e-12) for g in gradients]
                for variable, move in zip(self.trainable_variables, moves, strict=True):
                    variable.assign_add(move)
        for variable, move in zip(self.trainable_variables, moves, strict=True):
            variable.assign_sub(move)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@mistake(
    "NotDistributedError",
    "The step itself moves weights, by gradients of a replica's own rows",
    "[sums(g * rows) / sums(rows) for g in gradients]",
)
def weights_that_a_step_moves(strategy):
    x, y = cases.rows(16)
    cases.compiled(strategy, lambda: Sharpness(cases.dense_layers())).fit(x, y, 8, verbose=0)


class Ranked(keras.Sequential):
    """Divides by the largest prediction, as if all rows were here."""

    def predict_step(self, data):
        outputs = super().predict_step(data)
        return {"part": outputs / tf.reduce_max(tf.abs(outputs))}


@mistake(
    "NotDistributedError",
    "rank {rank}: what the predict_step of model 'ranked",
    "depends on the other rows",
    "dtk.layers.gather_over_batch",
    "undistributed()",
)
def predictions_that_depend_on_other_rows(strategy):
    x, _ = cases.rows(16)
    cases.compiled(strategy, lambda: Ranked(cases.dense_layers())).predict(x, 8, verbose=0)


class Sampled(keras.Sequential):
    """Draws for each row, and ranks classes; and has ragged rows."""

    def predict_step(self, data):
        outputs = super().predict_step(data)
        noise = keras.random.normal(tf.shape(outputs)) + tf.random.uniform(tf.shape(outputs))
        return tf.argsort(outputs, 1), outputs + noise, tf.RaggedTensor.from_tensor(outputs)


def sampled():
    x, _ = cases.rows(16)
    model = cases.compiled(bodies.strategy(), lambda: Sampled(cases.dense_layers()))
    return [tuple(one.shape) for one in model.predict(x, 8, verbose=0)]


@pytest.mark.worlds(("collective", 2))
def test_predictions_may_draw_for_their_rows_and_be_ragged(pool):
    assert pool.run(sampled) == [[(16, 10), (16, 10), (16, None)]] * 2


class Late(keras.Sequential):
    """From the fifth step on, its loss has a term of the whole batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = self.add_weight(shape=(), trainable=False, name="seen", initializer="zeros")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, 10), p))
            late = tf.sqrt(tf.reduce_mean(tf.square(p)))
            loss += tf.cond(self.seen < 5.0, lambda: 0.0, lambda: late)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.seen.assign_add(1.0)
        return {"loss": loss}


@mistake(
    "NotDistributedError",
    "rank {rank}: step 8 of the train_step of model 'late",
    "does not add up over 2 replicas, and step 4 did",
    "the gradient of",
    "The step was not applied; steps since 4 may be wrong",
)
def a_term_that_begins_later(strategy):
    x, y = cases.rows(160)
    model = cases.compiled(strategy, lambda: Late(cases.dense_layers()), optimizer="sgd")
    try:
        model.fit(x, y, batch_size=16, verbose=0)
    finally:
        assert float(model.seen) == 7.0, "the step that was compared has been applied"


def worst(each):
    return tf.reduce_mean(tf.math.top_k(each, tf.minimum(8, tf.size(each))).values)


def first(each):
    weights = tf.cast(tf.range(tf.size(each)) < 10, each.dtype)
    return tf.reduce_sum(each * weights) / tf.reduce_sum(weights)


def crowded(each):
    return tf.reduce_mean(each) * (1.0 + tf.nn.relu(tf.cast(tf.size(each), each.dtype) - 6.0))


class OfMany(keras.Sequential):
    """Its loss is of some of many rows, or of their number: of a few, it is a mean."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            each = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, 10), logits)
            loss = self.loss_of(each)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


OF_MANY = (
    "step 1 of the train_step of model 'of_many",
    "does not add up over 2 replicas, and fewer rows did: 17 rows computed by one",
    "The step was not applied. ",
)


def fit_of_many(strategy, loss_of):
    x, y = cases.rows(64)
    model = cases.compiled(strategy, lambda: OfMany(cases.small().layers), optimizer="sgd")
    model.loss_of = loss_of
    model.fit(x, y, batch_size=32, verbose=0)


@mistake("NotDistributedError", *OF_MANY)
def a_mean_of_the_worst_rows(strategy):
    fit_of_many(strategy, worst)


@mistake("NotDistributedError", *OF_MANY)
def a_mean_of_the_first_rows(strategy):
    fit_of_many(strategy, first)


@mistake("NotDistributedError", *OF_MANY)
def a_term_of_the_number_of_rows(strategy):
    fit_of_many(strategy, crowded)


class Switched(keras.Sequential):
    """Has a term of the whole batch once a callback has made its train function anew."""

    late = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(y, 10), p))
            loss += tf.sqrt(tf.reduce_mean(tf.square(p))) if self.late else 0.0
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


@mistake("NotDistributedError", "the train_step of model 'switched", "Nothing was updated")
def a_train_function_made_anew(strategy):
    x, y = cases.rows(160)
    model = cases.compiled(strategy, lambda: Switched(cases.dense_layers()), optimizer="sgd")

    def switch(batch, logs):
        if batch == 4:
            model.late = True
            model.make_train_function(force=True)

    calls = [keras.callbacks.LambdaCallback(on_train_batch_end=switch)]
    model.fit(x, y, batch_size=16, verbose=0, callbacks=calls)


class Annealed(keras.Model):
    """Weighs a term of its loss by a variable that is not the model's."""

    weight = None

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = tf.reduce_mean(tf.square(p)) * self.weight.held[0]
            loss += self.compute_loss(x, y, p)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


class Anneal(keras.callbacks.Callback):
    """Sets the variable in the second epoch."""

    def __init__(self):
        super().__init__()
        self.held = (tf.Variable(0.0, trainable=False, name="beta"),)

    def on_epoch_begin(self, epoch, logs=None):
        self.held[0].assign(0.3 * epoch)


def annealed(strategy, everywhere):
    x, y = cases.rows(16)
    callback = Anneal()
    with strategy.scope():
        inputs = keras.Input((8, 8, 1))
        outputs = keras.layers.Dense(10)(keras.layers.Flatten()(inputs))
        model = Annealed(inputs, outputs)
        model.weight = callback
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    called = [callback] if everywhere or strategy.rank == 0 else []
    return model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=called).history["loss"]


@mistake(
    "DisagreementError",
    "rank {rank}: before epoch 2, variable 'beta:0', which steps of model 'annealed",
    "differs between workers: 0.3",
    "A callback that sets it must run on every rank",
)
def a_variable_that_a_callback_of_rank_0_sets(strategy):
    annealed(strategy, everywhere=False)


def a_variable_that_callbacks_of_all_ranks_set():
    return annealed(bodies.strategy(), everywhere=True)


@pytest.mark.command
@pytest.mark.worlds(("collective", 2))
def test_a_variable_may_be_set_on_every_rank(pool):
    one, other = pool.run(a_variable_that_callbacks_of_all_ranks_set)
    assert one == other and len(one) == 3


@mistake(
    "DisagreementError",
    "ranks disagree on the kernel_regularizer.config.l2 of layer",
    "(Dense) of model 'sequential",
    "dtk.search runs one study for all ranks",
)
def another_regularizer_on_rank_1(strategy):
    x, y = cases.rows(16)

    def build():
        decay = keras.regularizers.L2(0.1 * (1 + strategy.rank))
        layers = [keras.layers.Flatten(), keras.layers.Dense(10, kernel_regularizer=decay)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    cases.compiled(strategy, build).fit(x, y, verbose=0)


@mistake("DisagreementError", "label_smoothing given to compile of model", "rank 1 has 0.1")
def another_loss_on_rank_1(strategy):
    x, y = cases.rows(16)
    loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.1 * strategy.rank)
    tiny(strategy, loss=loss).fit(x, np.eye(10)[y], verbose=0)


@mistake(
    "DisagreementError",
    "ranks disagree on the vocabulary.txt of layer",
    "(StringLookup) of model",
    "adapt layers to the same rows",
)
def a_vocabulary_of_each_ranks_rows(strategy):
    words = np.array([["a"], ["b"], ["c"], ["d"]] * 4)
    with strategy.scope():
        lookup = keras.layers.StringLookup(max_tokens=4)
        lookup.adapt(np.array([["a", "b"], ["c", "d"]][strategy.rank]))
        inputs = keras.Input((1,), dtype="string")
        outputs = keras.layers.Dense(1)(keras.layers.Embedding(5, 2)(lookup(inputs)))
        model = keras.Model(inputs, keras.layers.Flatten()(outputs))
        model.compile("sgd", "mse")
    model.fit(tf.constant(words), np.ones((16, 1)), verbose=0)


def vocabularies_alike():
    """A lookup holds a tensor of words, of which NumPy has addresses in this process."""
    strategy = bodies.strategy()
    words = tf.constant([["a b"], ["c"], ["d a"], ["b"]] * 4)
    with strategy.scope():
        vectorize = keras.layers.TextVectorization(output_sequence_length=3)
        vectorize.adapt(np.array(["a b", "c d"]))
        layers = [vectorize, keras.layers.Embedding(8, 2), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((1,), dtype="string"), *layers])
        model.compile("sgd", "mse")
    model.fit(words, np.ones((16, 6)), verbose=0)
    return strategy.check_weights(model)


@pytest.mark.worlds(("collective", 2))
def test_the_same_vocabulary_is_no_difference(pool):
    assert pool.run(vocabularies_alike) == [3, 3]


@mistake("DisagreementError", "ranks disagree on the mean of layer", "(Normalization) of model")
def moments_of_each_ranks_rows(strategy):
    x, y = cases.rows(16)

    def build():
        scaling = keras.layers.Normalization()
        scaling.adapt(x[:8] if strategy.rank else x[8:])
        layers = [scaling, keras.layers.Flatten(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    cases.compiled(strategy, build).fit(x, y, verbose=0)


def marked(name):
    if name.endswith(("jit set as an attribute", "under xla")):
        mark = pytest.mark.not_on_pretended_gpus("XLA does not run there")
    elif name == "pairs in one array":
        mark = pytest.mark.not_on_pretended_gpus("the error is told twice there")
    else:
        mark = ()
    return pytest.param(name, marks=mark)


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("name", [marked(name) for name in MISTAKES])
def test_every_rank_says_what_is_wrong(pool, name):
    kind, message = EXPECTED[name]
    for rank, (raised, text) in enumerate(pool.run(make, name)):
        assert raised == kind, f"rank {rank}: {raised}: {text}"
        for part in message:
            assert part.format(rank=rank) in text


@pytest.mark.command
@pytest.mark.parametrize(
    "package, end, told",
    [("keras", "", True), ("tf_keras", "", True), ("keras", "raise ValueError", False)],
)
def test_a_script_that_makes_no_strategy(tmp_path, package, end, told):
    """Of one that fails nothing else is said."""
    (tmp_path / f"{package}.py").touch()  # a stand-in, which is quick to import
    ended = subprocess.run(
        [sys.executable, "-c", f"import dtk, {package}\n{end}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    )
    said = "rank 1: this script made no strategy, so each of the 2 processes" in ended.stderr
    assert said == ("dtk.auto_strategy()" in ended.stderr) == told


@pytest.mark.command
@pytest.mark.full
def test_an_exception_on_one_rank_ends_all_at_once(tmp_path):
    reason = harness.missing("horovod-mpi")
    if reason and os.environ.get("DTK_REQUIRE_HOROVOD") != "1":
        pytest.skip(reason)
    script = tmp_path / "fails.py"
    script.write_text(
        "import dtk\n"
        "strategy = dtk.auto_strategy()\n"
        "if strategy.rank == 1:\n"
        "    raise ArithmeticError('on purpose')\n"
        "strategy.communicator.barrier()\n"
    )
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    ended = subprocess.run(
        [*argv, sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "ArithmeticError: on purpose" in ended.stderr
    assert "dtk: rank 1 on" in ended.stderr


def make_mirrored(devices):
    """What is said of devices that cannot be had; TensorFlow has started."""
    tf.ones(1)
    try:
        dtk.strategies.MirroredStrategy(devices)
    except ValueError as error:
        return str(error)


@pytest.mark.worlds(("local", 1))
@pytest.mark.parametrize(
    "devices, said",
    [
        (4, "devices=4, but TensorFlow has already started with 3 CPU device(s)"),
        (0, "devices=0 is not a number of devices; use 1 or more"),
        (["/gpu:7"], "device '/gpu:7' does not exist; there are "),
        (["/cpu:0", "/cpu:3"], "device '/cpu:3' does not exist; there are "),
    ],
)
def test_devices_that_are_not_there(pool, devices, said):
    assert said in pool.run(make_mirrored, devices)[0]
