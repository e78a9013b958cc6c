"""Scripts that are right, and that the checks between ranks or the self-test once ended."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support import bodies, cases

SCRIPTS = {}


def script(function):
    SCRIPTS[function.__name__.replace("_", " ")] = function
    return function


class OwnStep(keras.Sequential):
    """Makes a step of the parts that a script overrides."""

    def loss_of(self, x, y, p):
        return self.compute_loss(x, y, p)

    def keep(self, gradients):
        pass

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.keep(gradients)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "total": tf.reduce_sum(tf.cast(y, "float32"))}


class Penalized(keras.layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(tf.square(x)))
        return x


@script
def a_loss_without_arguments(strategy):
    class OfItself(OwnStep):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.add_n(self.losses)

        def loss_of(self, x, y, p):
            return self.compute_loss()

    x, y = cases.rows(16)
    cases.compiled(strategy, lambda: OfItself([*cases.dense_layers(), Penalized()])).fit(
        x, y, 8, verbose=0
    )


@script
def a_mean_of_gradients_that_is_kept(strategy):
    class Keeping(OwnStep):
        def keep(self, gradients):
            for kept, gradient in zip(self.means, gradients, strict=True):
                kept.assign(0.9 * kept + 0.1 * gradient)

    def build():
        layers = [keras.layers.Dense(300, "tanh") for _ in range(2)]
        model = Keeping([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])
        model.add(keras.layers.Dense(10))
        weights = model.trainable_variables
        model.means = [model.add_weight(v.shape, "zeros", trainable=False) for v in weights]
        return model

    x, y = cases.rows(16)
    cases.compiled(strategy, build).fit(x, y, 8, verbose=0)


@script
def data_that_gain_weights_and_another_type(strategy):
    x, y = cases.rows(16)
    model = cases.compiled(strategy, lambda: OwnStep(cases.dense_layers()))
    model.fit(x, y, 8, verbose=0)
    model.fit(x, y, 8, sample_weight=np.ones(16), verbose=0)
    model.fit(x, y.astype("int32"), 8, verbose=0)


@script
def a_sum_beside_a_loss_in_a_loss(strategy):
    class Root(OwnStep):
        def compute_loss(self, *args, **kwargs):
            return tf.sqrt(super().compute_loss(*args, **kwargs))

    def inner(y, p):
        return tf.reduce_mean(tf.square(tf.one_hot(tf.cast(y, tf.int32), 10) - p))

    x, y = cases.rows(16)
    model = cases.compiled(strategy, lambda: Root(cases.dense_layers()), loss=inner)
    history = model.fit(x, y, 16, epochs=2, verbose=0).history
    assert history["total"] == [y.sum()] * 2, "a sum that is logged beside a loss of the batch"


@script
def lambdas_strings_and_inputs_of_one_rank(strategy):
    x, y = cases.rows(16)
    weight = lambda v: v * 2.0  # noqa: E731
    seen = [weight] * (1 + strategy.rank)  # how often it is referred to
    words = tf.Variable(["a", "b"], trainable=False)

    class Reading(keras.layers.Layer):
        def call(self, given):
            return given + tf.cast(tf.strings.length(words[0]), given.dtype)

        def save_assets(self, folder):
            raise NotImplementedError

    if strategy.is_chief:
        keras.Input((3,))  # Keras numbers inputs
    inner = keras.Sequential([keras.Input((8, 1)), keras.layers.Dense(2)])
    with strategy.scope():
        layers = [keras.layers.TimeDistributed(inner), Reading(), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Lambda(weight), keras.layers.Dense(10)])
        model.compile("sgd", lambda t, p: tf.reduce_mean(tf.square(p), -1))
    if strategy.is_chief:
        model.build((16, 8, 8, 1))  # such as for its summary
    model.fit(x, y, 8, verbose=0)
    assert seen


@script
def a_label_that_an_eager_step_takes_out_of_its_data(strategy):
    class Taking(OwnStep):
        def train_step(self, data):
            y = data.pop("y")
            return super().train_step((data["x"], y))

    x, y = cases.rows(16)
    data = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(8)
    cases.compiled(strategy, lambda: Taking(cases.dense_layers()), run_eagerly=True).fit(
        data, verbose=0
    )


@script
def a_mean_over_pairs_of_one_class_that_few_rows_lack(strategy):
    def of_pairs(y, p):
        same = tf.cast(y[:, None] == y, p.dtype) - tf.eye(tf.shape(p)[0])
        apart = tf.reduce_sum(tf.square(p[:, None] - p[None]), -1)
        return tf.reduce_sum(same * apart) / tf.reduce_sum(same)

    x, _ = cases.rows(16)
    y = np.array([*range(10), *range(6)])
    model = cases.compiled(
        strategy, lambda: keras.Sequential(cases.dense_layers()), loss=of_pairs
    )
    model.fit(x, y, 16, shuffle=False, verbose=0)


@script
def a_loss_that_compares_rows_beside_words(strategy):
    class Comparing(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            alike = tf.matmul(y_pred, y_pred, transpose_b=True)
            own = tf.eye(tf.shape(y_pred)[0])
            return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(own, alike))

    def build():
        lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
        return Comparing([lookup, keras.layers.Embedding(4, 3), keras.layers.Dense(3)])

    words = tf.data.Dataset.from_tensor_slices((["a", "b", "c", "a"] * 4, np.zeros(16))).batch(8)
    cases.compiled(strategy, build, optimizer="sgd", loss=None).fit(words, verbose=0)


@script
def metrics_given_to_compile_that_the_step_leaves_alone(strategy):
    class OwnMetrics(OwnStep):
        metrics = []  # its own alone, of which it has none

        def train_step(self, data):
            return super().train_step((data["x"], data["y"]))

    x, y = cases.rows(16)
    data = tf.data.Dataset.from_tensor_slices({"x": x, "y": y}).batch(8)
    cases.compiled(
        strategy, lambda: OwnMetrics(cases.dense_layers()), metrics=["accuracy"]
    ).fit(data, verbose=0)


@script
def layers_without_a_configuration(strategy):
    """Such as those of most scripts, which take arguments and have no `get_config`."""

    class Scaled(keras.layers.Layer):
        def __init__(self, kernel):
            super().__init__()
            self.kernel = kernel

        def call(self, given):
            return self.kernel * given

        def compute_output_shape(self, shape):
            return shape

    def build():
        inputs = keras.Input((8, 8, 1))
        scaled = keras.layers.TimeDistributed(Scaled(tf.constant(2.0)))(inputs)
        flat = keras.layers.Flatten()(scaled)
        inner = keras.Model(inputs, keras.layers.Dense(10)(Scaled(tf.constant(2.0))(flat)))
        return keras.Sequential([inner])

    x, y = cases.rows(16)
    cases.compiled(strategy, build).fit(x, y, 8, verbose=0)


@script
def a_loss_that_adds_itself_up_many_times(strategy):
    """The number of its terms doubles each time: a walk over them took minutes."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(model(x)[:, 0], global_batch_size=8)
            for _ in range(40):
                loss = 0.5 * loss + 0.5 * loss
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    tf.function(lambda x: strategy.run(step, (x,)))(tf.ones((4, 3)))


def run(name):
    SCRIPTS[name](bodies.strategy())


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_is_right_trains(pool, name):
    pool.run(run, name)
