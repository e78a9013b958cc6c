"""Maps moved behind shuffles, and draws made before them, leave the rows as they are."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.input import digests, slicing
from dtk.pipelines import operations, row_maps
from dtk.strategies import AllReduceStrategy

from pipelines.test_row_maps import check_same, noisy, pair, untouched

Dataset = tf.data.Dataset


@untouched
def flipped(row):
    """As an image is flipped: a branch that depends on a draw, and a draw of several numbers."""
    x = tf.image.random_flip_left_right(tf.reshape(row["x"], [1, 2, 1]), seed=None)
    x = tf.reshape(tf.image.random_brightness(x, 0.3), [2]) + tf.random.normal([2])
    return {**row, "x": x}


@untouched
def cropped(row):
    x = tf.tile(tf.reshape(row["x"], [1, 2, 1]), [3, 3, 1])
    return tf.image.random_crop(x, [2, 4, 1]), row["row"][0]


@untouched
def named(row):
    return row["row"][1], row["x"]


def images():
    return Dataset.range(23).map(pair)


def layered():
    flip = keras.layers.RandomFlip(seed=3)
    return images().map(untouched(lambda row: {**row, "x": flip(tf.reshape(row["x"], [1, 2, 1]))}))


@untouched
def called(row):
    """A function of Python, which every rank calls for all rows."""
    return tf.ensure_shape(tf.numpy_function(lambda x: x + 1, [row], tf.int64), [])


def generated():
    return Dataset.from_generator(
        lambda: iter(range(23)), output_signature=tf.TensorSpec([], "int64")
    )


MADE = {
    "generator": lambda: generated().map(pair).shuffle(8).batch(4),
    "a function of Python": lambda: Dataset.range(23).map(called).map(pair).shuffle(8).batch(4),
    "cache": lambda: images().cache().map(flipped).shuffle(8).batch(4),
    "shuffle": lambda: images().shuffle(8).batch(4),
    "shuffle once": lambda: images().shuffle(8, reshuffle_each_iteration=False).batch(4),
    "shuffle, repeat": lambda: images().shuffle(8).repeat(2).batch(4),
    "shuffle, map, repeat": lambda: Dataset.range(23).shuffle(8).map(pair).repeat(2).batch(4),
    "repeat, shuffle": lambda: images().repeat(2).shuffle(8).map(noisy).batch(4),
    "two shuffles": lambda: images().shuffle(5).take(19).map(noisy).shuffle(7).skip(2).batch(4),
    "between": lambda: images().prefetch(2).shuffle(5).enumerate().prefetch(1).batch(4),
    "zip": lambda: Dataset.zip((images(), Dataset.range(9, 40))).shuffle(9).batch(4),
    "zip of names": lambda: Dataset.zip(
        {"b": (images().map(flipped), images()), "a": Dataset.range(30)}
    ).batch(4),
    "draws": lambda: images().map(flipped).batch(4),
    "draws, shuffle": lambda: images().map(flipped).shuffle(8).repeat(2).map(cropped).batch(4),
    "draws of draws": lambda: images().map(flipped).map(noisy).map(flipped).map(named).batch(4),
}


def check_one_rank(make, like=None, rank=1, size=3, peek=True):
    def made(make):
        keras.utils.set_random_seed(7)
        dataset = make()
        if peek:
            list(dataset.take(1))
        return dataset

    before = made(like or make)
    maps = operations.take_apart(made(make))
    assert isinstance(maps, row_maps.RowMaps), maps
    without = untouched(lambda slices: slices._replace(digest=()))
    found = row_maps.cut_before_maps(maps, rank, size, digests.digest_of)
    check_same(slicing.cut_dataset(before, (rank,), size), found.map(without))
    return maps


@pytest.mark.parametrize("name", MADE)
def test_rows_are_the_same(name):
    """Breaks as an order, a draw or a count of another epoch."""
    check_one_rank(MADE[name])


def test_a_random_layer_draws_as_it_does_in_one_process():
    """Its state goes on from epoch to epoch. A peek reads ahead, and leaves any state."""
    check_one_rank(lambda: layered().shuffle(8).map(named).batch(4), peek=False)


def test_of_any_order_ranks_take_that_of_the_rows():
    def make(deterministic):
        return images().map(noisy, 2, deterministic=deterministic).shuffle(8).batch(4)

    check_one_rank(lambda: make(False), lambda: make(True))


@pytest.mark.parametrize("name", ["shuffle, repeat", "draws, shuffle"])
def test_a_script_may_go_on_reading(name):
    """A shuffle counts the iterators of both datasets, in the order in which they begin."""
    found = []
    for whole in (True, False):
        tf.random.set_seed(7)
        dataset = MADE[name]()
        cut = slicing.cut_dataset(dataset, (0,), 1)
        if not whole:
            cut = row_maps.cut_before_maps(operations.take_apart(dataset), 0, 1, digests.digest_of)
        batches = [list(cut), list(dataset), list(cut), list(dataset.take(2)), list(cut)]
        found.append([[getattr(one, "parts", (one,))[0] for one in part] for part in batches])
    tf.nest.map_structure(np.testing.assert_array_equal, *found)


@untouched
def slowly_drawn(row):
    """Draws of the shape of the row, at the end of work that takes other elements less long."""
    first = tf.cast(tf.reshape(row["row"][0], [-1])[0], tf.int32)
    size = 40 * (7 - first % 7)
    none = tf.random.stateless_normal([size, size], [1, 2]) @ tf.zeros([size, 2])
    noise = tf.random.normal(tf.shape(row["x"]) + tf.cast(none[0, 0], tf.int32))
    return {**row, "x": row["x"] + noise}


FITTED = {
    "shuffle": lambda _: images().map(noisy, tf.data.AUTOTUNE).shuffle(8).batch(4).prefetch(2),
    "shuffle, repeat": lambda _: images().shuffle(8).repeat(2).batch(4),
    "draws, shuffle": lambda _: images().shuffle(8).map(flipped).shuffle(9).batch(4),
    "batches drawn": lambda calls: images().shuffle(8).batch(4).map(slowly_drawn, calls),
    "rows drawn": lambda calls: images().map(slowly_drawn, calls).map(noisy).batch(4),
}


def fitted(names, scope=contextlib.nullcontext, calls=None):
    """Return the rows of each step of two fits, after peeks."""
    steps = []

    class Recorded(keras.Model):
        """Remembers the rows that it is given."""

        def train_step(self, data):
            rows = data["row"][0], data["x"]
            return {"loss": tf.numpy_function(self.remember, rows, tf.float32)}

        def remember(self, number, x):
            steps.append((number, x))
            return np.float32(0)

    with scope():
        model = Recorded()
        model.compile("sgd", jit_compile=False)
    for name in names:
        keras.utils.set_random_seed(7)
        data = FITTED[name](calls).with_options(threads(8))
        list(data.take(1))
        for _ in range(2):
            next(iter(data))
            model.fit(data, epochs=2, shuffle=False, verbose=0)
    return steps


def threads(count):
    options = tf.data.Options()
    options.threading.private_threadpool_size = count
    return options


def fitted_by_a_rank(names):
    strategy = AllReduceStrategy(self_test=False)  # the self-test would train on rows, too
    steps = fitted(names, strategy.scope, calls=8)
    tf.random.set_seed(7)
    looped = list(strategy.experimental_distribute_dataset(FITTED["batches drawn"](8)))
    why = [getattr(operations.take_apart(FITTED[name](8)), "why", "") for name in names]
    return steps, [rows["x"].numpy() for rows in looped], why


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2))
def test_ranks_train_on_the_rows_of_one_process(pool):
    """Breaks where a peek or an earlier fit has moved the order or the draws of one of them.

    Threads of a parallel map drew as they came, so no two ranks had the same batches.
    """
    expected = fitted(FITTED)
    (one, first, why), (other, second, _) = pool.run(fitted_by_a_rank, list(FITTED))
    assert why[:3] == [None] * 3 and None not in why[3:]
    assert len(expected) == len(one) == len(other) == 2 * 2 * (6 + 12 + 6 + 6 + 6)
    for whole, *parts in zip(expected, one, other, strict=True):
        for leaf, *slices in zip(whole, *parts, strict=True):
            np.testing.assert_array_equal(leaf, np.concatenate(slices))
    tf.random.set_seed(7)
    for whole, *parts in zip(FITTED["batches drawn"](None), first, second, strict=True):
        np.testing.assert_array_equal(whole["x"], np.concatenate(parts))
