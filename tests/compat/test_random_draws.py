"""Draws that belong to rows: a part of a batch draws what it draws in the whole."""

from __future__ import annotations

import contextlib
import random

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
}
layers = keras.layers
# Numbers of each row, computed from rows of shape [4, 6]; a graph does not know how many there are.
STEPS = {
    "two blocks of rows": lambda x: tf.split(tf.nn.dropout(tf.concat([x, x], 0), 0.5), 2)[1],
    "two blocks by Keras": lambda x: x + tf.split(
        keras.random.uniform((2 * tf.shape(x)[0], 4, 6)), 2
    )[1],
    "not the first axis": lambda x: tf.transpose(tf.nn.dropout(tf.transpose(x, (1, 0, 2)), 0.5)),
    "numbers of the batch": lambda x: x + tf.random.normal([6]),
    "map": lambda x: tf.map_fn(lambda row: row + tf.random.normal(tf.shape(row)), x),
    "vectorized map": lambda x: tf.vectorized_map(lambda r: r * tf.random.uniform(tf.shape(r)), x),
    "loop": lambda x: tf.while_loop(
        lambda i, y: i < 3, lambda i, y: (i + 1, y + tf.random.normal(tf.shape(y))), (0, x)
    )[1],
    "branch": lambda x: tf.cond(
        tf.random.uniform([]) < 0.5, lambda: x, lambda: x + tf.random.normal(tf.shape(x))
    ),
    "flips": lambda x: tf.image.random_flip_left_right(x[..., None]),
    "candidates": lambda x: x + tf.cast(
        tf.random.log_uniform_candidate_sampler(tf.zeros([1, 1], tf.int64), 1, 6, True, 99)[0],
        tf.float32,
    ),
    "numpy": lambda x: x + np.random.rand(),
}  # fmt: skip
LAYERS = {
    "noise": lambda: layers.GaussianNoise(0.3),
    "rotation": lambda: keras.Sequential(
        [layers.Reshape((4, 6, 1)), layers.RandomRotation(0.3), layers.RandomZoom(0.2)]
    ),
    "recurrent dropout": lambda: layers.LSTM(3, dropout=0.4, recurrent_dropout=0.4),
    "distributed dropout": lambda: layers.TimeDistributed(layers.Dropout(0.5)),
}


def draw(function, rows, first, layout=random_draws.BLOCKS):
    with random_draws.by_row({1: layout}):
        random_draws.restart(rows, first, 5)
        return np.asarray(function(rows))


def traced(step, rows, first, layouts=random_draws.LAYOUTS[:1]):
    """What a step makes of some of five rows, in a graph of any number of rows."""
    x = np.random.default_rng(1).normal(size=(5, 4, 6)).astype("float32")[first : first + rows]

    @tf.function(autograph=False)
    def function():
        random_draws.restart(rows, first, 5)
        return step(tf.compat.v1.placeholder_with_default(x, (None, 4, 6)))

    with random_draws.by_row(dict(enumerate(layouts, start=1))):
        return function().numpy()


@pytest.mark.parametrize("name", DRAWS)
def test_a_part_draws_what_it_draws_in_the_whole(name):
    whole = draw(DRAWS[name], 5, 0)
    if name in ("keras normal", "keras dropout", "normal", "integers"):
        # Else normalization of equal rows, whose variance is nothing but rounding.
        assert len({row.tobytes() for row in whole}) > 1
    np.testing.assert_array_equal(draw(DRAWS[name], 3, 0), whole[:3])
    np.testing.assert_array_equal(draw(DRAWS[name], 2, 3), whole[3:])


def assert_parts_are_of_the_whole(step, layouts=random_draws.LAYOUTS[:1], axis=0):
    whole = traced(step, 5, 0, layouts)
    parts = traced(step, 3, 0, layouts), traced(step, 2, 3, layouts)
    np.testing.assert_allclose(np.concatenate(parts, axis), whole, 1e-5, 1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_parts_draws_what_it_draws_in_the_whole(name):
    """Breaks as a right step that is refused: its label noise, its time-major masks."""
    assert_parts_are_of_the_whole(STEPS[name], axis=1 if name == "not the first axis" else 0)


@pytest.mark.full_for("recurrent dropout")
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_parts_draws_what_it_draws_in_the_whole(name):
    layer = LAYERS[name]()
    layer.build((None, 4, 6))
    assert_parts_are_of_the_whole(lambda x: layer(x, training=True))


def patches(x):
    return tf.reshape(tf.nn.dropout(tf.reshape(x, (-1, 6)), 0.5), (-1, 4, 6))


blocks = STEPS["two blocks of rows"]


@pytest.mark.parametrize(
    "step, layouts",
    [
        (blocks, ["blocks"]),
        (patches, ["repeated"]),
        (lambda x: blocks(patches(x)), ["repeated", "blocks"]),
    ],
)
def test_which_numbers_are_a_rows_where_it_has_several(step, layouts):
    assert_parts_are_of_the_whole(step, layouts)
    other = {"blocks": "repeated", "repeated": "blocks"}
    with pytest.raises(AssertionError):
        assert_parts_are_of_the_whole(step, [other[layout] for layout in layouts])


def test_rows_with_one_number_each_have_their_own_in_every_layout():
    """Breaks as a batch of equal rows, whose standard deviation is 0 however it is computed."""
    for layout in random_draws.LAYOUTS:
        assert len(set(draw(lambda n: tf.random.normal([n]), 5, 0, layout).tolist())) == 5


def test_functions_of_a_step_and_generators_keep_nothing_of_a_trial():
    """Breaks as training without noise: a function traced in a trial draws its constants."""
    noise = tf.function(lambda x: tf.random.normal(tf.shape(x)))
    x = tf.zeros([3])
    before = np.random.get_state()[1].tolist(), random.getstate()
    tried = draw(lambda n: noise(x) + np.random.rand() + random.random(), 3, 0)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    assert noise.experimental_get_tracing_count() == 0
    assert len({noise(x).numpy().tobytes() for _ in range(3)} | {tried.tobytes()}) == 4


class Lazy(keras.layers.Layer):
    def build(self, shape):
        self.drawn = self.add_weight(shape=shape, initializer="random_normal")
        self.made = self.add_weight(shape=(2,), initializer=lambda shape, dtype: np.random.rand(2))

    def call(self, x):
        return keras.random.dropout(x, 0.5) + self.drawn + keras.ops.sum(self.made)


@pytest.mark.parametrize("run", [tf.function, lambda step: step], ids=["graph", "eager"])
def test_layers_built_in_a_trial_have_their_own_first_weights(run):
    """Breaks as training from other weights than one process where a step builds its model."""

    def build_and_draw(context):
        keras.utils.set_random_seed(3)
        layers = [Lazy(), Lazy()]
        with context as tried:
            if tried is not None:
                random_draws.restart(3)
            run(lambda: [layer(tf.ones([3, 4])) for layer in layers])()
        weights = [np.asarray(w) for layer in layers for w in layer.weights]
        return np.concatenate([w.ravel() for w in weights] + [[np.random.rand(), random.random()]])

    alone, tried = build_and_draw(contextlib.nullcontext()), build_and_draw(random_draws.by_row())
    np.testing.assert_array_equal(tried, alone)


def test_numpy_and_python_draw_on_while_a_step_is_tried():
    """Breaks as data that repeats numbers, or differs by rank: a thread reads it ahead."""

    def two():
        return np.random.rand(), random.random()

    keras.utils.set_random_seed(3)
    expected = [two(), two()]
    keras.utils.set_random_seed(3)
    with random_draws.by_row(of_python=False):
        random_draws.restart(3, of_python=False)
        drawn = [two()]
    assert [*drawn, two()] == expected


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
    places = [(module, name) for module, name, _ in random_draws._replacements({}, [])]
    before = [getattr(module, name) for module, name in places]
    with random_draws.by_row():
        pass
    assert len(before) > 30 and before == [getattr(module, name) for module, name in places]
