"""Metrics of a script's own: which add up over the rows of workers, and which are told."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from dtk.compat import keras_models
from dtk.trainer.replica import metric_trial

RNG = np.random.default_rng(5)
# Labels that no prediction hits, as in a model that has learnt nothing.
LABELS = np.arange(9)
PREDICTED = np.eye(10, dtype="float32")[9 - LABELS] + RNG.uniform(0, 0.1, (9, 10)).astype("float32")


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


RIGHT = {
    "a count": lambda: Counter(lambda total, y, p: total + ops.sum(hits(y, p))),
    "integers": lambda: Counter(counted_by_class, shape=(10,), dtype="int32"),
    "a mean": lambda: OfMean(name="counter"),
    "a function": lambda: keras.metrics.MeanMetricWrapper(hits, name="counter"),
    "a mean of the rows": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: ops.mean(hits(y, p)), name="counter"
    ),
}
WRONG = {
    "pairs of rows": lambda: Counter(lambda total, y, p: total + ops.sum(pairs(y, p))),
    "a maximum": lambda: Counter(lambda total, y, p: ops.maximum(total, ops.max(p))),
    "a minimum": lambda: Counter(lambda total, y, p: ops.minimum(total, -ops.max(p))),
    "the last row": lambda: Counter(lambda total, y, p: p[-1, 0] + 1),
    "the last batch": lambda: Counter(lambda total, y, p: ops.sum(p)),
    "a median": lambda: Counter(lambda total, y, p: total + ops.median(p)),
    "batches": lambda: Counter(lambda total, y, p: total + 1),
    "what was counted before": lambda: Counter(
        lambda total, y, p: total + ops.sum(ops.abs(ops.max(p, 1) - total))
    ),
    "not a sum": lambda: Counter(lambda total, y, p: total + ops.sum(p), aggregation="mean"),
    "a function of the batch": lambda: keras.metrics.MeanMetricWrapper(
        lambda y, p: hits(y, p) * ops.mean(hits(y, p)), name="counter"
    ),
}


def note_of(metric, rows=5, labels=LABELS):
    given = labels[:rows], PREDICTED[:rows]
    call = metric_trial.Call(metric, given, {"sample_weight": None})
    before = [v.numpy().tolist() for v in metric.variables]
    counting = metric_trial.Counting(keras.Sequential(), {}, 1e-4)
    doubts = metric_trial.doubts_of([call], rows, counting)
    assert before == [v.numpy().tolist() for v in metric.variables]
    return "".join(doubt.told(cured=False) for doubt in doubts)


@pytest.mark.parametrize("rows", [3, 4, 5, 9])
@pytest.mark.parametrize("name", RIGHT)
def test_what_adds_up_is_not_told(name, rows):
    """Breaks where parts are weighed by other shares than theirs."""
    assert note_of(RIGHT[name](), rows) == ""


@pytest.mark.parametrize("name", ["a count", "a maximum"])
def test_where_an_epoch_has_left_it_says_nothing(name):
    """Keras counts every epoch from zero."""
    metric = {**RIGHT, **WRONG}[name]()
    fresh = note_of(metric)
    metric.total.assign(1000.0)
    assert note_of(metric) == fresh


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_add_up_is_told_also_where_the_model_hits_nothing(name):
    """Breaks as half of what one process logs, and no word."""
    assert hits(LABELS, PREDICTED).numpy().sum() == 0
    note = note_of(WRONG[name]())
    assert note.startswith("'counter' is neither a mean nor a sum over rows (")
    assert "(5,), (5, 10)" in note and "model.predict(x)" in note


def test_what_would_help_is_named():
    assert "self.total.assign_add(ops.sum(values))" in note_of(WRONG["pairs of rows"]())
    assert 'aggregation="sum"' in note_of(WRONG["not a sum"]())
    assert "one number for each row" in note_of(WRONG["a function of the batch"]())


def test_pairs_of_rows_are_named_where_one_argument_has_fewer_axes():
    batches = WRONG["batches"]
    assert "for each pair of rows, as y_true == y_pred[:, None]" in note_of(batches())
    same = note_of(batches(), labels=np.eye(10)[LABELS])
    assert same.startswith("'counter' is neither") and "pair of rows" not in same


def test_what_never_moves_cannot_be_told():
    never = Counter(lambda total, y, p: total + ops.sum(ops.cast(p > 9, "float32")))
    assert "stays 0 on all rows of a trial, which shows nothing" in note_of(never)


def test_a_quotient_that_stays_0_cannot_be_told_either():
    """It was 0 / 0 before, which is no other number."""

    class Rate(Counter):
        def result(self):
            return self.total[0] / self.total[1]

    def counts(total, y, p):
        return total + ops.stack([ops.sum(ops.cast(p > 9, "float32")), ops.cast(len(p), "float32")])

    assert "shows nothing" in note_of(Rate(counts, shape=(2,)))


def test_one_that_fails_is_told_and_ends_nothing():
    def of_three(total, y, p):
        raise ValueError("three rows, please")

    told = "'counter' could not be tried on other rows (ValueError: three rows, please)"
    assert note_of(Counter(of_three)).startswith(told)


def test_calls_that_are_not_of_rows_are_left_to_the_trial():
    """Such as a loss, of which a step's trial finds the kind."""
    calls = [metric_trial.Call(WRONG["batches"](), (np.asarray(1.0), PREDICTED), {})]
    counting = metric_trial.Counting(keras.Sequential(), {}, 1e-4)
    assert metric_trial.doubts_of(calls, 5, counting) == []


def test_which_metrics_are_tried():
    own, function = RIGHT["a count"](), hits
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(10)])
    model.compile("sgd", "mse", metrics=[own, function, "mae", keras.metrics.MeanSquaredError()])
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 10)))
    assert [m.name for m in keras_models.foreign_metrics(model)] == ["counter", "hits"]
