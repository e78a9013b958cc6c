"""A few rows both ways: what the kinds of losses make of training, and that nothing is changed."""

from __future__ import annotations

import contextlib
import io

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.errors import NotDistributedError
from dtk.input import digests
from dtk.patches import patch
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.replica import self_test, step_checks, step_trial

from support import bodies, cases
from support.once import once

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])


def assert_equal(mine, plain):
    assert np.linalg.norm(mine[0] - plain[0]) <= 1e-5 * np.linalg.norm(plain[0])
    for name, values in plain[1].items():
        np.testing.assert_allclose(mine[1][name], values, 1e-5, 1e-6, err_msg=name)


def scalar(y, p):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, p, True))


def summed(y, p):
    return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, p, True)) / 16


class Mixed(cases.Subclassed):
    """A mean, a sum and a quotient, in one loss; logged in parts."""

    def __init__(self):
        super().__init__()
        self.tracked = keras.metrics.Mean(name="tracked")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            rows = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), True)
            weight = 1 + tf.cast(y > 2, rows.dtype)
            masked = tf.reduce_sum(rows * weight) / tf.reduce_sum(weight)
            spread = tf.reduce_sum(tf.square(rows)) / 64
            loss = tf.reduce_mean(rows) + 0.5 * spread - 0.1 * masked
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        self.tracked.update_state(spread)
        return {"loss": loss, "tracked": self.tracked.result(), "masked": masked}


def trained(name, tested=True, devices=0, plain=False):
    """Weights, history and what was printed, of one of these."""
    strategy = None if plain else bodies.strategy(devices)
    x, y = cases.rows(42)
    builds = {
        "scalar": (cases.small, scalar), "summed": (cases.small, summed), "mixed": (Mixed, None)
    }  # fmt: skip
    build, loss = builds[name]

    def seeded():
        keras.utils.set_random_seed(3)
        return build()

    model = cases.compiled(strategy, seeded, optimizer=keras.optimizers.SGD(0.05), loss=loss)
    if not tested:
        trainer_of(model).checks_of("train").kinds = {}
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), history.history, text.getvalue()


def plain(name):
    return trained(name, plain=True)


@TWO
@pytest.mark.full
@pytest.mark.parametrize("name", ["scalar", "mixed"])
def test_losses_of_ones_own(world, backend, size, name):
    """Breaks as sums that count with a replica's share, or as a mean that counts twice."""
    for mine in world(backend, size).run(trained, name):
        assert_equal(mine, once(plain, name))


@pytest.mark.full
@pytest.mark.parametrize("backend, size, devices", [("mirrored", 2, 2)])
def test_on_two_devices(world, backend, size, devices):
    (mine,) = world("local", 1).run(trained, "mixed", True, devices)
    assert_equal(mine, once(plain, "mixed"))


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_without_it_a_sum_is_wrong(world, backend, size):
    """What the test is for: the sum would be trained on by half, without a word."""
    mine, _ = world(backend, size).run(trained, "summed", False)
    with pytest.raises(AssertionError):
        assert_equal(mine, once(plain, "summed"))


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_what_it_prints(world, backend, size):
    """Its cost, and what it found, on rank 0 only; then the sum is trained as in one process."""
    results = world(backend, size).run(trained, "summed")
    for mine in results:
        assert_equal(mine, once(plain, "summed"))
    (_, _, said), (_, _, other) = results
    assert said.startswith("dtk: self-test of model 'sequential")
    assert "(loss summed): 5 rows as a whole and in 2 parts agree to" in said
    assert "loss 'summed' 0 is a sum (" in said and said.endswith(" s)\n")
    assert other == ""


def changed_nothing():
    """Whether weights, optimizer, metrics and seeds are as before a self-test."""
    strategy = bodies.strategy()
    x, y = cases.rows(16)

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Flatten(), keras.layers.Dropout(0.5), keras.layers.Dense(10)]
        normalized = keras.layers.BatchNormalization()
        return keras.Sequential([keras.Input((8, 8, 1)), *layers, normalized])

    model = cases.compiled(strategy, build, loss=scalar, metrics=["accuracy"])
    model.fit(x, y, batch_size=8, verbose=0)
    model.reset_metrics()
    trainer = trainer_of(model)
    variables = step_trial.changed_by_training(model)
    before = [v.numpy().tobytes() for v in variables]
    batch = trainer.cut(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
    tried = trainer.make_trial(model.train_step, next(iter(batch)))
    verdict = self_test.run(tried, ["a test"])
    assert digests.digest(tf.constant([1])) is not None
    return before == [v.numpy().tobytes() for v in variables], verdict


@TWO
def test_it_changes_nothing(world, backend, size):
    for same, verdict in world(backend, size).run(changed_nothing):
        assert same
        assert verdict.difference.size < 1e-4
        assert verdict.difference.wrong is None and verdict.notes == []


class Counting(cases.Subclassed):
    """Counts its steps, in a number and in a variable, and halves the weights of every other."""

    calls = 0

    def __init__(self, variable=True):
        super().__init__()
        self.seen = 0
        self.listed, self.last = [], None
        self.counter = tf.Variable(0, trainable=False) if variable else None

    def train_step(self, data):
        self.calls += 1
        if self.counter is not None:
            self.counter.assign_add(1)
        x, y = data
        logs = super().train_step((x, y, keras.ops.ones_like(y) / (1 + self.calls % 2)))
        self.seen += len(data)
        self.first = getattr(self, "first", 0) + 1
        self.last = (self.last or 0) + 1
        self.listed.append(float(self.seen))
        return logs


class CountingLayer(keras.layers.Layer):
    """Counts its calls, and doubles the rows of every third one."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x * (2.0 if self.calls % 3 else 1.0)


def counted_by_a_layer(devices=0):
    x, y = cases.rows(16)
    counting = CountingLayer()

    def build():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Flatten(), counting, keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    strategy = bodies.strategy(devices) if devices else None
    model = cases.compiled(strategy, build, run_eagerly=True)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return bodies.flat(model.get_weights()), {"calls": [counting.calls]}


def counts_of_eager_steps(plain=False, devices=0):
    strategy = None if plain else bodies.strategy(devices)
    x, y = cases.rows(16)
    keras.utils.set_random_seed(3)
    model = cases.compiled(strategy, lambda: Counting(not devices), run_eagerly=True)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    weights = bodies.flat(model.get_weights())
    counts = [model.calls, model.seen, model.first, model.last, len(model.listed)]
    counts.append(int(model.counter or model.calls))
    return weights, {"counts": counts}


@TWO
def test_what_an_eager_step_counts_is_kept(world, backend, size):
    """Broke as the trial's calls were counted, too, so other steps were the halved ones."""
    plain = counts_of_eager_steps(plain=True)
    for mine in world(backend, size).run(counts_of_eager_steps):
        assert_equal(mine, plain)


def test_devices_that_take_turns_count_an_eager_step_once(world):
    """Broke as each counted on from where another had: some halved weights, and others did not."""
    [mine] = world("local", 1).run(counts_of_eager_steps, False, 2)
    assert_equal(mine, counts_of_eager_steps(plain=True))
    [mine] = world("local", 1).run(counted_by_a_layer, 2)
    assert_equal(mine, counted_by_a_layer())


class Drawing(cases.Subclassed):
    """A step with random numbers of rows, or units at a kink; its loss is a mean, but for one."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.normalized = keras.layers.BatchNormalization(scale=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = getattr(self, f"loss_{self.kind}")(x, y)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return {"loss": loss, **({"last": x[-1]} if self.kind == "spread" else {})}

    def loss_labels(self, x, y):
        """Noise of fakes, and then of reals, as in Keras's guide on GANs."""
        fakes = tf.random.normal(tf.shape(x))
        labels = tf.concat([tf.ones_like(y), tf.zeros_like(y)], 0)[:, None]
        labels = tf.cast(labels, tf.float32) + 0.05 * tf.random.uniform(tf.shape(labels))
        return tf.reduce_mean(tf.square(self(tf.concat([fakes, x], 0)) - labels))

    def patches(self, x):
        return tf.reshape(tf.nn.dropout(tf.reshape(x, (-1, 4, 4, 1)), 0.5), tf.shape(x))

    def loss_patches(self, x, y):
        return tf.reduce_mean(tf.square(self(self.patches(x))))

    def loss_both(self, x, y):
        return self.loss_labels(self.patches(x), y)

    def loss_spread(self, x, y):
        """Wrong, as the rows of a batch meet in it; what it draws is a row's."""
        two = self(tf.random.normal(tf.concat([2 * tf.shape(x)[:1], tf.shape(x)[1:]], 0)))
        return self.loss_patches(x, y) - tf.reduce_mean(tf.math.reduce_variance(two, 0))

    def loss_kink(self, x, y):
        """The third of five rows is the mean, which every unit makes 0, but for rounding."""
        rows = tf.reshape(x, (-1, 64))[:, :1]
        units = self.normalized(rows * tf.linspace(0.1, 1.7, 64), training=True)
        return tf.reduce_mean(tf.nn.relu(units)) + tf.reduce_mean(tf.square(self(x)))

    def loss_rounding(self, x, y):
        """A wave so short that rounding decides where on it a number is."""
        normalized = self.normalized(tf.reshape(x, (-1, 64)) / 7, training=True)
        return tf.reduce_mean(tf.sin(3e6 * normalized)) + tf.reduce_mean(self(x))

    def loss_hidden(self, x, y):
        """Wrong, and at the first weights alone each change of a weight changes a gradient."""
        outputs, at_zero = self(x), tf.nn.relu(tf.convert_to_tensor(self.normalized.beta))
        apart = tf.reduce_mean(tf.math.reduce_variance(outputs, 0))
        return tf.reduce_mean(tf.square(outputs)) - apart + tf.reduce_mean(at_zero)


def tried(kind):
    """What a self-test finds of a step on two devices."""
    keras.utils.set_random_seed(3)
    x, y = cases.rows(16)
    x[[0, 1, 2, 4, 5], 0, 0, 0] = range(5)  # the rows that are tried
    strategy = bodies.strategy(2)
    model = cases.compiled(strategy, lambda: Drawing(kind), loss=None)
    with strategy.scope():
        model(x[:1])
        model.normalized.build((None, 64))
    trainer = trainer_of(model)
    batch = trainer.cut(tf.data.Dataset.from_tensor_slices((x, y)).batch(8))
    trial = trainer.make_trial(model.train_step, next(iter(batch)))
    before = [v.numpy().tobytes() for v in model.variables]
    verdict = self_test._judge(trial, self_test._compute)
    assert before == [v.numpy().tobytes() for v in model.variables]
    return verdict


@pytest.mark.full_but("local-1-kink")
@pytest.mark.worlds(("local", 1))
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("labels", marks=pytest.mark.full),
        pytest.param("patches", marks=pytest.mark.full),
        "both",
        "kink",
    ],
)
def test_random_numbers_and_kinks_are_no_mistakes(pool, kind):
    """Breaks as a right script that is refused, the more so the wider its layers are."""
    for verdict in pool.run(tried, kind):
        assert verdict.difference.wrong is None and verdict.notes == []
        assert verdict.difference.size < 1e-4


@pytest.mark.worlds(("local", 1))
def test_a_mistake_beside_random_numbers_is_refused(pool):
    for verdict in pool.run(tried, "spread"):
        assert "differs by" in verdict.difference.wrong
        (note,) = (note for note in verdict.notes if "is not one number" in note)
        assert note.startswith("'last' in the logs") and "of shape (8, 8, 1)" in note


@pytest.mark.worlds(("local", 1))
def test_what_cannot_be_told_from_rounding_is_said(pool):
    """Breaks as a right script that is refused; its losses are means."""
    for verdict in pool.run(tried, "rounding"):
        assert verdict.difference.wrong is None and verdict.difference.size > 1e-4
        (note,) = (note for note in verdict.notes if "cannot tell" in note)
        assert "self_test=False" in note


@pytest.mark.worlds(("local", 1))
def test_a_mistake_that_rounding_hides_at_the_first_weights_is_refused(pool):
    """Breaks as a warning: a published loss of exp(mean) trained to other weights."""
    for verdict in pool.run(tried, "hidden"):
        assert "differs by" in verdict.difference.wrong


def drawn_after_a_trial():
    """What NumPy draws after training on two devices, whose steps are traced by threads."""
    model = cases.compiled(bodies.strategy(2), loss=scalar)
    x, y = cases.rows(8)
    np.random.seed(3)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return np.random.rand()


@pytest.mark.worlds(("local", 1))
def test_numpy_draws_on_where_it_was(pool):
    assert pool.run(drawn_after_a_trial) == [np.random.RandomState(3).rand()]


def tries_of_other_data():
    """How often a step was tried, with data of another kind behind."""
    runs, original = [], step_checks.StepChecks.try_step
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    with bodies.strategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", lambda y, p: keras.ops.mean(keras.ops.abs(y - p), -1))
    with patch(step_checks.StepChecks, try_step=lambda *a: runs.append(a) or original(*a)):
        model.evaluate(x, x[:, :1], 8, verbose=0)
        model.fit(x, x[:, :1], 8, verbose=0)
        model.evaluate(x, x[:, :1], 2, sample_weight=np.ones(64), verbose=0)
    return len(runs)


@pytest.mark.worlds(("collective", 2))
def test_a_trial_of_other_data_does_not_stay(pool):
    """It stayed due, so that every later step was tried anew."""
    assert pool.run(tries_of_other_data) == [3, 3]


class Penalized(keras.layers.Layer):
    """Adds a sum over rows where it trains, and a mean where it does not."""

    def call(self, x, training=False):
        self.add_loss(tf.reduce_sum(tf.square(x)) if training else tf.reduce_mean(x))
        return x


def trained_and_validated(devices):
    """Losses of training and of validation, and what was printed."""
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    with bodies.scope_of(bodies.strategy(devices) if devices else None):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), Penalized(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with contextlib.redirect_stdout(io.StringIO()) as said, dtk.strategies.undistributed():
        fitted = model.fit(x, x[:, :1], 10, verbose=0, validation_data=(x[:5], x[:5, :1]))
    return [*fitted.history["loss"], *fitted.history["val_loss"]], said.getvalue()


@pytest.mark.worlds(("local", 1))
def test_what_only_a_test_step_computes_is_tried(pool):
    """Its losses were taken for those of the train step, by their numbers."""
    ((plain, _),) = pool.run(trained_and_validated, 0)
    ((mine, said),) = pool.run(trained_and_validated, 2)
    np.testing.assert_allclose(mine, plain, 1e-5)
    assert "(layer Penalized with training=False): 5 rows" in said


class ByTurns(cases.Subclassed):
    """Trains all variables in the first step and the third, and those of a layer in the second."""

    def __init__(self):
        super().__init__()
        self.turn = 0
        self.turns = []

    def count(self):
        self.turn += 1
        return self.turn

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        trained = (self if self.count() % 2 else self.outer).trainable_variables
        self.optimizer.apply(tape.gradient(loss, trained), trained)
        return {"loss": loss}


class InAList(ByTurns):
    def count(self):
        self.turns.append(0)
        return len(self.turns)


class InADict(ByTurns):
    def __init__(self):
        super().__init__()
        self.counts = {"turns": 0}

    def count(self):
        self.counts["turns"] += 1
        return self.counts["turns"]


def trained_by_turns(build, plain=False):
    """Weights after three steps, or why there are none."""
    strategy = None if plain else bodies.strategy()
    x, y = cases.rows(12)

    def seeded():
        keras.utils.set_random_seed(3)
        return build()

    optimizer = keras.optimizers.SGD(0.05)
    model = cases.compiled(strategy, seeded, optimizer=optimizer, run_eagerly=True)
    try:
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    except NotDistributedError as error:
        return str(error)
    return bodies.flat(model.get_weights())


@pytest.mark.worlds(("collective", 2))
def test_counts_in_python_stay_those_of_the_steps(pool):
    """Trials counted, too: other variables were trained, which looked like rounding."""
    plain = trained_by_turns(ByTurns, plain=True)
    for build in ByTurns, InAList:
        for mine in pool.run(trained_by_turns, build):
            np.testing.assert_allclose(mine, plain, 1e-5, 1e-6)
    for said in pool.run(trained_by_turns, InADict):
        assert "gradients of other variables. Each call of a step must train the same" in said


class KeepsMean(keras.layers.Layer):
    """Keeps a mean of its rows in a variable of TensorFlow's, for test steps only."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(tf.zeros([4]), trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * tf.reduce_mean(x, 0))
            return x
        return x - self.mean


def trained_with_a_mean():
    strategy = bodies.strategy()
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), KeepsMean(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(x, x[:, :1], 10, verbose=0)
    except NotDistributedError as error:
        return str(error)
    return "trained"


@pytest.mark.worlds(("collective", 2))
def test_a_variable_of_tensorflow_that_is_not_averaged_is_refused(pool):
    """Each rank kept the mean of its own rows, and evaluated with it."""
    for said in pool.run(trained_with_a_mean):
        assert "the step assigns other values to the variable 'Variable" in said
        assert "A tf.Variable is not averaged" in said


class LargestError(keras.Model):
    """Logs the mean of batches' largest errors, by a metric of Keras's."""

    def __init__(self, *args):
        super().__init__(*args)
        self.largest = keras.metrics.Mean(name="largest")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(tf.reduce_max(tf.abs(y - y_pred)))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def numpy_median(y_true, y_pred):
    return np.median(np.abs(np.array(y_true) - np.array(y_pred)))


def said_of_metrics(model=LargestError, metrics=(), eagerly=False):
    """What was printed, or the error and its notes."""
    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    with bodies.strategy(2).scope():
        rows = keras.Input((4,))
        made = model(rows, keras.layers.Dense(1)(rows))
        made.compile("sgd", "mse", metrics=metrics, run_eagerly=eagerly)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            made.fit(x, x[:, :1], 10, verbose=0)
        except NotImplementedError as error:
            return "; ".join(error.__notes__)
    return said.getvalue()


@pytest.mark.worlds(("local", 1))
def test_metrics_that_compute_metrics_updates_are_tried(pool):
    """A mean over devices was logged, and nothing said."""
    (said,) = pool.run(said_of_metrics)
    assert "'largest' is neither a mean nor a sum over rows" in said
    assert "(compute_metrics of LargestError)" in said


@pytest.mark.worlds(("local", 1))
def test_numpy_in_a_metric_is_refused_by_name(pool):
    (said,) = pool.run(said_of_metrics, keras.Model, [numpy_median], True)
    assert "model.predict(x)" in said


class LargestSince(keras.layers.Layer):
    """Keeps the largest entry of a batch, from the fourth step on."""

    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.steps, self.largest = self.add_weight(**options), self.add_weight(**options)

    def call(self, x):
        self.steps.assign_add(1.0)
        self.largest.assign(tf.where(self.steps > 3, tf.reduce_max(x), self.largest))
        return x


def refused_late():
    x = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
    with bodies.strategy(2).scope():
        model = keras.Sequential([keras.Input((4,)), LargestSince(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(x, x[:, :1], 6, epochs=3, shuffle=False, verbose=0)
    except NotDistributedError as error:
        return str(error)
    return "trained"


@pytest.mark.worlds(("local", 1))
def test_steps_that_end_an_epoch_are_compared_by_the_next(pool):
    """With 4 steps in an epoch, steps 4, 8, 16, ... had the last rows: none was compared."""
    assert "step 5 of the train_step" in pool.run(refused_late)[0]
