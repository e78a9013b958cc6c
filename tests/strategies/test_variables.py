"""Variables made in a strategy's scope can be used as plain ones, and losses outside of steps."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support import bodies, cases


def numbers(strategy):
    """What Python and NumPy make of variables in the scope and outside, and what was in them."""
    model = cases.compiled(strategy)
    model.fit(*cases.rows(16), batch_size=8, epochs=1, verbose=0)
    optimizer, tracker = model.optimizer, model.metrics[0]

    def read():
        return [
            (int(variable), float(variable), complex(variable.value), np.array(variable.value))
            for variable in (optimizer.iterations, optimizer.learning_rate, tracker.total)
        ]

    with strategy.scope():
        inside = read()
    return inside, read(), [v.numpy() for v in (optimizer.iterations, optimizer.learning_rate)]


def largest(strategy):
    """The largest of what the replicas hold, eagerly and in a graph: by replica."""

    def index():
        return tf.distribute.get_replica_context().replica_id_in_sync_group

    def reduced():
        return strategy.extended.reduce_over_replicas(
            [tf.cast([index(), 1 - index()], tf.float32)], "max"
        )[0]

    found = [strategy.run(reduced), tf.function(lambda: strategy.run(reduced))()]
    return [value.numpy() for f in found for value in strategy.experimental_local_results(f)]


def loss_in_no_step(strategy):
    """A loss of ones: in the scope, summed over the replicas of a step by hand, and outside."""
    loss, ones = keras.losses.MeanSquaredError(), np.ones((4, 2), "float32")

    with strategy.scope():
        inside = float(loss(ones, 0 * ones))
        parts = strategy.run(lambda: loss(ones, 0 * ones))
        summed = float(strategy.reduce("sum", parts, axis=None))
    return inside, summed, float(loss(ones, 0 * ones))


def found_under(devices):
    strategy = bodies.strategy(devices)
    return numbers(strategy), largest(strategy), loss_in_no_step(strategy)


@pytest.mark.full_but("local-1-2")
@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_variables_and_losses_are_numbers(world, backend, size, devices):
    """Breaks as TypeError of `float(optimizer.learning_rate)`, which TensorFlow's mirrored raise.

    Keras's own tests of callbacks found it: `int(optimizer.iterations)` at the end of an epoch. A
    loss of the scope was half with two workers: Keras divides it, as if it were summed.
    """
    for found, most, losses in world(backend, size).run(found_under, devices):
        inside, outside, (iterations, rate) = found
        for (steps, *_), (_, learning_rate, *_), (_, total, as_complex, array) in (inside, outside):
            assert steps == iterations == 2
            assert learning_rate == rate
            assert total > 0 and as_complex == total
            assert isinstance(array, np.ndarray) and array.shape == () and array == total
        np.testing.assert_array_equal(most, np.ones_like(most))
        assert losses == (1, 1, 1)


BATCH = 8


def running(strategy, step, given):
    def run(*args):
        strategy.run(step, args=args, kwargs=given)

    return run


def norms(strategy):
    """Weights after `fit`, then after loops of one's own; the last batch has a row for one rank."""
    x, y = cases.rows(17)
    x, y = x.reshape(len(x), -1)[:, :6], y.astype("float32")[:, None]

    def compiled():
        with strategy.scope():
            keras.utils.set_random_seed(3)
            layers = [
                keras.layers.BatchNormalization(momentum=0.5, gamma_regularizer="l2"),
                keras.layers.Dense(1),
            ]
            model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model = compiled()
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    found = [model.get_weights()]
    rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    batches = strategy.experimental_distribute_dataset(rows)
    for inside, outside in ((None, tf.function), (tf.function, None), (None, None)):
        model, optimizer = compiled(), keras.optimizers.SGD(0.1)

        def step(x, y, rows, variables=None, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                errors = model(x, training=True) - y
                loss = tf.reduce_sum(errors**2) / rows
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
            variables = variables or model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        # A tf.function would take them as tensors. They have more rows than the last batch.
        given = {"variables": model.trainable_variables} if inside is None else {}
        step = step if inside is None else inside(step)
        run = running(strategy, step, given)
        run = run if outside is None else outside(run)
        for _ in range(2):
            for number, batch in enumerate(batches):
                run(*batch, tf.constant([8.0, 8.0, 1.0][number]))
        found.append(model.get_weights())
        # A step must not send this number, which is the same everywhere.
        assert model.optimizer.iterations.value.aggregation == tf.VariableAggregation.NONE
    return found


def reduced_by_tensorflow(strategy):
    """Variables with an aggregation, assigned in each replica: in graphs and eagerly."""
    kinds = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
    found = []
    for inside, outside in ((None, tf.function), (tf.function, None), (None, None)):
        with strategy.scope():
            made = [
                tf.Variable(1.0, aggregation=getattr(tf.VariableAggregation, kind))
                for kind in kinds
            ]

        def step(made=made):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            for variable in made:
                variable.assign_add(tf.cast(number, tf.float32) + 2.0)
            made[0].assign_sub(tf.constant(1.0))

        step = step if inside is None else inside(step)

        def run(step=step):
            strategy.run(step)

        run = run if outside is None else outside(run)
        run()
        for variable in made:
            variable.assign_add(10.0)  # outside replicas
        found.append([float(variable) for variable in made])
    return found


def loops_under(devices):
    strategy = bodies.strategy(devices)
    return norms(strategy), reduced_by_tensorflow(strategy)


@pytest.mark.full_but("local-1-2")
@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_loop_of_ones_own_keeps_its_state_as_fit_does(world, backend, size, devices):
    """Moving statistics were each rank's own, and not a number after a batch with fewer rows.

    TensorFlow's reductions of variables did not take place. Two reductions in a `tf.function` that
    two devices run waited for each other. Variables of Keras as arguments were an error, and
    counted as rows of the batch.
    """
    for (of_fit, *of_loops), reduced in world(backend, size).run(loops_under, devices):
        for weights in of_loops:
            for expected, weight in zip(of_fit, weights, strict=True):
                np.testing.assert_allclose(weight, expected, rtol=2e-6, atol=1e-6)
        assert reduced == [[1 + (2 + 3) - 2 + 10, 1 + 2.5 + 10, 1 + 2 + 10]] * 3


def built_in_a_loop(devices):
    """Train layers that their first step builds; return the weights of all replicas."""
    strategy = bodies.strategy(devices)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)

    def of_rows(x):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_sum(model(x) ** 2, axis=1))
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    @tf.function
    def step(x):
        strategy.run(of_rows, args=(x,))

    data = tf.data.Dataset.from_tensor_slices(cases.rows(16)[0][:, 0]).batch(8)
    for x in strategy.experimental_distribute_dataset(data):
        step(x)
    return [
        [copy.numpy() for copy in getattr(weight.value, "values", [weight.value])]
        for weight in model.trainable_variables + optimizer.variables
    ]


def test_a_loop_builds_its_model(world):
    """The second device's copies were not initialized: "In[1] is not a matrix".

    tf_keras's own tests found it: test_single_keras_layer_run.
    """
    (plain,) = world("local", 1).run(built_in_a_loop, 0)
    (found,) = world("local", 1).run(built_in_a_loop, 2)
    for (expected,), copies in zip(plain, found, strict=True):
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)


class Scaled(keras.Model):
    """A model whose step also trains two plain TensorFlow variables of one name."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.plain = [tf.Variable([1.0]), tf.Variable([0.5])]
        self.other = keras.optimizers.Adam(0.1)

    def call(self, x):
        return self.dense(x) * self.plain[0] + self.plain[1]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        weights = self.trainable_variables
        gradients, others = tape.gradient(loss, [weights, self.plain])
        self.optimizer.apply(gradients, weights)
        self.other.apply(others, self.plain)
        return self.compute_metrics(x, y, None)


def of_plain_variables(devices=None):
    """What optimizers make of plain variables, in a script's loop and in steps of `fit`."""
    plain = devices is None
    strategy = tf.distribute.get_strategy() if plain else bodies.strategy(devices)
    found = []
    for optimizer in (keras.optimizers.SGD, keras.optimizers.Adam):
        with strategy.scope():
            optimizer = optimizer(0.5, global_clipnorm=1.0)
            variables = [tf.Variable([1.0, 2.0]), tf.Variable([3.0])]

        def step(optimizer=optimizer, variables=variables):
            scale = 1.0 if plain else 0.5
            gradients = [scale * tf.ones([2]), scale * tf.constant([4.0])]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        tf.function(lambda step=step: strategy.run(step))()
        found += [variable.numpy() for variable in variables]
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    for jit_compile in (False, True):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Scaled()
            model.compile("sgd", "mse", jit_compile=jit_compile)
        model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=1, shuffle=False, verbose=0)
        found += [*model.get_weights(), *(variable.numpy() for variable in model.plain)]
    return found


@pytest.mark.full_but("local-1-2")
@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_optimizers_update_plain_variables_as_without_a_strategy(world, backend, size, devices):
    """Optimizers of Keras update `tf.Variable`s, which have no path; dtk asked for it."""
    expected = of_plain_variables()
    for found in world(backend, size).run(of_plain_variables, devices):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4)


def predicted_first(devices=None):
    """Predictions of models that nothing has built before: their weights are drawn meanwhile."""
    strategy = tf.distribute.get_strategy() if devices is None else bodies.strategy(devices)
    rows = np.arange(6, dtype="float32")[:, None] / 6
    found = []
    for run_eagerly in (False, True):
        for predict in ("predict", "predict_on_batch"):
            # Ranks other than 0 would draw other weights.
            keras.utils.set_random_seed(3 + getattr(strategy, "rank", 0))
            with strategy.scope():
                layers = [keras.layers.Dense(10), keras.layers.BatchNormalization()]
                model = keras.Sequential([*layers, keras.layers.Dense(1)])
                model.compile("sgd", "mse", metrics=["mae"], run_eagerly=run_eagerly)
            found.append(getattr(model, predict)(rows))
    return found


@pytest.mark.full_but("local-1-2")
@pytest.mark.parametrize("backend, size, devices", [("local", 1, 2), ("collective", 2, 0)])
def test_a_model_may_be_built_by_its_first_prediction(world, backend, size, devices):
    """Replicas that are threads computed with weights that nothing had initialized.

    Ranks computed their rows each with the weights that it had drawn.
    """
    expected = predicted_first()
    for found in world(backend, size).run(predicted_first, devices):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
