"""One function per feature: trains with or without a strategy, returns what to compare.

Every case gets the strategy, or None for plain Keras, and returns a dict of arrays and numbers. The
test asserts that they are equal on every rank and to the plain run's.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk

from support.bodies import digits, flat, scope_of

CASES = {}
# Optimizers of a Keras later than the first that dtk supports.
LATER = {
    "variables divided among optimizers": "MultiOptimizer",
    "model and divided optimizer from outside": "MultiOptimizer",
}


def skip_if_later(name):
    """Skip the test of a case with which the Keras that is here cannot do."""
    if name in LATER and not hasattr(keras.optimizers, LATER[name]):
        pytest.skip(f"Keras {keras.__version__} has no {LATER[name]} yet")


def case(function):
    CASES[function.__name__.replace("_", " ")] = function
    return function


def rows(n=75):
    x, y = digits()
    return x[:n].copy(), y[:n].copy()


def small(seed=3, activation=None, sync=True):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            # No bias in front of the normalisation: its gradient is zero but for rounding, and Adam
            # divides that rounding by itself.
            keras.layers.Dense(12, use_bias=False),
            keras.layers.BatchNormalization(synchronized=sync),
            keras.layers.ReLU(),
            keras.layers.Dense(10, activation=activation),
        ]
    )


def dense_layers():
    """Of a model that takes less to trace than `small`, where none of its layers matters."""
    keras.utils.set_random_seed(3)
    return [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]


def seeded(build):
    """Make what builds a model draw the same weights whenever it is called."""

    def seeded_build():
        keras.utils.set_random_seed(5)
        return build()

    return seeded_build


def crossentropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def compiled(strategy, build=small, **kwargs):
    kwargs = {"optimizer": keras.optimizers.Adam(0.01), "loss": crossentropy()} | kwargs
    with scope_of(strategy):
        model = build()
        model.compile(**kwargs)
    return model


class Normed(keras.optimizers.SGD):
    """An optimizer of one's own: the length of a step does not depend on the gradient's."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = tf.convert_to_tensor(gradient)
        super().update_step(gradient / (tf.norm(gradient) + 1e-6), variable, learning_rate)


def outcome(model, history=None, **more):
    result = {"weights": flat(model.get_weights()), **more}
    if history is not None:
        result |= {f"history {name}": np.array(v) for name, v in history.history.items()}
    return result


@case
def evaluate_and_predict_odd_rows(strategy):
    x, y = rows(37)
    model = compiled(strategy, metrics=["accuracy", "sparse_top_k_categorical_accuracy"])
    return outcome(
        model,
        evaluated=model.evaluate(x, y, batch_size=8, verbose=0),
        predicted=model.predict(x, batch_size=8, verbose=0),
        evaluated_one_row=model.evaluate(x[:1], y[:1], verbose=0),
        predicted_pieces=pieces(strategy).predict(x[:9], batch_size=4, verbose=0),
    )


def pieces(strategy):
    """A model that gives four rows for each."""
    with scope_of(strategy):
        images = keras.Input((8, 8, 1))
        return keras.Model(images, keras.ops.reshape(images, (-1, 16)))


@case
def class_weights_and_validation_split(strategy):
    x, y = rows()
    model = compiled(strategy, metrics=["accuracy"])
    weights = {label: 1.0 + label / 3 for label in range(10)}
    history = model.fit(
        x, y, class_weight=weights, validation_split=0.3, batch_size=16, epochs=2, verbose=0
    )
    return outcome(model, history)


@case
def mean_over_sample_weights(strategy):
    x, y = rows()
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    loss = crossentropy(reduction="mean_with_sample_weight")
    model = compiled(strategy, loss=loss, **metrics)
    weight = np.linspace(0.0, 2.0, len(x)) ** 2
    return outcome(model, model.fit(x, y, sample_weight=weight, batch_size=16, epochs=2, verbose=0))


def of_known(labels, logits):
    """The losses of the rows whose labels are known."""
    labels = tf.reshape(labels, [-1])
    given = [tf.boolean_mask(one, labels >= 0) for one in (labels, logits)]
    return keras.losses.sparse_categorical_crossentropy(*given, from_logits=True)


@case
def loss_of_rows_that_a_mask_keeps(strategy):
    """A rank's mean counts with the rows it kept. All rows of the self-test are kept."""
    x, y = rows()
    y[16:][y[16:] < 4] = -1
    model = compiled(strategy, loss=of_known)
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0))


@case
def summed_loss(strategy):
    x, y = rows()
    model = compiled(
        strategy, optimizer=keras.optimizers.SGD(0.001), loss=crossentropy(reduction="sum")
    )
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


@case
def masked_sequences(strategy):
    """Valid steps differ by rank: the mean must be over the world's valid steps."""

    @seeded
    def build():
        return keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                keras.layers.Embedding(20, 8, mask_zero=True),
                keras.layers.LSTM(6, return_sequences=True),
                keras.layers.Dense(20),
            ]
        )

    random = np.random.default_rng(0)
    tokens = random.integers(1, 20, (45, 12))
    tokens[np.arange(12) >= random.integers(2, 12, 45)[:, None]] = 0
    model = compiled(strategy, build)
    history = model.fit(tokens, tokens, batch_size=16, epochs=2, verbose=0)
    return outcome(model, history)


@case
def masked_norms_and_a_loss_without_a_reduction(strategy):
    """Keras's masked norm synchronizes nothing by itself, and of such losses it trains the sum."""
    random = np.random.default_rng(5)
    words = random.integers(1, 9, (21, 6)) * (np.arange(6) < random.integers(1, 7, (21, 1)))

    def build():
        keras.utils.set_random_seed(3)
        norm = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
        embedding = keras.layers.Embedding(9, 4, mask_zero=True)
        layers = [embedding, norm, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)]
        return keras.Sequential([keras.Input((6,), dtype="int32"), *layers])

    loss = keras.losses.MeanSquaredError(reduction=None)
    model = compiled(strategy, build, loss=loss, optimizer=keras.optimizers.SGD(0.05))
    targets = random.normal(size=(21, 2)).astype("float32")
    return outcome(model, model.fit(words, targets, batch_size=8, epochs=2, verbose=0))


@case
def sparse_embedding_gradients_clipped(strategy):
    @seeded
    def build():
        return keras.Sequential(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(50, 4),
                keras.layers.Flatten(),
                keras.layers.Dense(10),
            ]
        )

    random = np.random.default_rng(0)
    x, y = random.integers(0, 50, (45, 6)), random.integers(0, 10, 45)
    model = compiled(strategy, build, optimizer=keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


@case
def several_outputs(strategy):
    """In the last step all workers but one have no row."""

    @seeded
    def build():
        inputs = keras.Input((8, 8, 1))
        regularized = {"activity_regularizer": keras.regularizers.L2(0.1)}
        hidden = keras.layers.Dense(8, "tanh", **regularized)(keras.layers.Flatten()(inputs))
        outputs = {
            "label": keras.layers.Dense(10, name="label")(hidden),
            "mean": keras.layers.Dense(1, name="mean")(hidden),
        }
        return keras.Model(inputs, outputs)

    x, y = rows(65)
    model = compiled(
        strategy,
        build,
        loss={"label": crossentropy(), "mean": "mse"},
        loss_weights={"label": 1.0, "mean": 0.5},
        metrics={"label": ["accuracy"], "mean": ["mae"]},
    )
    targets = {"label": y, "mean": x.mean((1, 2, 3))[:, None]}
    history = model.fit(x, targets, batch_size=16, epochs=2, verbose=0)
    predicted = model.predict(x[:9], batch_size=4, verbose=0)
    return outcome(model, history, label=predicted["label"], mean=predicted["mean"])


@case
def steps_per_execution(strategy):
    x, y = rows()
    model = compiled(strategy, metrics=["accuracy"], steps_per_execution=3)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return outcome(model, history, predicted=model.predict(x[:29], batch_size=4, verbose=0))


@case
def eager_steps(strategy):
    x, y = rows(35)
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
    model = compiled(strategy, metrics=["accuracy"], run_eagerly=True, optimizer=optimizer)
    history = model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    return outcome(model, history, predicted=model.predict(x[:5], verbose=0))


@case
def endless_datasets(strategy):
    x, y = rows()
    model = compiled(strategy, metrics=["accuracy"])  # sets the seed that shuffling also depends on
    once = tf.data.Dataset.from_tensor_slices((x, y))
    history = model.fit(
        once.shuffle(75, seed=1).repeat().batch(16),
        steps_per_epoch=4,
        class_weight={label: 1.0 + label / 3 for label in range(10)},
        validation_data=once.batch(16).repeat(),
        validation_steps=3,
        epochs=3,
        verbose=0,
        shuffle=False,
    )
    return outcome(model, history)


@case
def strings_and_ragged_rows(strategy):
    words = ["a", "b c", "a b a", "d", "c c a b", "b"] * 4
    lookup = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=["a", "b", "c"])
    labels = np.arange(len(words)) % 3

    @seeded
    def build():
        return keras.Sequential([keras.Input((1,), dtype="string"), lookup, keras.layers.Dense(3)])

    model = compiled(strategy, build)
    texts = tf.data.Dataset.from_tensor_slices((np.array(words)[:, None], labels)).batch(7)
    return outcome(model, model.fit(texts, epochs=2, verbose=0, shuffle=False))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        x, y = rows(70)
        return x[index * 15 : (index + 1) * 15], y[index * 15 : (index + 1) * 15]


@case
def py_datasets(strategy):
    model = compiled(strategy, metrics=["accuracy"])
    return outcome(model, model.fit(Batches(), epochs=2, verbose=0))


@case
def single_batches(strategy):
    """Sizes chosen so that some ranks see a new shape when others do not."""
    x, y = rows()
    model = compiled(strategy, metrics=["accuracy"])
    logs = [model.train_on_batch(x[:n], y[:n]) for n in (16, 15, 16, 3, 1, 16)]
    return outcome(
        model,
        logs=np.array(logs),
        tested=model.test_on_batch(x[:11], y[:11]),
        predicted=model.predict_on_batch(x[:7]),
    )


@case
def compiled_twice_and_fitted_twice(strategy):
    """The second time outside the scope, for another kind of loss."""
    x, y = rows()
    model = compiled(strategy)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    model.fit(x, y, batch_size=20, epochs=1, verbose=0)
    model.layers[1].trainable = False
    model.compile(keras.optimizers.SGD(0.003, momentum=0.9), crossentropy(reduction="sum"))
    return outcome(model, model.fit(x, y, batch_size=16, epochs=1, verbose=0))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(12, activation="relu")
        self.outer = keras.layers.Dense(10)

    def call(self, x):
        return self.outer(self.inner(keras.ops.reshape(x, (-1, 64))))


class OwnStep(Subclassed):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


@case
def own_train_step(strategy):
    x, y = rows()
    model = compiled(strategy, seeded(OwnStep), metrics=["accuracy"])
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(model)


class Attending(keras.layers.Layer):
    """Makes its parts, and draws their seeds, where it is built."""

    def build(self, shape):
        self.kernel = self.add_weight(
            shape=(shape[-1], 6), initializer=lambda shape, dtype: np.random.normal(0, 0.3, shape)
        )
        self.outer = keras.layers.Dense(10)
        self.outer.build((None, 6))

    def call(self, x):
        return self.outer(keras.ops.matmul(x, self.kernel))


class OfWholeGraphs(keras.Model):
    """Is called with what is not in the batch, so that the first train step builds it."""

    def __init__(self):
        super().__init__()
        self.nodes = keras.ops.convert_to_tensor(flat(digits()[0][:75]).reshape(75, 64))
        self.first, self.last = keras.layers.Dense(8, activation="relu"), Attending()

    def call(self, inputs):
        nodes, others = inputs
        return self.last(self.first(nodes) + self.first(others))

    def train_step(self, data):
        places, y = data
        with tf.GradientTape() as tape:
            predicted = keras.ops.take(self([self.nodes, self.nodes]), places, 0)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(places, y, predicted)

    def test_step(self, data):
        places, y = data
        return self.compute_metrics(places, y, keras.ops.take(self([self.nodes] * 2), places, 0))


@case
def layers_that_a_train_step_builds(strategy):
    found = {}
    for name, test in (("tried", "1"), ("not tried", "0")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DTK_SELF_TEST", test)
            outside = keras.metrics.SparseCategoricalAccuracy("accuracy")
            model = compiled(strategy, seeded(OfWholeGraphs), metrics=[outside])
            # Validation resets metrics that the train step counts with in the next epoch.
            history = model.fit(
                np.arange(75),
                rows()[1],
                batch_size=16,
                epochs=2,
                verbose=0,
                validation_split=0.2,
            )
        found |= {f"{what} {name}": value for what, value in outcome(model, history).items()}
    return found | {"drawn next": np.random.rand()}


@case
def layers_that_an_eager_train_step_builds(strategy):
    """What the trial of the step has counted must be forgotten, also by metrics that it builds."""
    keras.utils.set_random_seed(5)
    model = compiled(strategy, OfWholeGraphs, metrics=["accuracy"], run_eagerly=True)
    return outcome(model, model.fit(np.arange(75), rows()[1], batch_size=16, epochs=1, verbose=0))


class OfPairs(keras.metrics.Metric):
    """Counts pairs of rows, as the metric of Keras's guide: (B,) labels, (B, 1) predictions."""

    def __init__(self):
        super().__init__(name="pairs")
        # as a script calls its false negatives: Keras's wrappers keep a function there
        self.fn = self.add_variable((), "zeros", name="fn")

    def update_state(self, y_true, y_pred, sample_weight=None):
        found = keras.ops.argmax(y_pred, 1)[:, None] == keras.ops.cast(y_true, "int32")
        self.fn.assign_add(keras.ops.sum(keras.ops.cast(found, "float32")))

    def result(self):
        return self.fn


def spread(y_true, y_pred):
    return keras.ops.std(y_pred)


def never(y_true, y_pred):
    return keras.ops.sum(keras.ops.cast(y_pred > 1e6, "float32"))


class OfTwoNumbers(keras.metrics.Mean):
    """Has several results."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred)

    def result(self):
        return {"mean": super().result(), "square": super().result() ** 2}


class OwnTestStep(keras.Model):
    """Is tried before the first evaluation, too."""

    def test_step(self, data):
        return super().test_step(data)


def _metrics_of_whole_batches(strategy, eagerly):
    """The last batch has one row: the other workers have none to gather."""
    x, y = rows(33)

    def build():
        plain = small()
        return OwnTestStep(plain.inputs, plain.outputs)

    metrics = [OfPairs(), spread, never, OfTwoNumbers()]
    model = compiled(strategy, build, metrics=metrics, run_eagerly=eagerly)
    return outcome(model, model.fit(x, y, 16, 2, 0, validation_data=(x, y)))


@case
def metrics_of_whole_batches(strategy):
    return _metrics_of_whole_batches(strategy, False)


@case
def metrics_of_whole_batches_eagerly(strategy):
    return _metrics_of_whole_batches(strategy, True)


def overlap(y_true, y_pred):
    both, all_of = keras.ops.sum(y_true * y_pred), keras.ops.sum(y_true + y_pred)
    return 1 - 2 * dtk.layers.sum_over_batch(both) / dtk.layers.sum_over_batch(all_of)


def likeness(y_true, y_pred):
    """A contrastive loss: rows of a class should point to one side."""
    own = tf.math.l2_normalize(y_pred, 1)
    every, first = dtk.layers.gather_over_batch(own)
    classes = keras.ops.argmax(y_true, 1)
    of_all, _ = dtk.layers.gather_over_batch(classes)
    alike = classes[:, None] == of_all
    mine = tf.cast(of_all[first : first + tf.shape(classes)[0]] == classes, own.dtype)
    tf.debugging.assert_equal(mine, tf.ones_like(mine), "the order is that of ranks")
    logits = keras.ops.log_softmax(keras.ops.matmul(own, keras.ops.transpose(every)))
    return -keras.ops.sum(keras.ops.cast(alike, logits.dtype) * logits, 1)


class OwnLossOfAll(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = overlap(y, predicted) + tf.reduce_mean(likeness(y, predicted))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"both": loss}


@case
def losses_of_the_whole_batch(strategy):
    """The last batch has one row."""
    x, labels = rows(33)
    y = (labels[:, None] == np.arange(10)).astype("float32")
    found = {}
    for name, loss in {"dice": keras.losses.Dice(), "rows": likeness, "step": None}.items():

        def build(kind=OwnLossOfAll if loss is None else keras.Model):
            keras.utils.set_random_seed(5)
            x = keras.Input((8, 8, 1))
            dense = keras.layers.Dense(10, "softmax")
            return kind(x, dense(keras.layers.Flatten()(x)))

        optimizer = keras.optimizers.Adam(0.01)
        metrics = None if loss is None else [overlap]
        model = compiled(strategy, build, loss=loss, metrics=metrics, optimizer=optimizer)
        history = model.fit(x, y, 16, 1, 0, shuffle=False)
        found |= {f"{name} {key}": value for key, value in outcome(model, history).items()}
    return found


def per_positive(y_true, y_pred):
    """A focal loss, divided by the positives of the batch; the first rows have none."""
    positive = tf.cast(y_true, y_pred.dtype)[:, :1] * tf.ones_like(y_pred[:, :1])
    loss = tf.square(y_pred[:, :1] - positive) * (1.0 + 3.0 * positive)
    return tf.reduce_sum(loss) / tf.maximum(tf.reduce_sum(positive), 1.0)


def per_positive_or_zero(y_true, y_pred):
    """A quotient of two sums, which both are 0 in the first rows."""
    positive = tf.cast(y_true, y_pred.dtype)[:, :1]
    loss = tf.square(y_pred[:, :1] - 2.0) * positive
    return tf.math.divide_no_nan(tf.reduce_sum(loss), tf.reduce_sum(positive))


class PerPositive(keras.losses.Loss):
    """One value for each row, from a number of the whole batch."""

    def call(self, y_true, y_pred):
        positive = tf.cast(y_true, y_pred.dtype)[:, 0]
        return tf.square(y_pred[:, 0] - 2.0) * positive / (tf.reduce_max(positive) + 1.0)


def root_mean_square(y_true, y_pred):
    return tf.sqrt(tf.reduce_mean(tf.square(y_pred - tf.cast(y_true, y_pred.dtype))))


class OwnCall(keras.losses.MeanSquaredError):
    """Adds a number of the whole batch to that of Keras."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return super().__call__(y_true, y_pred, sample_weight) + root_mean_square(y_true, y_pred)


def of_chosen(y_true, y_pred):
    """A mean over rows that a mask chooses: all of the first ones."""
    chosen = tf.boolean_mask(tf.square(y_pred[:, 0]), y_true[:, 0] < 0.5)
    return tf.reduce_mean(chosen)


class OwnComputeLoss(keras.Model):
    """Counts a metric in its loss, and adds a penalty."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted = keras.metrics.Sum(name="counted")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.counted.update_state(y)
        loss = tf.cast(per_positive(y, y_pred), "float32")
        return loss + 0.01 * tf.reduce_sum(tf.square(self.weights[0]))


class OwnStepOfLosses(keras.Model):
    """Calls one loss twice."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            p = self(x, training=True)
            loss = self.compute_loss(x, y, p) + self.compute_loss(x, tf.ones_like(y), 0.5 * p)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


WHOLE_LOSSES = {
    "positives": per_positive,
    "zeros": per_positive_or_zero,
    "rows": PerPositive(),
    "root": root_mean_square,
    "chosen": of_chosen,
    "call": OwnCall(),
    "cosine": keras.losses.CosineSimilarity(axis=0),
    "circle": keras.losses.Circle(),
    "step": root_mean_square,
    "method": None,
    "weighed": per_positive,
}


def losses_computed_on_the_batch(strategy, dtype="float32", names=tuple(WHOLE_LOSSES)):
    """No rows of the first batch are positive, nor of the last one, which has one row."""
    x, _ = rows(33)
    y = np.zeros((33, 1), "float32")
    y[[12, 18, 19, 20, 30]] = 1.0
    found = {}
    kinds = {"step": OwnStepOfLosses, "method": OwnComputeLoss}
    for name in names:
        loss = WHOLE_LOSSES[name]
        of_name = kinds.get(name, keras.Model)

        def build(kind=of_name):
            keras.utils.set_random_seed(5)
            x = keras.Input((8, 8, 1))
            flat = keras.layers.Flatten()(x)
            return kind(x, keras.layers.Dense(2, "tanh", dtype=dtype)(flat))

        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        along = [keras.metrics.PearsonCorrelation(axis=0)] if name == "cosine" else None
        model = compiled(strategy, build, loss=loss, metrics=along, optimizer=optimizer)
        weights = 1.0 + np.arange(33) % 3 if name == "weighed" else None
        labels = y[:, 0] if name == "circle" else y
        history = model.fit(x, labels, 8, 2, 0, shuffle=False, sample_weight=weights)
        found |= {f"{name} {key}": value for key, value in outcome(model, history).items()}
    return found


@case
def losses_that_do_not_add_up(strategy):
    names = ("positives", "rows", "chosen", "weighed")
    return losses_computed_on_the_batch(strategy, names=names)


@case
def losses_between_rows_and_of_own_steps(strategy):
    names = ("call", "cosine", "circle", "step", "method")
    return losses_computed_on_the_batch(strategy, names=names)


@case
def more_losses_that_do_not_add_up(strategy):
    return losses_computed_on_the_batch(strategy, names=("zeros", "root"))


@case
def some_losses_that_do_not_add_up(strategy):
    """What gathers rows, weights and labels, which goes another way between processes."""
    return losses_computed_on_the_batch(strategy, names=("rows", "step", "weighed"))


@case
def losses_that_do_not_add_up_in_float16(strategy):
    return losses_computed_on_the_batch(strategy, "mixed_float16")


class Centering(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(dtk.layers.gather_over_batch(x)[0], 0)


@case
def a_layer_of_the_whole_batch(strategy):
    """Of the last batch one worker has no rows, in predict, too."""
    x, y = rows(33)

    def build():
        keras.utils.set_random_seed(5)
        # Centering takes a bias away: its gradient would be rounding.
        dense = keras.layers.Dense(8, use_bias=False)
        layers = [keras.layers.Flatten(), dense, Centering()]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])

    model = compiled(strategy, build, loss=crossentropy())
    history = model.fit(x, y, 16, 1, 0, shuffle=False)
    return outcome(model, history, predicted=model.predict(x, 16, 0))


class StepFunction(Subclassed):
    """A train step and a helper of it that are functions of TensorFlow's already."""

    @tf.function
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.of_rows(y, predicted)
            if tf.reduce_sum(loss) > -1.0:  # converted, as TensorFlow would
                weights = np.full(10, 0.5, "float32")
                loss += self.times(1, self.weighed(predicted**2, weights=weights))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.compute_metrics(x, y, predicted) | {"own": loss}

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)] * 2)
    def times(self, factor, value):
        """A tensor by its signature, whatever Python number it is given."""
        return value * tf.ones([], factor.dtype) * factor

    @tf.function
    def weighed(self, values, *, weights):
        """NumPy arrays arrive as tensors."""
        return tf.reduce_mean(values * tf.reshape(weights, [1, weights.shape.num_elements()]))

    @tf.function
    def of_rows(self, y, predicted):
        losses = keras.losses.sparse_categorical_crossentropy(y, predicted, from_logits=True)
        return tf.reduce_mean(losses)


@case
def own_train_step_that_is_a_function(strategy):
    x, y = rows()
    model = compiled(strategy, seeded(StepFunction), metrics=["accuracy"])
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


class Paired(Subclassed):
    """Takes three unlabelled rows beside each labelled one."""

    def train_step(self, data):
        more, (x, y) = data
        with tf.GradientTape() as tape:
            of_more = tf.reduce_mean(self(more, training=True) ** 2)
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True)) + of_more
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "of more": of_more}


@case
def zipped_batches_of_other_sizes(strategy):
    x, y = rows(45)
    from_rows = tf.data.Dataset.from_tensor_slices
    labelled = from_rows((x[:15], y[:15])).batch(4)  # the last has three rows
    model = compiled(strategy, seeded(Paired))
    zipped = tf.data.Dataset.zip((from_rows(x).batch(12), labelled))
    return outcome(model, model.fit(zipped, epochs=2, shuffle=False, verbose=0))


class OwnLog(Subclassed):
    """Logs losses as they are, as numbers of this batch, and records one, as Keras's guide does."""

    def __init__(self):
        super().__init__()
        self.recorded = keras.metrics.Mean(name="recorded")
        self.square = keras.losses.MeanSquaredError(reduction="sum")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted)
            square = self.square(tf.one_hot(y, 10), predicted)
            loss += 0.01 * square
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.recorded.update_state(loss)
        right = tf.reduce_mean(tf.cast(tf.equal(y, tf.argmax(predicted, 1)), "float32"))
        recorded = self.recorded.result()
        integers = {
            "rows": tf.shape(x)[0],
            "nines": tf.math.count_nonzero(y == 9),  # of the first rows there is none
            "seven": tf.constant(7),
        }
        return {"loss": loss, "square": square, "right": right, "recorded": recorded, **integers}


@case
def own_train_step_that_logs_numbers(strategy):
    """Each is the global batch's: not one worker's, nor its share of it, nor their mean."""

    x, y = rows()
    logged = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: logged.append(logs))
    outcomes = {}
    for reduction in ("sum_over_batch_size", "sum"):
        optimizer = keras.optimizers.SGD(0.001, momentum=0.9)
        model = compiled(
            strategy, seeded(OwnLog), loss=crossentropy(reduction=reduction), optimizer=optimizer
        )
        fitted = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[note])
        outcomes |= {f"{reduction} {name}": v for name, v in outcome(model, fitted).items()}
    for name in logged[0]:
        outcomes[name] = np.array([float(logs[name]) for logs in logged])
    return outcomes


class OwnLoss(Subclassed):
    def __init__(self):
        super().__init__()
        self.outer.kernel_regularizer = keras.regularizers.L2(0.1)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@case
def own_train_step_that_logs_its_loss_eagerly(strategy):
    x, y = rows(9)
    keras.utils.set_random_seed(5)
    model = compiled(strategy, OwnLoss, run_eagerly=True)
    # Not fit, whose history takes {"loss": ...} for the loss tracker, which this never updates.
    logs = [model.train_on_batch(x[start:], y[start:], return_dict=True) for start in (0, 2, 8)]
    return outcome(model, logged=np.array([float(log["loss"]) for log in logs]))


class Adversaries(keras.Model):
    """Two optimizers, an attribute and one of a dict, set by an overridden compile."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = keras.layers.Dense(64), keras.layers.Dense(1)
        self.distance = keras.metrics.Mean(name="distance")

    def build(self, shape):
        self.generator.build((None, 64))
        self.critic.build((None, 64))
        self.built = True

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile(loss=None)
        self.generator_optimizer = generator_optimizer
        self.others = {"critic": critic_optimizer}

    def train_step(self, data):
        real = tf.reshape(data, (-1, 64))
        loss_of = keras.losses.MeanSquaredError()
        for optimizer, layer, sign in (
            (self.others["critic"], self.critic, 1.0),
            (self.generator_optimizer, self.generator, -1.0),
        ):
            with tf.GradientTape() as tape:
                fake = self.generator(real)
                loss = sign * (
                    loss_of(tf.ones_like(real[:, :1]), self.critic(real))
                    + loss_of(tf.zeros_like(real[:, :1]), self.critic(fake))
                )
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        self.distance.update_state(tf.norm(real - fake, axis=1))
        return {"distance": self.distance.result()}


@case
def variables_divided_among_optimizers(strategy):
    """`MultiOptimizer`, clipping and accumulating in parts; the second is known once it is built.

    Breaks when each optimizer that it applies sums gradients again.
    """
    optimizers = keras.optimizers
    x, y = rows()
    first = optimizers.MultiOptimizer(
        optimizers.OptimizerMap(
            optimizers.SGD(0.05, global_clipnorm=0.2),
            {".*kernel": optimizers.Adam(0.01, gradient_accumulation_steps=2)},
        )
    )
    made = {}

    def choose(variable):
        return made.setdefault(len(variable.shape), optimizers.SGD(0.05, momentum=0.9))

    second = optimizers.LossScaleOptimizer(optimizers.MultiOptimizer(choose), initial_scale=8.0)
    results = {}
    for name, optimizer in (("weights", first), ("found while building", second)):
        model = compiled(strategy, optimizer=optimizer)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        results[name] = flat(model.get_weights())
    return results


@case
def model_and_divided_optimizer_from_outside(strategy):
    """Its look-up of which optimizer has which variable goes by where a variable is stored."""
    optimizers = keras.optimizers
    model = small()
    optimizer = optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.05), {".*kernel": optimizers.Adam(0.01)})
    )
    optimizer.build(model.trainable_variables)
    with scope_of(strategy):
        model.compile(optimizer=optimizer, loss=crossentropy())
    x, y = rows()
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0))


@case
def layers_in_float8(strategy):
    """Their scales come as gradients, and are to replace what was there: no sum is.

    Breaks as scales that double with every step, and as an error with accumulation.
    """
    x, y = rows()
    results = {}
    for steps in (None, 2):

        def build():
            model = small()
            model.layers[-1].quantize("float8")
            return model

        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=steps)
        model = compiled(strategy, build, optimizer=optimizer)
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        results |= {
            f"{i} {v.name} {steps}": v.numpy()
            for i, v in enumerate(model.layers[-1].trainable_variables)
        }
    return results


class WithUnused(Subclassed):
    """Has a layer that nothing comes of, whose variables have no gradients."""

    def __init__(self):
        super().__init__()
        self.unused = keras.layers.Dense(3)

    def call(self, x):
        x = keras.layers.Flatten()(x)
        self.unused(x)
        return self.outer(self.inner(x))


@case
def accumulation_beside_variables_without_gradients(strategy):
    """Breaks when the gradients of a window are taken for those of all variables."""
    x, y = rows()
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)

    model = compiled(strategy, seeded(WithUnused), optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        return outcome(model, model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0))


@case
def two_optimizers(strategy):
    x, _ = rows()
    keras.utils.set_random_seed(5)
    with scope_of(strategy):
        model = Adversaries()
        model.build((None, 8, 8, 1))
        # Neither is the one Keras builds: both are built by their first step.
        second = keras.optimizers.SGD(0.01, clipnorm=0.1, gradient_accumulation_steps=2)
        model.compile(keras.optimizers.Adam(0.01), second)
    return outcome(model, model.fit(x, batch_size=16, epochs=2, verbose=0))


@case
def schedules_and_names(strategy):
    x, y = rows()
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.7)
    first = compiled(strategy, optimizer=keras.optimizers.SGD(decay, nesterov=True, momentum=0.8))
    first.fit(x, y, batch_size=16, epochs=2, verbose=0)
    second = compiled(strategy, optimizer="rmsprop")
    history = second.fit(x, y, batch_size=16, epochs=2, verbose=0)
    both = flat(first.get_weights() + second.get_weights())
    return {"weights": both, "loss": history.history["loss"]}


@case
def fewer_rows_than_workers(strategy):
    """Two rows over three workers, and one over two: the last one's slice is empty."""
    x, y = rows(9)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=1.0)
    # The accuracy of a few rows may be the same with a row more.
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)]
    model = compiled(strategy, metrics=metrics, optimizer=optimizer)
    seen = []
    watching = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append([float(v) for v in logs.values()])
    )
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False, callbacks=[watching])
    return outcome(
        model,
        history,
        logged=np.array(seen),  # when an epoch ends, metrics are read once more
        one_row=model.predict(x[:1], verbose=0),  # a slice is empty with two workers, too
    )


@case
def saved_and_loaded(strategy):
    """Weights and optimizer state survive Keras's own format."""
    import tempfile

    x, y = rows()
    model = compiled(strategy)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        with scope_of(strategy):
            again = keras.models.load_model(f"{folder}/model.keras")
            again.compile(optimizer=again.optimizer, loss=crossentropy())
    return outcome(again, again.fit(x, y, batch_size=16, epochs=1, verbose=0))


class Lengths(keras.layers.Layer):
    """Sum and sum of squares of rows of different lengths."""

    def call(self, x):
        return tf.stack([tf.reduce_sum(x, 1), tf.reduce_sum(x * x, 1)], 1)

    def compute_output_shape(self, shape):
        return (shape[0], 2)


class Doubled(keras.Model):
    def call(self, x):
        return tf.ragged.map_flat_values(lambda values: 2 * values, x)


@case
def ragged_inputs_and_outputs(strategy):
    random = np.random.default_rng(0)
    lengths = random.integers(0, 6, 37)
    values = random.normal(size=lengths.sum()).astype("float32")
    x, y = tf.RaggedTensor.from_row_lengths(values, lengths), random.integers(0, 3, 37)

    @seeded
    def build():
        inputs = keras.Input((None,), ragged=True)
        return keras.Sequential([inputs, Lengths(), keras.layers.Dense(3)])

    model = compiled(strategy, build, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    doubled = compiled(strategy, Doubled).predict(dataset, verbose=0)
    assert isinstance(doubled, tf.RaggedTensor)
    return outcome(
        model,
        history,
        predicted=model.predict(dataset, verbose=0),
        doubled=doubled.values.numpy(),
        lengths=doubled.row_lengths().numpy(),
    )


@case
def sparse_inputs(strategy):
    random = np.random.default_rng(0)
    dense = random.normal(size=(37, 20)) * (random.uniform(size=(37, 20)) < 0.2)
    x, y = tf.sparse.from_dense(dense.astype("float32")), random.integers(0, 3, 37)

    @seeded
    def build():
        return keras.Sequential([keras.layers.Dense(3)])  # not yet built

    # Not Adam: it squares the slices of a gradient one by one, and two workers may have one each of
    # the same row, where one process has their sum.
    model = compiled(strategy, build, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    history = model.fit(dataset, epochs=2, verbose=0, shuffle=False)
    return outcome(model, history, predicted=model.predict(dataset, verbose=0))


@case
def generators(strategy):
    """One without an end, then one that has an end."""

    def batches(epochs=1):
        x, y = rows(70)
        for start in [*range(0, 70, 15)] * epochs:
            yield x[start : start + 15], y[start : start + 15]

    model = compiled(strategy, metrics=["accuracy"])
    history = model.fit(batches(9), epochs=2, steps_per_epoch=5, verbose=0, shuffle=False)
    with warnings.catch_warnings():  # Keras's, that the data has an end
        warnings.simplefilter("ignore")
        model.fit(batches(), verbose=0, shuffle=False)
        evaluated = model.evaluate(batches(), verbose=0)
    return outcome(model, history, evaluated=evaluated)


@case
def averages_that_overwrite_weights(strategy):
    x, y = rows()
    model = compiled(
        strategy,
        optimizer=keras.optimizers.Adam(
            0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
        ),
    )
    return outcome(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


@case
def gathered_rows(strategy):
    """`strategy.gather` in a loop of one's own: the rows of all replicas, in order."""
    x = np.arange(14.0).reshape(7, 2)
    if strategy is None:
        return {"rows": 2 * x, "columns": np.concatenate([x.sum(0)[None]] * 2, 1)}
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(x))
    (batch,) = dataset

    def columns(mine):
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(mine, 0))
        # Along axis 1: two blocks in all, whoever has them.
        context = tf.distribute.get_replica_context()
        blocks = tf.cast(int(context.replica_id_in_sync_group) < 2, tf.int32)
        return tf.tile(total[None], [1, blocks])

    doubled = strategy.run(lambda mine: 2 * mine, args=(batch,))
    wide = tf.function(lambda: strategy.run(columns, args=(batch,)))()
    return {
        "rows": strategy.gather(doubled, axis=0).numpy(),
        "columns": strategy.gather(wide, axis=1).numpy(),
    }


@case
def two_models_compiled_in_one_scope(strategy):
    x, y = rows()
    with scope_of(strategy):
        models = [small(seed=3), small(seed=4)]
        for model in models:
            model.compile(optimizer=keras.optimizers.Adam(0.01), loss=crossentropy())
    for _ in range(2):
        for model in models:
            model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    return {"weights": flat([w for model in models for w in model.get_weights()])}


@case
def lists_of_inputs_and_positional_arguments(strategy):
    @seeded
    def build():
        inputs = [keras.Input((8, 8, 1)), keras.Input((1,))]
        hidden = keras.layers.Flatten()(inputs[0]) * inputs[1]
        return keras.Model(inputs, keras.layers.Dense(10)(hidden))

    x, y = rows(37)
    both = [x, np.linspace(0.5, 1.5, len(x), dtype="float32")[:, None]]
    model = compiled(strategy, build, metrics=["accuracy"])
    history = model.fit(both, y, 16, 2, 0)
    logs = model.train_on_batch([part[:5] for part in both], y[:5])
    return outcome(
        model,
        history,
        logs=np.array(logs),
        evaluated=model.evaluate(both, y, 8, 0),
        predicted=model.predict(both, 4, 0),
        predicted_batch=model.predict_on_batch([part[:3] for part in both]),
    )


@case
def metrics_made_outside_the_scope(strategy):
    x, y = rows(37)
    kinds = keras.metrics.MeanAbsoluteError, keras.metrics.AUC, keras.metrics.Recall
    metrics = [kind(name=kind.__name__.lower()) for kind in kinds]

    def build():
        return keras.Sequential([small(), keras.layers.Dense(1, activation="sigmoid")])

    model = compiled(strategy, build, loss="binary_crossentropy", metrics=metrics)
    history = model.fit(x, y % 2, batch_size=8, epochs=2, verbose=0, validation_data=(x, y % 2))
    return outcome(model, history, evaluated=model.evaluate(x, y % 2, verbose=0))
