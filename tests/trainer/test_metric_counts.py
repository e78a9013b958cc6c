"""Metrics of a script: which a graph shows to add up over workers, and what others are told."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import dtk
from dtk.compat import keras_models
from dtk.trainer.replica import self_test, step_trial
from dtk.trainer.tracing import traced_step


class Counter(keras.metrics.Metric):
    """A number, and what a batch makes of it."""

    def __init__(self, count, aggregation="sum", shape=(), dtype=None):
        super().__init__(name="counter")
        self.count = count
        self.total = self.add_variable(shape, "zeros", dtype, aggregation, "total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(self.count(self.total, y_true, y_pred))

    def result(self):
        return ops.sum(ops.cast(self.total, "float32"))


class OfMean(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(hits(y_true, y_pred), sample_weight)


def hits(y, p):
    return ops.cast(ops.cast(y, "int64") == ops.cast(ops.argmax(p, 1), "int64"), "float32")


def pairs(y, p):
    """As in Keras's guide: [rows] == [rows, 1]."""
    return ops.cast(ops.cast(y, "int64") == ops.cast(ops.argmax(p, 1)[:, None], "int64"), "float32")


def counted_by_class(total, y, p):
    return total + tf.math.bincount(tf.cast(ops.argmax(p, 1), tf.int32), minlength=10)


class Nested(keras.metrics.Metric):
    """Two of Keras's own, as scripts make an F1 of them."""

    def __init__(self):
        super().__init__(name="counter")
        self.precision, self.area = keras.metrics.Precision(), keras.metrics.AUC()

    def update_state(self, y_true, y_pred, sample_weight=None):
        for one in (self.precision, self.area):
            one.update_state(ops.one_hot(ops.cast(y_true, "int32"), 10), y_pred, sample_weight)

    def result(self):
        return self.precision.result() + self.area.result()


class OfScalars(keras.metrics.Metric):
    """A mean of Keras's inside, which is given one number for all rows."""

    def __init__(self):
        super().__init__(name="counter")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.mean.update_state(ops.mean(hits(y_true, y_pred)))

    def result(self):
        return self.mean.result()


class Rows(keras.metrics.Metric):
    """Hits and the number of rows, by several of Keras's ways to add."""

    def __init__(self, number):
        super().__init__(name="counter")
        self.number = number
        self.hits = self.add_variable((), "zeros", name="hits")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.hits.assign_add(ops.sum(hits(y_true, y_pred)))
        self.rows.assign(ops.cast(self.number(y_true), "float32") + self.rows)

    def result(self):
        return self.hits / self.rows


def confused(total, y, p):
    labels = tf.cast(y, tf.int32)
    return total + tf.math.confusion_matrix(labels, ops.argmax(p, 1), 10, dtype=tf.float32)


RIGHT = {
    "a count": lambda: Counter(lambda total, y, p: total + ops.sum(hits(y, p))),
    "integers": lambda: Counter(counted_by_class, shape=(10,), dtype="int32"),
    "a mean": lambda: OfMean(name="counter"),
    "a function": lambda: keras.metrics.MeanMetricWrapper(hits, name="counter"),
    "two inside": Nested,
    "a mean inside": OfScalars,
    "the size": lambda: Rows(ops.size),
    "the shape": lambda: Rows(lambda y: ops.shape(y)[0]),
    "classes before": lambda: Counter(lambda total, y, p: total + ops.sum(ops.cumsum(p, 1))),
    "by class": lambda: Counter(confused, shape=(10, 10)),
    "a quotient": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: ops.sum(hits(y, p)) / ops.sum(p), name="counter"
    ),
    "a mean of the rows": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: ops.mean(hits(y, p)), name="counter"
    ),
}
WRONG = {
    "a spread": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: ops.std(p), name="counter"
    ),
    "pairs of rows": lambda: Counter(lambda total, y, p: total + ops.sum(pairs(y, p))),
    "a maximum": lambda: Counter(lambda total, y, p: ops.maximum(total, ops.max(p))),
    "a minimum": lambda: Counter(lambda total, y, p: ops.minimum(total, -ops.max(p))),
    "the last row": lambda: Counter(lambda total, y, p: p[-1, 0] + 1),
    "a median": lambda: Counter(lambda total, y, p: total + ops.median(p)),
    "a share": lambda: Counter(lambda total, y, p: total * 0.9 + ops.sum(hits(y, p))),
    "instead": lambda: Counter(lambda total, y, p: ops.sum(hits(y, p))),
    "rows before": lambda: Counter(lambda total, y, p: total + ops.sum(ops.cumsum(hits(y, p)))),
    "batches": lambda: Counter(lambda total, y, p: total + 1),
    "not a sum": lambda: Counter(lambda total, y, p: total + ops.sum(p), aggregation="mean"),
    "a function of the batch": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: hits(y, p) * ops.mean(hits(y, p)), name="counter"
    ),
}


def uncounted(metric):
    """The metrics of which a step's graph does not show that they add up."""
    dtk.strategies.AllReduceStrategy("local")  # from the first on dtk sees what is assigned
    model, found = keras.Sequential(), []
    model.counted = metric

    def step(y, p):
        tracing = traced_step.Step(tf.ones([]), model, tf.identity, notes_losses=True)
        weighing = traced_step.weighing_by_rows()
        with weighing, traced_step.tracing(tracing), step_trial.noting_counts(model):
            metric.update_state(y, p)
        found.extend(step_trial.uncounted_in(tracing))

    specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 10])]
    tf.function(step, specs, autograph=False).get_concrete_function()
    return found


@pytest.mark.parametrize("name", RIGHT)
def test_what_adds_up_is_seen(name):
    """Breaks as rows that are gathered in each step, for nothing."""
    assert uncounted(RIGHT[name]()) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_counted_on_all_rows(name):
    """Breaks as half of what one process logs, and no word."""
    metric = WRONG[name]()
    assert uncounted(metric) == [metric]


def test_what_would_help_is_named():
    for name, words in {
        "pairs of rows": "self.total.assign_add(ops.sum(values))",
        "not a sum": 'aggregation="sum"',
        "a function of the batch": "one number for each row",
    }.items():
        told = self_test._told_of(WRONG[name](), is_gathered=False)
        assert told.startswith("nothing shows that 'counter' adds up") and words in told
        assert "model.predict(x)" in told


def test_which_metrics_are_looked_at():
    own, function = RIGHT["a count"](), hits
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    model.compile("sgd", "mse", metrics=[own, function, "mae", keras.metrics.MeanSquaredError()])
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 10)))
    assert [m.name for m in keras_models.foreign_metrics(model)] == ["counter", "hits"]
