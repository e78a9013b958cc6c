"""What it takes before the first batch can be read, and after the last."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.compat import keras_data, tf_replicas
from dtk.errors import DisagreementError
from dtk.input import slicing
from dtk.patches import patch
from dtk.strategies import AllReduceStrategy, undistributed
from dtk.trainer.strategy import ShuffleSeed

from support import bodies, cases


def fit():
    """How often Keras's adapters built pipelines, and the files of the code that cut batches."""
    built, files = [], set()
    build, count_rows = keras_data.ArrayDataAdapter.get_tf_dataset, slicing.count_rows

    def counted_build(adapter):
        built.append(adapter)
        return build(adapter)

    def seen_count_rows(batch):
        files.add(sys._getframe(1).f_code.co_filename)
        return count_rows(batch)

    x, y = cases.rows(8)
    model = cases.compiled(AllReduceStrategy())
    with (
        patch(keras_data.ArrayDataAdapter, get_tf_dataset=counted_build),
        patch(slicing, count_rows=seen_count_rows),
    ):
        model.fit(x, y, verbose=0, epochs=2)
    return len(built), sorted(files)


@pytest.mark.worlds(("collective", 2))
def test_fit_cuts_the_pipeline_that_keras_builds_without_converting_code(pool):
    """Another was built and cut; autograph took ten times as long as tracing, and has own files."""
    assert pool.run(fit) == [(1, [slicing.__file__])] * 2


def _told(cores, pid):
    """Cores a process may use, which are not bound for it: the world goes on to other tests."""
    del pid
    return cores


def steps_ahead():
    """For each batch of a loop on one core, how many steps before its own it was made."""
    asked, made = [], []

    def make(number):
        made.append(len(asked))
        return number

    # TensorFlow would make the calls of a map before a batch ahead by itself.
    dataset = tf.data.Dataset.range(4).batch(1)
    dataset = dataset.map(
        lambda number: tf.ensure_shape(tf.numpy_function(make, [number], tf.int64), [1])
    )
    strategy = AllReduceStrategy()
    own_cores = os.sched_getaffinity
    os.sched_getaffinity = functools.partial(_told, {0})
    try:
        for _ in strategy.experimental_distribute_dataset(dataset):
            asked.append(time.sleep(0.2))
    finally:
        os.sched_getaffinity = own_cores
    return [step - made[step] for step in range(4)]


@pytest.mark.worlds(("local", 1))
def test_a_loop_reads_ahead_on_one_core(pool):
    """TensorFlow adds that to a pipeline only where it tunes it."""
    for lead in pool.run(steps_ahead):
        assert lead[0] == 0 and all(steps > 0 for steps in lead[1:])


class Counted(keras.utils.PyDataset):
    """Batches from workers of its own, which stop when an epoch is over."""

    def __init__(self):
        super().__init__(workers=2, use_multiprocessing=False, max_queue_size=2)

    @property
    def num_batches(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.05)  # whoever reads ahead still waits for it when the epoch ends
        return np.full((4, 2), index, "float32"), np.zeros((4, 1), "float32")


def with_and_without(made, *args):
    """What `made` returns in the strategy's scope, and as plain Keras in this process."""
    strategy = bodies.strategy(2)
    with strategy.scope():
        found = made(strategy.scope, *args)
    with undistributed():
        return found, made(contextlib.nullcontext, *args)


def fit_counted(scope):
    """Losses of three epochs whose batches a `PyDataset` makes in threads, with time between."""
    with scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.0), "mse")
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.3))
    given = {"shuffle": False, "verbose": 0, "callbacks": [pause]}
    history = model.fit(Counted(), steps_per_epoch=4, epochs=3, **given)
    return history.history["loss"]


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_workers_of_a_py_dataset_are_not_read_ahead(pool):
    """They stop when an epoch ends; a batch asked for by then was an error in the next epoch."""
    ran = pool.run(with_and_without, fit_counted)
    for losses, plain in ran:
        assert losses == plain


class Vanishing(Counted):
    """Its length is no longer to be had when the second epoch asks for it in a thread."""

    epochs = 0

    @property
    def num_batches(self):
        if self.epochs == 2 and threading.current_thread().name.startswith("Worker_"):
            raise OSError("the folder is gone")
        return 12

    def on_epoch_end(self):
        self.epochs += 1


def fit_vanishing():
    strategy = bodies.strategy(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(Vanishing(), epochs=4, verbose=0)
    except Exception as error:
        return str(error)


@pytest.mark.worlds(("local", 1))
def test_an_error_in_a_thread_of_items_ends_fit(pool):
    """The order is drawn in that thread; an error outside of Keras's `try` left `fit` waiting."""
    [told] = pool.run(fit_vanishing, timeout=60)
    assert "the folder is gone" in told


def pipelines_of_a_fit():
    """How many pipelines are cut for three epochs, without and with validation data."""
    strategy = bodies.strategy(2)
    strategy.shuffle_seed = ShuffleSeed(tf_replicas.global_seed())  # the script has set none
    x, y = cases.rows(16)
    model, cut = cases.compiled(strategy), slicing.cut_dataset
    made, counts = [], []
    for validation in (None, (x, y)):
        before = len(made)
        with patch(slicing, cut_dataset=lambda *a, **kw: made.append(1) or cut(*a, **kw)):
            model.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=validation)
        counts.append(len(made) - before)
    return counts


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_three_epochs_cut_one_pipeline(pool):
    for counts in pool.run(pipelines_of_a_fit):
        assert counts == [1, 2], "one to train with, one to validate with"


def three_fits(scope):
    """Losses of three calls of `fit` on one dataset that shuffles without end."""
    keras.utils.set_random_seed(1)
    x = np.arange(8.0)[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, x)).shuffle(8).repeat().batch(2)
    data = data.prefetch(2)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with scope():
        model.compile(keras.optimizers.SGD(0.01), "mse")
    fits = [model.fit(data, steps_per_epoch=3, epochs=2, verbose=0) for _ in range(3)]
    return [loss for one in fits for loss in one.history["loss"]]


@pytest.mark.worlds(("local", 1))
def test_the_next_fit_goes_on_with_the_order_of_one_process(pool):
    """Batches were cut ahead: the first fit shuffled once more, and took the next one's order."""
    for found in pool.run(with_and_without, three_fits):
        np.testing.assert_allclose(*found, rtol=1e-6)


def shared_metric(scope):
    """What is written where a metric object is given to a second model, and what that logs."""
    x, y = np.ones((8, 2)), np.zeros((8, 1))
    metric, told = keras.metrics.MeanSquaredError(name="error"), io.StringIO()
    for _ in range(2):
        with scope(), contextlib.redirect_stderr(told):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[metric])
            loss, error = model.evaluate(x, y, verbose=0)
    return told.getvalue(), loss, error


@pytest.mark.worlds(("local", 1))
def test_a_metric_of_two_models_begins_at_zero_and_says_so(pool):
    """Keras alone goes on counting from the first model's rows in the second's first epoch."""
    [((told, loss, error), (_, _, kept))] = pool.run(with_and_without, shared_metric)
    assert "metrics ['error'] have counted for another model" in told
    assert error == pytest.approx(loss) != pytest.approx(kept)


def of_any_rank(scope):
    """History, evaluation and predictions where a function of NumPy's makes the rows."""
    keras.utils.set_random_seed(1)
    x = np.random.default_rng(0).random((20, 4)).astype("float32")
    double = functools.partial(tf.numpy_function, lambda rows: rows * 2, Tout=tf.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    data = data.map(lambda a, b: (double([a]), b)).batch(7)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with scope():
        model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    numbers = [number for numbers in history.values() for number in numbers]
    predicted = model.predict(data.map(lambda a, b: a), verbose=0)
    return [*numbers, *model.evaluate(data, verbose=0), *predicted[:, 0]]


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_rows_whose_rank_tensorflow_does_not_know(pool):
    """`fit` ended with "Cannot iterate over a shape with unknown rank"."""
    for found in pool.run(with_and_without, of_any_rank):
        np.testing.assert_allclose(*found, rtol=1e-5)


def in_any_order():
    """Loss of a dataset that may be in any order, whose first row comes late on rank 0."""
    strategy = AllReduceStrategy()

    def late(number):
        time.sleep(0.3 if number == strategy.rank == 0 else 0)
        return number

    def rows(first):
        numbers = tf.data.Dataset.range(first, 16, 2)
        return numbers.map(lambda n: tf.ensure_shape(tf.numpy_function(late, [n], tf.int64), ()))

    options = tf.data.Options()
    options.deterministic = False
    data = tf.data.Dataset.range(2).interleave(rows, 2, num_parallel_calls=2)
    data = data.batch(4).map(lambda n: (tf.cast(n[:, None], tf.float32), n[:, None]))
    data = data.with_options(options)

    def build():
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    model = cases.compiled(strategy, build, loss="mse")
    return model.fit(data, verbose=0).history["loss"]


@pytest.mark.worlds(("collective", 2))
def test_a_dataset_in_any_order_is_read_in_one(pool):
    """Ranks disagreed by chance: recipes for TFRecords set `options.deterministic = False`."""
    first, second = pool.run(in_any_order)
    assert first == second


def of_drawn_weights(scope):
    """Weights that `tf.random.normal` draws for a model without an input, and the next draw."""
    keras.utils.set_random_seed(1)
    x = np.ones((8, 2), "float32")
    layers = [keras.layers.Dense(3, kernel_initializer=tf.random.normal) for _ in range(2)]
    model = keras.Sequential(layers)
    with scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, np.ones((8, 3)), batch_size=4, verbose=0)
    return [w.numpy() for w in model.weights] + [tf.random.normal([2]).numpy()]


@pytest.mark.worlds(("local", 1))
def test_initializers_of_tensorflow_draw_as_in_one_process(pool):
    """Breaks as other first weights: `fit` built the model outside of the step's graph."""
    for found in pool.run(with_and_without, of_drawn_weights):
        for mine, plain in zip(*found, strict=True):
            np.testing.assert_array_equal(mine, plain)


def refused_batches_of_replicas():
    """What `fit` and `evaluate` say of batches that each replica reads by itself, and take."""
    strategy = bodies.strategy(2)
    x, y = cases.rows(16)
    with strategy.scope():
        layers = [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input(x.shape[1:]), *layers])
        model.compile("sgd", "mse")

    def dataset_fn(context):
        rows = tf.data.Dataset.from_tensor_slices((x, y))
        return rows.batch(context.get_per_replica_batch_size(8))

    told = []
    for call in (model.fit, model.evaluate):
        try:
            call(strategy.distribute_datasets_from_function(dataset_fn), verbose=0)
        except ValueError as error:
            told.append(str(error))
    model.fit(dataset_fn(tf.distribute.InputContext()), verbose=0)
    return told, int(model.optimizer.iterations.numpy())


def test_batches_of_replicas_of_one_process_are_refused_for_what_they_are(world):
    """Breaks as "a batch without tensors has no rows"."""
    ((told, steps),) = world("local", 1).run(refused_batches_of_replicas)
    assert len(told) == 2 and steps == 2
    assert all("dataset_fn(tf.distribute.InputContext())" in one for one in told)


def shapes_of_distributed_data(devices):
    """The number of rows that a loop of one's own sees, before it reads any."""
    strategy = bodies.strategy(devices)
    numbers = tf.data.Dataset.range(8)
    batches = numbers.batch(2, drop_remainder=True), numbers.batch(2)
    distributed = map(strategy.experimental_distribute_dataset, batches)
    specs = [tf.nest.flatten(one.element_spec, expand_composites=True) for one in distributed]
    return [leaves[0].shape.as_list() for leaves in specs]


@pytest.mark.parametrize("devices", [0, 2])
def test_a_loop_knows_how_many_rows_a_slice_has_where_that_is_known(world, devices):
    pool = world("local", 1) if devices else world("collective", 2)
    for shapes in pool.run(shapes_of_distributed_data, devices):
        assert shapes == [[1], [None]]


def answers_of_distributed_data(devices):
    """What a model answers of a dataset, and of the same one that the script has distributed."""
    strategy = bodies.strategy(devices)
    x, y = cases.rows(10)
    model = cases.compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    distributed = strategy.experimental_distribute_dataset(data)
    return [
        (model.predict(d, verbose=0), model.evaluate(d, verbose=0)) for d in (data, distributed)
    ]


@pytest.mark.parametrize("devices", [0, 2])
def test_data_that_a_script_has_distributed_are_not_cut_again(world, devices):
    """They were: `predict` ended in an AttributeError."""
    pool = world("local", 1) if devices else world("collective", 2)
    for plain, distributed in pool.run(answers_of_distributed_data, devices):
        np.testing.assert_array_equal(plain[0], distributed[0])
        assert plain[1] == distributed[1]


def cached_in_files(folder):
    """What is said of caches in one file, where fit trains, validates and reads its own part."""
    strategy = bodies.strategy()
    x, y = cases.rows(10)
    model = cases.compiled(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    one, own = f"{folder}/one", f"{folder}/own.{strategy.rank}"
    calls = [
        lambda: model.fit(data.cache(one).batch(4), verbose=0),
        lambda: model.fit(x, y, validation_data=data.cache(one).batch(4), verbose=0),
        lambda: model.evaluate(dtk.data.shard(data, strategy, 4).cache(one), verbose=0),
    ]
    told = []
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        told.append(str(raised.value))
    model.fit(data.cache(own).batch(4), epochs=2, verbose=0)
    if strategy.rank == 0:
        list(data.cache(one))
    strategy.communicator.allgather_object(None)
    model.fit(data.cache(one).batch(4), verbose=0)  # which is whole, so that all only read it
    return told


@pytest.mark.worlds(("collective", 2))
def test_two_ranks_do_not_cache_in_one_file(pool, tmp_path):
    """One ended in an AlreadyExistsError, and the other waited for it."""
    for rank, told in enumerate(pool.run(cached_in_files, str(tmp_path))):
        for one in told:
            assert one.startswith(f"rank {rank}: ranks 0 and 1 of one host both cache")
            assert one.endswith('.cache(f"{path}.{strategy.rank}")')


def read_in_loops(devices):
    """The sums of the batches that loops of TensorFlow's guides read of a distributed dataset."""
    strategy = bodies.strategy(devices)
    data = tf.data.Dataset.range(22).batch(5)
    batches = strategy.experimental_distribute_dataset(data)

    def total(batch):
        held = strategy.run(lambda x: tf.reduce_sum(x), args=(batch,))
        return strategy.reduce("SUM", held, axis=None)

    @tf.function(input_signature=[batches.element_spec])
    def of_signature(batch):
        return total(batch)

    @tf.function
    def of_iterator(iterator):
        return tf.stack([total(next(iterator)), total(iterator.get_next())])

    @tf.function
    def of_rest(iterator):
        sums = tf.constant(0, tf.int64)
        for batch in iterator:
            sums += total(batch)
        return sums

    iterator = iter(batches)
    first = of_signature(iterator.get_next())
    second = total(iterator.get_next_as_optional().get_value())
    two = of_iterator(iterator).numpy().tolist()
    rest = of_rest(iterator)
    assert not iterator.get_next_as_optional().has_value()
    tf.nest.assert_same_structure(iterator.element_spec, batches.element_spec)
    return [int(first), int(second), *two, int(rest)]


@pytest.mark.parametrize("devices", [0, 2])
def test_a_loop_may_read_as_in_tensorflow_s_guides(world, devices):
    """Under MirroredStrategy: AttributeError: 'map' object has no attribute 'get_next'."""
    pool = world("local", 1) if devices else world("collective", 2)
    for sums in pool.run(read_in_loops, devices):
        assert sums == [10, 35, 60, 85, 41]


def read_differently():
    """What is said of a loop whose ranks read other rows; and rows after an opening alone."""
    strategy = bodies.strategy()
    told = []
    for first in (0, 7):  # the first batch that differs by rank
        rows = np.arange(24) + strategy.rank * (np.arange(24) >= 2 * first)
        data = tf.data.Dataset.from_tensor_slices(rows).batch(2)
        read = []
        with pytest.raises(DisagreementError) as raised:
            read += strategy.experimental_distribute_dataset(data)
        told.append(str(raised.value))
    orders = []
    for distributes in (False, True):
        data = tf.data.Dataset.range(20).shuffle(20, seed=3).batch(4)
        with strategy.extended.observing_batches(lambda digest: None):
            iter(strategy.experimental_distribute_dataset(data) if distributes else data)
        orders.append(np.concatenate(list(data)).tolist())
    return told, orders


@pytest.mark.worlds(("collective", 2))
def test_a_loop_s_ranks_compare_what_they_read(pool):
    """They trained on some rows twice. And `predict` changed the order of the next `fit`."""
    for rank, (told, (plain, distributed)) in enumerate(pool.run(read_differently)):
        for batch, one in zip((1, 8), told, strict=True):
            assert one.startswith(f"rank {rank}: at batch {batch} of a distributed dataset, ranks")
        assert plain == distributed
