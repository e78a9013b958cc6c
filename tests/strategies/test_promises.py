"""What dtk promises besides equality with one process."""

from __future__ import annotations

import random
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss

import dtk
from dtk.compat import tf_replicas
from dtk.strategies import AllReduceStrategy, MirroredStrategy, start, undistributed
from dtk.trainer.distributed_model import trainer_of
from dtk.trainer.ranks import rank_checks, shared_weights
from dtk.trainer.strategy import ShuffleSeed

from support import bodies, cases, graph_bodies
from support.once import once

TWO = pytest.mark.parametrize("backend, size", [("collective", 2)])
SEVERAL = pytest.mark.parametrize(
    "backend, size",
    [
        ("collective", 2),
        pytest.param("mpi-wheel", 2, marks=pytest.mark.full),
    ],
)


class Recorder(cases.Subclassed):
    """Remembers which rows each step saw; x holds the row's number."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, x):
        return self.outer(self.inner(tf.repeat(x, 64, axis=1)))

    def train_step(self, data):
        self.seen.append(np.ravel(data[0]).astype(int).tolist())
        return super().train_step(data)


def order_of_rows(seed, devices=0):
    """Rows this process saw, per epoch and step; with a seed of the script's own, or none."""
    strategy = bodies.strategy(devices)
    keras.utils.set_random_seed(seed or 123)
    if not seed:  # as dtk does at its start when the script has set none
        strategy.shuffle_seed = ShuffleSeed(123)
    model = cases.compiled(strategy, Recorder, run_eagerly=True)
    # It would remember the rows of a trial, too.
    trainer_of(model).checks_of("train").kinds = {}
    x = np.arange(23, dtype="float32")[:, None]
    for epochs in (2, 1):
        model.fit(x, x[:, 0] % 10, batch_size=5, epochs=epochs, verbose=0)
    return model.seen[:5], model.seen[5:10], model.seen[10:]


@pytest.mark.full_but("None-collective-2")
@SEVERAL
@pytest.mark.parametrize("seed", [5, None])
def test_every_row_is_seen_once_an_epoch(world, backend, size, seed):
    """Breaks when ranks shuffle apart, or, without a seed, when epochs or fits repeat one order."""
    ranks = world(backend, size).run(order_of_rows, seed)
    orders = []
    for epoch in range(3):
        steps = [[row for rank in ranks for row in rank[epoch][step]] for step in range(5)]
        orders.append([row for step in steps for row in step])
        assert sorted(orders[-1]) == list(range(23))
        assert orders[-1] != sorted(orders[-1]), "not shuffled"
    assert (orders[0] == orders[1]) == (orders[0] == orders[2]) == (seed is not None)


def differing(model):
    """Indices of the variables that are not the same on all ranks."""
    trainer = trainer_of(model)
    return shared_weights.differing(trainer.shared_variables(), trainer.strategy).mine


def starts_apart():
    """Ranks build different weights, by other names, and train.

    Returns the variables that differ before and afterwards, weights, and the names of variables,
    which Keras numbers by process.
    """
    strategy = bodies.strategy()
    if strategy.is_chief:
        cases.small()
    x, y = cases.rows(16)
    model = cases.compiled(strategy, lambda: cases.small(seed=strategy.rank))
    keras.utils.set_random_seed(1)  # the rows must come in one order, whatever the weights
    before = differing(model)
    model.fit(x, y, batch_size=8, verbose=0)
    names = [variable.path for variable in model.variables]
    return before, differing(model), bodies.flat(model.get_weights()), names


@pytest.mark.full("a cheaper test holds its rule")
@SEVERAL
def test_ranks_that_start_apart_train_together(world, backend, size):
    results = world(backend, size).run(starts_apart)
    assert results[0][3] != results[1][3], "the test needs names that differ"
    for before, after, weights, _ in results:
        assert before, "the test needs different weights to begin with"
        assert after == []
        np.testing.assert_array_equal(weights, results[0][2])


def dropout_masks(devices=0):
    """What dropout lets through, on every replica, and again from the same seed."""
    strategy = bodies.strategy(devices)

    def once():
        keras.utils.set_random_seed(1)
        model = cases.compiled(strategy, lambda: keras.Sequential([
            keras.Input((64,)), keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(2)
        ]))  # fmt: skip
        drawn = []

        @tf.function(input_signature=[tf.TensorSpec([None, 64])])
        def masks(x):
            return strategy.run(lambda x: model.layers[0](x, training=True), args=(x,))

        def draw(logs):
            values = strategy.experimental_local_results(masks(tf.ones([1, 64])))
            drawn.extend(v.numpy().ravel().tolist() for v in values)

        model.fit(
            np.ones((4, 64), "float32"),
            np.ones(4),
            batch_size=4,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_end=draw)],
        )
        return drawn

    return once(), once()


@TWO
def test_dropout_masks_differ_by_rank_and_repeat_with_the_seed(world, backend, size):
    first, second = world(backend, size).run(dropout_masks)
    assert first[0] != second[0]
    assert first[0] == first[1] and second[0] == second[1]


class Drawing(keras.layers.Layer):
    """Gives each row a number of every kind of draw, and two that are the same for all rows."""

    def call(self, x):
        rows = keras.ops.shape(x)[0]
        of_rows = [
            keras.random.normal((rows, 1)),
            keras.random.gamma((rows, 1), 2.0),
            tf.random.normal([rows, 1]),
            tf.random.gamma([rows, 1], 2.0),
        ]
        of_all = [keras.random.uniform(()), tf.random.normal([])]
        return of_rows, [tf.fill([rows, 1], number) for number in of_all]


def draws_of_rows(devices=0):
    """What two batches of four rows draw."""
    keras.utils.set_random_seed(1)
    model = cases.compiled(
        bodies.strategy(devices), lambda: keras.Sequential([keras.Input((4,)), Drawing()])
    )
    return model.predict(np.ones((8, 4), "float32"), batch_size=4, verbose=0)


@pytest.mark.parametrize("backend, size", [("collective", 2), ("local", 1)])
def test_rows_draw_numbers_of_their_own_on_every_rank(world, backend, size):
    """Breaks as a GAN of 64 workers that sees each number of its noise 64 times.

    Numbers of known size are the same on all ranks: a step may branch by them, or change weights.
    """
    of_rows, of_all = world(backend, size).run(draws_of_rows, 2 if size == 1 else 0)[0]
    assert [len(np.unique(numbers[:4])) for numbers in of_rows] == [4] * 4
    assert [len(np.unique(numbers[:4])) for numbers in of_all] == [1, 1]


def seeded_by_the_script():
    """What NumPy and Python draw after a script has seeded them and nothing else."""
    np.random.seed(0)
    random.seed(0)
    with mock.patch.object(tf_replicas, "global_seed", return_value=None):
        start.share_seed(bodies.strategy().world)
    return np.random.rand(), random.random()


@TWO
def test_seeds_of_numpy_and_python_are_kept(world, backend, size):
    expected = np.random.RandomState(0).rand(), random.Random(0).random()
    assert world(backend, size).run(seeded_by_the_script) == [expected] * 2


def augments_after_training():
    """Rows that a layer makes in a pipeline, after it was trained within a model."""
    strategy = bodies.strategy()
    keras.utils.set_random_seed(1)
    flip = keras.layers.RandomFlip()
    x, y = cases.rows(16)
    model = cases.compiled(strategy, lambda: keras.Sequential([flip, cases.small()]))
    model.fit(x, y, batch_size=8, verbose=0)
    trained = flip.generator.state.numpy()
    model.evaluate(x, y, verbose=0)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    augmented = dataset.map(lambda x, y: (flip(x, training=True), y))
    cases.compiled(strategy).fit(augmented, verbose=0, shuffle=False)
    return trained.tolist(), flip.generator.state.numpy().tolist()


@pytest.mark.full("a cheaper test holds its rule")
@TWO
def test_a_layer_that_was_trained_draws_alike_in_pipelines(world, backend, size):
    """Breaks as ranks that are refused for their data: each went on drawing by seeds of its own."""
    first, second = world(backend, size).run(augments_after_training)
    assert first == second


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_dropout_masks_differ_by_device(world, backend, size):
    ((masks, again),) = world(backend, size).run(dropout_masks, 2)
    assert masks[0] != masks[1]
    assert masks == again


def local_means():
    """The moving mean of a model whose weights stay as they are, without and with the strategy."""
    distributed = bodies.strategy()
    x, y = cases.rows(9)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    means = []
    for strategy in (None, distributed):
        still = keras.optimizers.SGD(0.0)
        model = cases.compiled(strategy, lambda: cases.small(sync=False), optimizer=still)
        with undistributed():
            model.fit(dataset, verbose=0, shuffle=False)
        means.append(model.layers[2].moving_mean.numpy())
    return means


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("backend, size", [("collective", 2), ("collective", 3)])
def test_means_that_are_not_synchronized_are_averaged_by_rows(world, backend, size):
    """Also where a rank's slice is empty, and bit for bit alike on all ranks."""
    results = world(backend, size).run(local_means)
    for plain, averaged in results:
        np.testing.assert_allclose(averaged, plain, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(averaged, results[0][1])


def half_precision(here=False):
    """mixed_float16 with dynamic loss scaling: the weights."""
    strategy = bodies.strategy() if here else None
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x, y = cases.rows(75)
        # A scale that never overflows: whether a sum of float16 overflows depends on its parts.
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**8)
        model = cases.compiled(strategy, optimizer=optimizer)
        model.fit(x, y, batch_size=16, epochs=4, verbose=0)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    return bodies.flat(model.get_weights())


@TWO
def test_mixed_precision(world, backend, size):
    """float16 rounds at 5e-4, and ranks add their halves in another order."""
    plain = half_precision
    for weights in world(backend, size).run(plain, True, meanwhile=lambda: once(plain)):
        assert np.linalg.norm(weights - once(plain)) <= 5e-3 * np.linalg.norm(once(plain))


def own_loop(kind, devices=0):
    """A custom loop as tf.distribute documents it, over two epochs of batches of 15 rows.

    Its kinds: a "step" in a `tf.function`; a whole "epoch" in one that gets the dataset; and the
    same with "pipelines", of which every worker makes its own. Returns the weights, the loss of
    each epoch, and how often the function of an epoch was traced.
    """
    return _loop(kind, bodies.strategy(devices))


def own_loop_plain(kind):
    """The same under TensorFlow's default strategy, which is one process without any."""
    return _loop(kind, tf.distribute.get_strategy())


def _loop(kind, strategy):
    x, y = cases.rows(45)
    with strategy.scope():
        model = cases.small()
        # Clipped as a whole: clipped rank by rank, the sum would be another.
        inner = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.2)
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
        optimizer.build(model.trainable_variables)

    def pipeline(context):
        # Worker 0 reads ten rows of every fifteen, worker 1 the other five; alone it reads all.
        mine = np.arange(45) % 15
        chosen = (mine < 10) == (context.input_pipeline_id == 0)
        alone = context.num_input_pipelines == 1
        size = 15 if alone else int(chosen[:15].sum())
        rows = slice(None) if alone else chosen
        return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).batch(size)

    if kind == "pipelines":
        dataset = strategy.distribute_datasets_from_function(pipeline)
    else:
        # The last batch has one row: the second worker has none.
        whole = tf.data.Dataset.from_tensor_slices((x[:31], y[:31])).batch(15)
        dataset = strategy.experimental_distribute_dataset(whole)
    traced = []

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            per_row = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True), from_logits=True
            )
            loss = tf.reduce_sum(per_row) / 15
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    @tf.function
    def epoch(batches):
        traced.append(1)
        total = tf.zeros(())
        for x, y in batches:
            total += step(x, y)
        return total

    if kind == "step":
        traced_step = tf.function(step)
        losses = [sum(float(traced_step(*batch)) for batch in dataset) for _ in range(2)]
    else:
        losses = [float(epoch(dataset)) for _ in range(2)]
    return bodies.flat(model.get_weights()), losses, len(traced)


@pytest.mark.full("test_loop_guard.py has a loop between ranks")
@pytest.mark.parametrize(
    "backend, size, kind",
    [
        ("collective", 2, "step"),
        pytest.param("collective", 2, "pipelines", marks=pytest.mark.full),
        pytest.param("horovod-gloo", 2, "step", marks=pytest.mark.full),
        ("local", 1, "epoch"),
    ],
)
def test_custom_loops(world, backend, size, kind):
    """Breaks when a distributed dataset cannot be an argument, or `for` takes it apart in Python.

    Traced again for every epoch, or a batch at a time, it would also be slow.
    """
    devices = 2 if backend == "local" else 0
    results = world(backend, size).run(own_loop, kind, devices)
    plain, losses, _ = once(own_loop_plain, kind)
    for weights, reduced, traced in results:
        assert traced == (kind != "step")
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)
        np.testing.assert_allclose(reduced, losses, rtol=1e-5)


def own_pipelines():
    """`fit` on a dataset made per worker: rows of the global batch are known only by summing."""
    strategy = bodies.strategy()
    x, y = cases.rows(30)

    def pipeline(context):
        # Worker 0 reads two rows of every three, worker 1 the third.
        mine = np.arange(30) % 3
        chosen = mine < 2 if context.input_pipeline_id == 0 else mine == 2
        size = 10 if context.input_pipeline_id == 0 else 5
        return tf.data.Dataset.from_tensor_slices((x[chosen], y[chosen])).batch(size)

    model = cases.compiled(strategy, metrics=["accuracy"])
    dataset = strategy.distribute_datasets_from_function(pipeline)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights()), history.history


def own_pipelines_plain():
    """The same global batches in one process."""
    x, y = cases.rows(30)
    order = np.concatenate([np.arange(30).reshape(2, 5, 3)[i].T.ravel() for i in range(2)])
    model = cases.compiled(None, metrics=["accuracy"])
    dataset = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(15)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights()), history.history


@TWO
def test_pipelines_per_worker_weigh_rows_exactly(world, backend, size):
    plain, history = own_pipelines_plain()
    for weights, logged in world(backend, size).run(own_pipelines):
        assert np.linalg.norm(weights - plain) <= 1e-5 * np.linalg.norm(plain)
        for name, values in history.items():
            np.testing.assert_allclose(logged[name], values, rtol=1e-5)


def nothing_left_patched():
    """Keras as it was, after a scope and a fit on two devices."""

    def patched():
        of_losses = loss.reduce_weighted_values, loss.scale_loss_for_distribution
        return keras.Model.compile, keras.metrics.Mean.update_state, *of_losses

    x, y = cases.rows(8)
    before = patched()
    cases.compiled(bodies.strategy(2)).fit(x, y, verbose=0)
    after = patched()
    plain = cases.compiled(None)
    return before == after, "fit" in vars(plain)


@pytest.mark.worlds(("local", 1))
def test_nothing_stays_patched(pool):
    assert pool.run(nothing_left_patched) == [(True, False)]


def one_reduction_per_window():
    """Bytes sent in an epoch of 4 steps, without and with a window of 4."""
    strategy = bodies.strategy()
    x, y = cases.rows(32)
    sent = []
    for steps in (None, 4):
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        model = cases.compiled(strategy, optimizer=optimizer)
        model.fit(x, y, batch_size=8, verbose=0)
        before = strategy.communicator.bytes_sent
        model.fit(x, y, batch_size=8, verbose=0)
        sent.append(strategy.communicator.bytes_sent - before)
    return sent, 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@TWO
def test_accumulation_reduces_once_per_window(world, backend, size):
    for (every_step, every_window), gradient_bytes in world(backend, size).run(
        one_reduction_per_window
    ):
        # Three of four gradient reductions are gone; metric state still travels every step.
        assert every_step - every_window == pytest.approx(3 * gradient_bytes, rel=0.05)


class Limit:
    """Stops after so many batches."""

    def __init__(self, after):
        self.after, self.batches = after, 0

    def __call__(self, model):
        self.batches += 1
        if self.batches == self.after:
            model.stop_training = True


class Stop(keras.callbacks.Callback):
    """Wants to stop after so many batches, as its list of rules says."""

    def __init__(self, after):
        super().__init__()
        self.rules = [Limit(after)]

    def on_train_batch_end(self, batch, logs=None):
        for rule in self.rules:
            rule(self.model)


class StopAtEpoch(keras.callbacks.Callback):
    """Wants to stop when the second epoch begins, as a limit of time does."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.stop_training = True


class StopsMeanwhile(keras.utils.PyDataset):
    """Wants to stop on its own thread, at any time in the first epoch."""

    def __init__(self, model, x, y):
        super().__init__()
        self.model, self.x, self.y = model, x, y

    def __len__(self):
        return 5

    def __getitem__(self, index):
        if index == 2 and self.model is not None:
            self.model.stop_training = True
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], self.y[rows]


def stopped():
    """Three of `fit`, 3 epochs of 5 steps, which the last rank alone stops: after 3 steps, at the
    beginning of the second epoch, and on another thread.

    Returns the steps taken, the epochs logged, and the weights after each.
    """
    strategy = bodies.strategy()
    x, y = cases.rows(40)
    last = strategy.rank == strategy.size - 1
    model, found = cases.compiled(strategy, lambda: keras.Sequential(cases.dense_layers())), []
    for callback in (Stop(after=3), StopAtEpoch(), None):
        before = int(model.optimizer.iterations.numpy())
        given = {"callbacks": [callback] if last and callback else [], "epochs": 3, "verbose": 0}
        if callback is None:
            fitted = model.fit(StopsMeanwhile(model if last else None, x, y), **given)
        else:
            fitted = model.fit(x, y, batch_size=8, **given)
        steps, epochs = int(model.optimizer.iterations.numpy()), len(fitted.history["loss"])
        found.append((steps - before, epochs, bodies.flat(model.get_weights())))
    return found


@TWO
def test_one_rank_that_stops_in_an_epoch_stops_all_at_that_step(world, backend, size):
    """Breaks when wishes are compared at the end of an epoch only: the ranks are then at different
    steps, and one waits in a sum for what the other will never send. A wish that no hook of a batch
    has is heard a few steps later, about a second at most; it was heard at the end of the epoch.
    """
    results = world(backend, size).run(stopped, timeout=60)
    for found in results:
        assert [one[:2] for one in found[:2]] == [(3, 1), (6, 2)]
        assert found[2][0] < 5 and found[2][1] == 1
        for one, other in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(one[2], other[2])


def look(batch, logs):
    """What a script's function does with a batch, nobody knows."""


class Saves(keras.callbacks.ModelCheckpoint):
    """Of a script: what it does when it saves, nobody knows."""


def given_hook():
    callback = keras.callbacks.History()
    callback.on_train_batch_end = look
    return callback


@pytest.mark.parametrize(
    "callback, stops",
    [
        (Stop(1), True),
        (keras.callbacks.LambdaCallback(on_train_batch_end=look), True),
        (keras.callbacks.TerminateOnNaN(), True),
        (Saves("x.keras", save_freq=2), True),
        (given_hook(), True),
        (StopAtEpoch(), False),
        (keras.callbacks.LambdaCallback(on_epoch_end=look), False),
        (keras.callbacks.ModelCheckpoint("x.keras", save_freq=2), False),
        (dtk.callbacks.Checkpoint("x"), False),
    ],
)
def test_ranks_agree_after_each_batch_only_where_a_callback_may_stop(callback, stops):
    """Each agreement takes half a step of a small model. A scan of code for `stop_training` saved
    it, and did not see helpers in lists or of other modules: their job stopped an epoch too late.
    """
    assert rank_checks._stops_in_epoch(callback) == stops


def mirrored_in_this_job():
    """What MirroredStrategy warns of: class, text and file of each warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MirroredStrategy(devices=1)
    return [(w.category.__name__, str(w.message), w.filename) for w in caught]


@TWO
def test_mirrored_strategy_in_a_job_of_several_processes_warns(world, backend, size):
    """Without a word every process would train a model of its own, on all of the data."""
    for rank, warned in enumerate(world(backend, size).run(mirrored_in_this_job)):
        ((kind, text, file),) = warned
        assert kind == "RuntimeWarning"
        assert f"rank {rank}: MirroredStrategy" in text and "the job has 2 processes" in text
        assert "use dtk.auto_strategy() or AllReduceStrategy()" in text
        assert file == __file__, "the warning must point at the script's own line"


@pytest.mark.parametrize("backend, size", [("local", 1)])
def test_mirrored_strategy_in_a_process_of_its_own_does_not_warn(world, backend, size):
    assert world(backend, size).run(mirrored_in_this_job) == [[]]


@pytest.mark.not_on_pretended_gpus("over NCCL all messages have one order")
@pytest.mark.worlds(("collective", 2))
def test_weights_are_updated_as_soon_as_their_bucket_is_there(pool):
    """Not when the last of all gradients is: each update waits for one collective, its own."""
    for updates in pool.run(graph_bodies.what_updates_wait_for):
        assert [len(before) for before in updates] == [1, 1, 1]
        assert len({name for before in updates for name in before}) > 1


def test_clearing_keras_inside_a_scope_does_not_leave_it():
    """Breaks as keras_tuner's search, whose models would be made outside, and then fails."""
    strategy = AllReduceStrategy("local")
    with strategy.scope():
        keras.utils.clear_session()
        assert tf.distribute.get_strategy() is strategy
        model = cases.small()
        model.compile(optimizer="sgd", loss="mse")
    assert not tf.distribute.has_strategy()
    assert trainer_of(model).strategy is strategy
