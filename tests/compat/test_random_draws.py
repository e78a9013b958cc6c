"""Draws that belong to rows: a part of a batch draws what it draws in the whole."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.compat import random_draws

DRAWS = {
    "keras normal": lambda n: keras.random.normal((n, 3)),
    "keras uniform": lambda n: keras.random.uniform((n, 2)),
    "keras integers": lambda n: keras.random.randint((n, 2), 0, 9),
    "keras truncated": lambda n: keras.random.truncated_normal((n, 2)),
    "keras dropout": lambda n: keras.random.dropout(tf.ones([n, 8]), 0.5),
    "keras categorical": lambda n: keras.random.categorical(tf.ones([n, 4]), 2),
    "keras gamma": lambda n: keras.random.gamma((n, 2), 2.0),
    "keras binomial": lambda n: keras.random.binomial((n, 2), 5.0, 0.4),
    "keras beta": lambda n: keras.random.beta((n, 2), 0.5, 0.5),
    "normal": lambda n: tf.random.normal([n, 2]),
    "stateless": lambda n: tf.random.stateless_normal([n, 2], [1, 2]),
    "generator": lambda n: tf.random.Generator.from_seed(3).normal([n, 2]),
    "integers": lambda n: tf.random.uniform([n], 0, 10, tf.int32),
    "dropout": lambda n: tf.nn.dropout(tf.ones([n, 4]), 0.5),
    "several a row": lambda n: tf.reshape(tf.random.normal([2 * n, 2]), [n, 4]),
}


def draw(function, rows, first):
    with random_draws.by_row():
        random_draws.restart(rows, first)
        return np.asarray(function(rows))


@pytest.mark.parametrize("name", DRAWS)
def test_a_part_draws_what_it_draws_in_the_whole(name):
    whole = draw(DRAWS[name], 5, 0)
    np.testing.assert_array_equal(draw(DRAWS[name], 3, 0), whole[:3])
    np.testing.assert_array_equal(draw(DRAWS[name], 2, 3), whole[3:])


@pytest.mark.parametrize("name", ["keras normal", "keras dropout", "normal", "integers"])
def test_rows_draw_different_numbers(name):
    """Breaks as normalization of equal rows, whose variance is nothing but rounding."""
    whole = draw(DRAWS[name], 5, 0)
    assert len({row.tobytes() for row in whole}) > 1


def test_what_is_not_of_rows_is_the_same_on_all():
    @tf.function
    def noise():
        return tf.random.normal([4])

    with random_draws.by_row():
        random_draws.restart(3, 0)
        first = noise().numpy()
        random_draws.restart(2, 3)
        second = tf.function(lambda: tf.random.normal([4]))().numpy()
    np.testing.assert_array_equal(first, second)


def test_a_shuffle_leaves_the_order():
    for shuffle in (tf.random.shuffle, keras.random.shuffle):
        assert draw(lambda n, shuffle=shuffle: shuffle(tf.range(n)), 4, 0).tolist() == [0, 1, 2, 3]


def test_nothing_is_left_replaced():
    before = [getattr(module, name) for module, name in random_draws.replaced_names()]
    with random_draws.by_row():
        pass
    assert before == [getattr(module, name) for module, name in random_draws.replaced_names()]
