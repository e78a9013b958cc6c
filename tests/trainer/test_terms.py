"""What a loss is made of, and what each part of it is found to be."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.trainer.replica import comparing, self_test, step_metrics, step_trial
from dtk.trainer.tracing import loss_terms, row_dependence, traced_step

ROWS = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0], [2.0, 2.0], [-3.0, 1.0]], "float32")


def of(function):
    """(coefficient, op) of each term of a scalar of a graph."""

    @tf.function(autograph=False)
    def coefficients(x):
        found = loss_terms.linear_terms(function(x), set())
        ops.extend(term.op.type for _, term in found)
        return [tf.convert_to_tensor(c) for c, _ in found]

    ops: list = []
    values = coefficients(tf.constant(ROWS))
    return sorted(zip(map(float, values), ops, strict=True))


def ends(x):
    return [tf.reduce_max(x), tf.reduce_min(x)]


@pytest.mark.parametrize(
    "loss, expected",
    [
        (lambda x: tf.reduce_mean(x), [(1.0, "Mean")]),
        (lambda x: tf.reduce_mean(x) - 2 * tf.reduce_sum(x), [(-2.0, "Sum"), (1.0, "Mean")]),
        (lambda x: tf.add_n(ends(x)) / 4, [(0.25, "Max"), (0.25, "Min")]),
        (lambda x: tf.reduce_sum(ends(x)), [(1.0, "Max"), (1.0, "Min")]),
        (lambda x: tf.reduce_mean(ends(x)), [(0.5, "Max"), (0.5, "Min")]),
        (lambda x: -tf.sqrt(tf.reduce_mean(x)), [(-1.0, "Sqrt")]),
        (lambda x: tf.reduce_sum(x) * tf.reduce_mean(x), [(1.0, "Mul")]),
        (lambda x: tf.reduce_sum(x) / tf.reduce_sum(x * x), [(1.0, "RealDiv")]),
    ],
)
def test_a_loss_is_followed_to_what_enters_it_linearly(loss, expected):
    assert of(loss) == expected


@pytest.mark.parametrize(
    "values, chosen",
    [
        (lambda x: tf.boolean_mask(x[:, 0], x[:, 1] > 0), True),
        (lambda x: tf.boolean_mask(x, x[:, 1] > 0), True),
        (lambda x: tf.dynamic_partition(x, tf.cast(x[:, 1] > 0, tf.int32), 2)[1], True),
        (lambda x: tf.boolean_mask(x, [True, False], axis=1)[:, 0], False),
        (lambda x: tf.where(x > 0, x, 0), False),
        (
            lambda x: tf.scatter_nd(tf.where(x[:, 1] > 0), tf.ones(2), tf.shape(x, tf.int64)[:1]),
            False,
        ),
    ],
)
def test_values_that_a_mask_keeps(values, chosen):
    """They are not one for each row, so a rank's mean counts with as many as it has kept."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    def traced(x):
        graph = tf.compat.v1.get_default_graph()
        found.append(row_dependence.are_chosen(values(x), graph))
        return x

    traced(ROWS)
    assert found[0] == chosen


def outcome(values, numerators=None, denominators=None):
    """Of one term, on each replica."""
    nothing = [np.nan] * len(values)
    table = np.array([values, numerators or nothing, denominators or nothing]).T
    return step_trial.Outcome({"loss 0": table}, {}, {}, {})


SHARES = np.array([0.6, 0.4])


@pytest.mark.parametrize(
    "whole, parts, kind",
    [
        (([2.0],), ([3.0, 0.5],), None),  # .6 * 3 + .4 * .5
        (([3.5],), ([3.0, 0.5],), "sum"),
        (([3.0],), ([3.0, 3.0],), None),  # a regularizer
        (([0.7], [7.0], [10.0]), ([1.0, 0.5], [4.0, 3.0], [4.0, 6.0]), "ratio"),
        (([0.5], [5.0], [10.0]), ([0.5, 0.5], [3.0, 2.0], [6.0, 4.0]), "ratio"),
    ],
)
def test_kinds(whole, parts, kind):
    kinds, unclear, odd = comparing.kinds_of(outcome(*whole), outcome(*parts), SHARES, 1e-3)
    assert (kinds.get("loss 0"), unclear, odd) == (kind, [], [])


def test_what_is_neither_is_told_with_its_numbers():
    kinds, unclear, (odd,) = comparing.kinds_of(outcome([9.0]), outcome([3.0, 0.5]), SHARES, 1e-3)
    assert not kinds and not unclear
    assert "loss 0 is 9 on all rows and 3, 0.5 on the parts" in odd
    assert "neither a mean (2) nor a sum (3.5)" in odd


def test_what_is_not_a_number_is_told_as_that():
    """Breaks as a difference of nan %."""
    whole, parts = (
        step_trial.Outcome({}, {"bias": np.ones(2), "kernel": np.array([value])}, {}, {})
        for value in (1.0, np.nan)
    )
    wrong = comparing.compare(whole, parts, 1e-3).wrong
    assert wrong.startswith("the gradient of 'kernel' is not a number on all rows or on a part")


def test_zero_tells_nothing():
    nothing = outcome([0.0]), outcome([0.0, 0.0]), SHARES, 1e-3
    assert comparing.kinds_of(*nothing)[:2] == ({}, ["loss 0"])
    assert comparing.kinds_of(*nothing, {"loss 0"})[:2] == ({"loss 0": "sum"}, []), "by its graph"


@pytest.mark.parametrize(
    "log, is_sum",
    [
        (lambda x: tf.math.count_nonzero(x > 9), True),
        (lambda x: tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 9)), True),
        (lambda x: tf.reduce_mean(x), False),
        (lambda x: tf.reduce_sum(tf.reduce_mean(x, 0)), False),
        (lambda x: tf.reduce_sum(tf.constant([1, 2])), False),
    ],
)
def test_a_log_is_a_sum_by_its_graph(log, is_sum):
    """A count that is zero for the first rows was logged as a mean ever after."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])], autograph=False)
    def traced(x):
        step = traced_step.Step(tf.ones([]), None, tf.identity)
        step_metrics.numbers_of(step, {"log": log(x)})
        found.append(step_trial.shown_sums(step))
        return x

    traced(ROWS)
    assert bool(found[0]) == is_sum


@pytest.mark.parametrize("asked, said, wanted", [
    ("auto", "", "auto"), (False, "", False), (True, "0", False), (False, "1", True),
    ("auto", "only", "only"),
])  # fmt: skip
def test_the_environment_overrules_the_strategy(monkeypatch, asked, said, wanted):
    monkeypatch.setenv("DTK_SELF_TEST", said)
    assert self_test.is_wanted(asked) == wanted


def test_other_words_are_refused(monkeypatch):
    monkeypatch.setenv("DTK_SELF_TEST", "maybe")
    with pytest.raises(ValueError, match="self_test='maybe'; expected True, False or 'auto'"):
        self_test.is_wanted("auto")


def focal(y, p):
    return tf.reduce_sum(tf.square(y - p) * y)


def mean_of_chosen(p, kept):
    chosen = tf.boolean_mask(p, kept)
    return tf.reduce_sum(chosen**2) / tf.cast(tf.size(chosen), tf.float32)


def shown_to_add_up():
    yield "a mean", lambda y, p: tf.reduce_mean(tf.square(y - p))
    yield "a mean of means", lambda y, p: tf.reduce_mean(tf.reduce_mean(tf.abs(y - p), -1))
    yield "a sum", lambda y, p: tf.reduce_sum(tf.abs(y - p))
    yield "a sum by the rows", lambda y, p: focal(y, p) / tf.cast(tf.shape(y)[0], tf.float32)
    yield "one for each row", lambda y, p: tf.reduce_mean(tf.square(y - p), -1)
    yield "sums over rows first", lambda y, p: tf.reduce_mean(tf.reduce_sum(y * p, 0))
    yield "a quotient", lambda y, p: focal(y, p) / tf.reduce_sum(y)
    yield "a quotient or zero", lambda y, p: tf.math.divide_no_nan(focal(y, p), tf.reduce_sum(y))
    yield "several", lambda y, p: 0.5 * focal(y, p) + 2.0 * tf.reduce_mean(tf.abs(p)) - 1.0
    yield "a sum of chosen", lambda y, p: tf.reduce_sum(tf.boolean_mask(p, y > 0))
    yield "row by row", lambda y, p: tf.reduce_mean(tf.reduce_max(p, -1) / tf.norm(y, axis=-1))


def not_shown():
    yield "positives, or one", lambda y, p: focal(y, p) / tf.maximum(tf.reduce_sum(y), 1.0)
    yield "positives and one", lambda y, p: focal(y, p) / (tf.reduce_sum(y) + 1.0)
    yield "weights that sum to one", lambda y, p: tf.reduce_sum(y / tf.reduce_sum(y) * p)
    yield "by the largest", lambda y, p: tf.reduce_mean(p / tf.reduce_max(y), -1)
    yield "a root", lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p)))
    yield "a mean by a mean", lambda y, p: tf.reduce_mean(y * p) / tf.reduce_mean(y)
    yield "a mean of chosen", lambda y, p: tf.reduce_mean(tf.boolean_mask(p, y > 0))
    yield "a branch", lambda y, p: tf.cond(tf.reduce_sum(y) > 1, lambda: focal(y, p), lambda: 0.0)
    yield "by class", lambda y, p: tf.reduce_mean(tf.reduce_sum(y * p, 0) / tf.reduce_sum(p, 0))
    yield "a largest", lambda y, p: tf.reduce_max(tf.abs(y - p))
    yield "by the size of chosen", lambda y, p: mean_of_chosen(p, y > 0)
    yield "pairs of rows", lambda y, p: tf.reduce_mean(tf.nn.relu(p @ tf.transpose(y)), -1)
    yield "centred", lambda y, p: tf.reduce_mean(tf.square(p - tf.reduce_mean(p, 0)))


def shown(loss):
    """What the graph of a step shows of a loss."""
    rows = tf.TensorSpec([None, 3])

    @tf.function(input_signature=[rows, rows], autograph=False)
    def step(y, p):
        inputs = [tf.nn.relu(y), tf.nn.sigmoid(p - tf.reduce_mean(p, 0))]
        graph = tf.compat.v1.get_default_graph()
        found.append(row_dependence.adds_up(loss(*inputs), inputs, graph))

    found = []
    step.get_concrete_function()
    return found[0]


@pytest.mark.parametrize("loss", [pytest.param(f, id=name) for name, f in shown_to_add_up()])
def test_a_loss_that_adds_up_is_not_gathered(loss):
    assert shown(loss)


@pytest.mark.parametrize("loss", [pytest.param(f, id=name) for name, f in not_shown()])
def test_a_loss_of_the_whole_batch_is_seen_whatever_its_rows_are(loss):
    assert not shown(loss)


# Losses of one replica.


@pytest.mark.parametrize("weights, total", [([1.0, -1.0], 3.0), ([1.0, 2.0], 6.0)])
def test_a_mean_by_weights_is_divided_by_the_weights_of_all_rows(weights, total):
    """Breaks where the weights of one replica sum to 0: Keras's mean of its rows is 0."""
    step = traced_step.Step(tf.constant(0.5), None, lambda own: own + 3.0)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    with traced_step.weighing_by_rows(), traced_step.tracing(step):
        found = loss([[0.0], [0.0]], [[2.0], [1.0]], sample_weight=weights)
    np.testing.assert_allclose(0.5 * found, np.dot(weights, [4.0, 1.0]) / total, 1e-6)
