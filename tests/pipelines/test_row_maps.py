"""A rank that maps only its own rows gets what it would get of rows that are all mapped."""

from __future__ import annotations

import functools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dtk.compat import keras_data
from dtk.even_division import even_bounds
from dtk.input import digests, slicing
from dtk.pipelines import operations, row_maps
from dtk.strategies import AllReduceStrategy

untouched = tf.autograph.experimental.do_not_convert
Dataset = tf.data.Dataset


@untouched
def pair(row):
    return {"x": tf.cast(row, tf.float32) / 3 * tf.constant([1.0, 2.0]), "row": (row, row % 7)}


@untouched
def noisy(row):
    """The same noise for the same row, with a branch and a check."""
    tf.debugging.assert_greater(row["row"][0], tf.constant(-1, tf.int64))
    seed = tf.stack([row["row"][1], 3])
    drawn = tf.random.stateless_normal([2], seed)
    x = tf.cond(row["row"][1] > 3, lambda: row["x"] * drawn, lambda: tf.math.tanh(row["x"]))
    return {**row, "x": x}


@untouched
def ragged(row):
    """Of another length in each row, until the next map."""
    return tf.range(row["row"][1]), row["x"], row["row"][0]


@untouched
def as_data(numbers, x, row):
    return tf.concat([x, [tf.cast(tf.reduce_sum(numbers), tf.float32)]], 0), tf.as_string(row), None


@st.composite
def pipelines(draw):
    """What makes a pipeline of batches, the same each time, in whose rows nothing is drawn."""
    rows, batch = draw(st.integers(0, 23)), draw(st.integers(1, 6))
    drop, shuffled = draw(st.booleans()), draw(st.booleans())
    calls = draw(st.sampled_from([{}, {"num_parallel_calls": 2, "deterministic": True}]))
    mapping = draw(
        st.sampled_from([{}, {"num_parallel_calls": tf.data.AUTOTUNE}, {"num_parallel_calls": 3}])
    )
    functions = draw(st.sampled_from([[pair], [pair, noisy], [pair, noisy, ragged, as_data]]))
    behind = draw(st.lists(st.sampled_from(["prefetch", "take", "skip"]), max_size=2))
    behind += draw(st.sampled_from([[], ["repeat"]])) if "take" not in behind else []

    def make():
        dataset = Dataset.range(rows)
        if shuffled:
            dataset = dataset.shuffle(8, seed=5)
            # What is drawn where a stream is left in the middle depends on how far it was read.
            dataset = dataset if "take" in behind else dataset.repeat(2)
        for function in functions:
            dataset = dataset.map(function, **mapping)
        dataset = dataset.batch(batch, drop_remainder=drop, **calls)
        for name in behind:
            dataset = getattr(dataset, name)(2)
        return dataset

    return make


def numpy(dataset):
    return list(dataset.as_numpy_iterator())


def check_same(expected, found):
    assert expected.element_spec == found.element_spec
    assert expected.cardinality() == found.cardinality()
    for _ in range(2):  # a pipeline may shuffle anew
        ours, theirs = numpy(found), numpy(expected)
        assert len(ours) == len(theirs)
        tf.nest.map_structure(np.testing.assert_array_equal, theirs, ours)


@pytest.mark.full_but("4", why="the same pipelines, ten times as many")
@pytest.mark.parametrize("examples", [4, 60])
def test_what_a_rank_gets_is_the_same(examples):
    # Without shrinking: what fails first says enough, and each pipeline takes its time.
    @settings(deadline=None, max_examples=examples, phases=[Phase.generate])
    @given(pipelines(), st.integers(1, 7), st.data())
    def check(make, size, data):
        check_one_rank(make, size, data.draw(st.integers(0, size - 1)))

    check()


def check_one_rank(make, size, rank):
    """Breaks as a row of another rank's, a count or a padding row."""

    @untouched
    def without_digest(slices):
        return slices._replace(digest=())

    maps = operations.take_apart(make())
    assert isinstance(maps, row_maps.RowMaps | row_maps.ArrayRows)
    early = row_maps.cut_before_maps(maps, rank, size, digests.digest_of)
    check_same(slicing.cut_dataset(make(), (rank,), size), early.map(without_digest))
    check_same(
        slicing.cut_dataset(make(), (rank,), size).map(exactly),
        row_maps.cut_before_maps(operations.take_apart(make()), rank, size).map(exactly),
    )


@untouched
def exactly(batch):
    return slicing.without_padding(batch)[0]


def counting(dataset, found):
    """The same rows, which say when they are read; `from_generator` is no map."""

    def rows():
        for row in dataset.as_numpy_iterator():
            found.append(row)
            yield row

    return Dataset.from_generator(rows, output_signature=dataset.element_spec)


def test_a_rank_maps_its_own_rows_alone():
    """Each of two workers decoded two rows for one that it kept."""
    mapped = []
    for rank in range(2):
        maps = operations.take_apart(Dataset.range(26).map(pair).batch(6))
        seen, apply = [], maps.apply

        def apply_counted(given, apply=apply, seen=seen):
            about = given.map(untouched(lambda about, _: about))
            rows = given.map(untouched(lambda _, own: own))
            return apply(Dataset.zip(about, counting(rows, seen)))

        counted = maps._replace(apply=apply_counted)
        batches = numpy(row_maps.cut_before_maps(counted, rank, 2, digests.digest_of))
        assert seen == [row for batch in batches for row in batch.parts[0]["row"][0].tolist()]
        mapped += seen
    assert sorted(mapped) == list(range(26))


def arrays(count):
    """Two inputs, labels and weights of rows."""
    x = np.random.default_rng(0).normal(size=(count, 3, 2)).astype("float32")
    inputs = {"image": x, "pair": (x[:, 0], np.arange(count)), "absent": None}
    return inputs, np.arange(count) % 3, np.ones(count)


def adapter(count, batch_size, shuffle):
    return keras_data.ArrayDataAdapter(*arrays(count), batch_size=batch_size, shuffle=shuffle)


@pytest.mark.parametrize(
    "count, batch_size, shuffle, size",
    [(23, 8, False, 3), (24, 8, True, 3), (9, 4, "batch", 5), (3, 8, True, 2)],
)
def test_rows_of_arrays(count, batch_size, shuffle, size):
    def make():
        tf.random.set_seed(4)
        return adapter(count, batch_size, shuffle).get_tf_dataset().take(3)

    for rank in (0, size - 1):
        check_one_rank(make, size, rank)


def test_a_rank_takes_its_own_rows_of_arrays(monkeypatch):
    """With 64 ranks each copied 64 times the rows that it kept."""
    taken, gather = [], tf.gather

    def counted(array, numbers, **options):
        told = tf.numpy_function(lambda n: taken.append(len(n)), [numbers], [])
        with tf.control_dependencies([told]):
            return gather(array, tf.identity(numbers), **options)

    x = np.zeros((1024, 512), "float32")
    data = keras_data.ArrayDataAdapter(x, batch_size=64, shuffle=True).get_tf_dataset()
    maps = operations.take_apart(data)
    monkeypatch.setattr(tf, "gather", counted)
    for _ in row_maps.cut_before_maps(maps, 1, 16, digests.digest_of):
        pass
    assert sum(taken) == 4 * 64 + 12 * 4 + 1024 // 16  # what is compared, and own rows


@pytest.mark.parametrize("batch", [0, 9])
def test_a_row_of_arrays_that_differs_is_found_out(batch):
    def digests_of(x):
        data = keras_data.ArrayDataAdapter(x, batch_size=64).get_tf_dataset()
        cut = row_maps.cut_before_maps(operations.take_apart(data), 0, 2, digests.digest_of)
        return [int(slices.digest) for slices in cut]

    x = np.zeros((1024, 5), "float32")
    other = x.copy()
    other[64 * batch + 7] = 1
    alike = [one == two for one, two in zip(digests_of(x), digests_of(other), strict=True)]
    assert alike.index(False) == batch and sum(alike) == 15


def test_class_weights():
    """`take_apart` knows Keras's function of them by its name."""
    row_of = untouched(lambda row: (tf.cast(row, tf.float32)[None], row % 3))

    def make():
        data = Dataset.range(7).map(row_of)
        return keras_data.TFDatasetAdapter(data.batch(4), {0: 0.5, 1: 2.0, 2: 3.0}).get_tf_dataset()

    check_one_rank(make, 3, 1)


def drawn(row):
    return row + tf.random.uniform([], 0, 5, tf.int64)


@functools.cache
def counter():
    return tf.Variable(1, dtype=tf.int64)


@functools.cache
def table():
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)


def mapped(function):
    return lambda d: d.map(untouched(function)).batch(4)


plus_one = untouched(lambda row: row + 1)
NOT = {
    "random in a branch": (
        mapped(lambda r: tf.cond(r > 3, lambda: drawn(r), lambda: r)),
        "calls RandomUniformInt",
    ),
    "python": (
        mapped(lambda r: tf.ensure_shape(tf.py_function(abs, [r], tf.int64), [])),
        "calls EagerPyFunc",
    ),
    "python without state": (
        mapped(lambda r: tf.numpy_function(abs, [r], tf.int64, stateful=False)),
        "calls PyFuncStateless",
    ),
    "a size of its own": (
        mapped(lambda r: r + tf.size(tf.random.uniform([r]), tf.int64)),
        "depends on the row",
    ),
    "a sum of rows": (mapped(lambda r: counter().assign_add(r)), "depends on the row"),
    "a table": (
        mapped(lambda r: table().lookup(tf.cast(r, tf.int32))),
        "holds a variable, a table",
    ),
    "filter": (
        lambda d: d.map(plus_one).filter(untouched(lambda r: r > 2)).batch(4),
        "Filter stands between",
    ),
    "lengths": (mapped(lambda r: tf.range(r % 1 + 3)), "mapped rows have no fixed shape"),
    "lengths before": (
        lambda d: (
            Dataset.from_generator(lambda: iter([1, 2]), output_types=tf.int64)
            .map(untouched(tf.size))
            .batch(4)
        ),
        "rows have no fixed shape before",
    ),
    "padded": (lambda d: d.map(plus_one).padded_batch(4), "its padded_batch takes"),
    "batches": (
        lambda d: d.map(plus_one).batch(4).map(plus_one),
        "its map takes or makes whole batches",
    ),
    "cut anew": (lambda d: d.map(plus_one).batch(4).rebatch(3), "its rebatch takes"),
    "kept rows": (lambda d: d.map(plus_one).cache().batch(4), None),
    "no map": (lambda d: d.shuffle(3).batch(4), None),
    "sparse arrays": (
        lambda d: keras_data.ArrayDataAdapter(
            tf.sparse.from_dense(np.eye(6, dtype="float32")), batch_size=4
        ).get_tf_dataset(),
        None,
    ),
    "a generator": (
        lambda d: Dataset.from_generator(lambda: iter([1, 2]), output_types=tf.int64).batch(2),
        None,
    ),
    "a stream that is left": (
        lambda d: d.shuffle(3).repeat().map(plus_one).batch(4).take(2),
        "take leaves a stream",
    ),
}


@pytest.mark.parametrize("name", NOT)
def test_where_it_may_not_be(name):
    """Breaks as other rows than a single process trains on."""
    make, why = NOT[name]
    found = operations.take_apart(make(Dataset.range(10)))
    assert found is None if why is None else why in found


def test_of_two_functions_the_pure_one_is_applied_to_own_rows():
    """The other sees all rows: its state is the same on every rank."""

    @untouched
    def called(row):
        return tf.ensure_shape(tf.numpy_function(abs, [row], tf.int64), [])

    maps = operations.take_apart(Dataset.range(10).map(called).map(pair).batch(4))
    assert maps.rows.element_spec == tf.TensorSpec([], tf.int64)
    assert maps.rows._map_func._func.__name__ == "called"
    assert "called" in maps.why and "test_row_maps.py:" in maps.why


def test_options_and_names_stay():
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 2
    dataset = Dataset.range(9).map(pair, name="pairs").with_options(options).batch(4, name="fours")
    cut = row_maps.cut_before_maps(operations.take_apart(dataset), 0, 2, digests.digest_of)
    assert cut.options().threading.private_threadpool_size == 2
    assert cut.options().autotune.enabled is False
    names = []
    node = cut
    while (node := getattr(node, "_input_dataset", None)) is not None:
        names.append(getattr(node, "_name", None))
    assert [name for name in names if name] == ["fours", "pairs"]


def test_ranks_with_other_numbers_in_their_functions_find_out():
    """Each rank's function held the rows that it had read itself: their numbers were equal."""

    def digests_of(numbers):
        take = untouched(lambda row: tf.gather(numbers, row))
        maps = operations.take_apart(Dataset.range(4).map(take).batch(4))
        (slices,) = row_maps.cut_before_maps(maps, 0, 2, digests.digest_of)
        return int(slices.digest)

    one, other = np.arange(4.0), np.arange(4.0) + 1
    for kind in (np.array, tf.constant):
        assert digests_of(kind(one)) == digests_of(kind(one))
        assert digests_of(kind(one)) != digests_of(kind(other))


def test_ranks_may_keep_their_files_in_folders_of_other_names():
    def salt(folder):
        read = untouched(lambda name: tf.io.read_file(folder + name))
        return operations.take_apart(Dataset.from_tensors("a").map(read).batch(1)).salt

    assert salt("/one/") == salt("/other/")


def trained_from_own_files(folder, rows, batch):
    """Fit, evaluate and predict where a rank has no file but those of its own rows."""
    strategy = AllReduceStrategy()
    numbers = np.random.default_rng(3).normal(size=[rows, 3]).astype("float32")
    own = f"{folder}/rank{strategy.rank}/"
    os.makedirs(own, exist_ok=True)
    for first in range(0, rows, batch):
        count = min(batch, rows - first)
        begin, end = even_bounds(count, strategy.rank, strategy.size)
        for row in range(first + min(begin, count - 1), first + max(begin + 1, end)):
            numbers[row].tofile(f"{own}{row}")  # its own, or a padding row

    @untouched
    def read(name):
        found = tf.ensure_shape(tf.io.decode_raw(tf.io.read_file(own + name), tf.float32), [3])
        return found, found[:1]

    names = Dataset.from_tensor_slices([str(row) for row in range(rows)])
    data = names.map(read, num_parallel_calls=tf.data.AUTOTUNE).batch(batch).prefetch(1)

    def results(data):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        losses = model.fit(data, epochs=2, verbose=0).history["loss"]
        tested, predicted = model.evaluate(data, verbose=0), model.predict(data, verbose=0)
        return losses, tested, predicted, model.get_weights()

    from_files = results(data)
    in_memory = Dataset.from_tensor_slices((numbers, numbers[:, :1])).batch(batch)
    return from_files, results(in_memory)


@pytest.mark.full("the same pipelines, ten times as many")
@pytest.mark.worlds(("collective", 2))
def test_a_rank_needs_only_the_files_of_its_own_rows(pool, tmp_path):
    """Every rank read all files, and would end here with one that it does not have."""
    for found, expected in pool.run(trained_from_own_files, str(tmp_path), 11, 4):
        tf.nest.map_structure(np.testing.assert_array_equal, expected, found)
