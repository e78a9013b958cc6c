"""Every rank its own part of the data, the same number of steps on all."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.errors import DisagreementError
from dtk.strategies import undistributed

from support import bodies, cases
from support.once import once

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


def write(folder, lines):
    names = []
    for i, numbers in enumerate(lines):
        names.append(folder / f"part-{i}.txt")
        names[-1].write_text("\n".join(map(str, numbers)))
    return [str(name) for name in names]


def elements_of(files, batch_size, steps=None):
    """Rows each step of this rank reads, as numbers."""
    strategy = bodies.strategy()  # before TensorFlow's first operation
    if files is None:
        source, read = tf.data.Dataset.range(23), None
    else:
        source, read = files, lambda name: tf.data.TextLineDataset(name).map(_number)
    dataset = dtk.data.shard(source, strategy, batch_size, read=read, steps=steps)
    return [batch.numpy().tolist() for batch in dataset]


def _number(line):
    return tf.strings.to_number(line, tf.int64)


def test_elements_are_dealt_out_once(world, backend, size):
    ranks = world(backend, size).run(elements_of, None, 6)
    assert len({len(steps) for steps in ranks}) == 1
    rows = [row for steps in ranks for batch in steps for row in batch]
    assert sorted(rows) == list(range(23))


def test_whole_files_go_to_one_rank_and_what_is_left_out_is_said_once(
    world, backend, size, tmp_path
):
    """Breaks as a deadlock: rank 0 has 9 rows, rank 1 has 4."""
    files = write(tmp_path, [range(5), range(5, 9), range(9, 13)])
    said, nothing = world(backend, size).run(said_about, files, 4)
    assert said.startswith("shard: 5 of 13 rows are left out of every epoch, because ranks hold ")
    assert "[9, 4] rows and all take the 2 steps of the shortest" in said
    assert nothing == "" and world(backend, size).run(said_about, None, 6) == ["", ""]
    first, second = world(backend, size).run(elements_of, files, 4)
    assert len(first) == len(second) == 2
    assert [row for batch in second for row in batch] == [5, 6, 7, 8]
    assert [row for batch in first for row in batch] == [0, 1, 2, 3]


def said_about(files, batch_size):
    """What is printed while the files are divided."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        elements_of(files, batch_size)
    return told.getvalue()


def refused(files, batch_size, steps):
    """What a rank says about its number of steps, given per rank."""
    rank = bodies.strategy().rank
    try:
        elements_of(files, batch_size, steps[rank])
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "steps, message",
    [
        ((12, 12), "rank {rank}: steps=12, but rank 1 has data for 11; give at most that"),
        ((11, 9), "the same on all ranks (by rank: [11, 9])"),
        ((None, 9), "the same on all ranks (by rank: [None, 9])"),
        ((0, 0), "rank {rank}: steps=0, but it must be 1 or more"),
    ],
)
def test_steps_no_rank_has_data_for_are_refused_on_all(world, backend, size, steps, message):
    """Breaks as TensorFlow's cardinality error on one rank, while the other waits for it."""
    if steps == (12, 12):  # and those that everyone has data for are taken
        ranks = world(backend, size).run(elements_of, None, 2, 11)
        assert [len(taken) for taken in ranks] == [11, 11]
    for rank, text in enumerate(world(backend, size).run(refused, None, 2, steps)):
        assert message.format(rank=rank) in text


def test_fewer_files_than_workers_is_fine(world, backend, size, tmp_path):
    files = write(tmp_path, [range(7)])
    ranks = world(backend, size).run(elements_of, files, 4)
    rows = [row for steps in ranks for batch in steps for row in batch]
    assert sorted(rows) == list(range(7))


def trained_on_shards(whole_first):
    """`fit` on shards of a dataset."""
    strategy = bodies.strategy()
    whole = tf.data.Dataset.from_tensor_slices(cases.rows(45))
    dealt = dtk.data.shard(whole, strategy, 15).map(_halved, num_parallel_calls=2).prefetch(1)
    model, again = cases.compiled(strategy), dealt.take(1 + strategy.rank).repeat(2).enumerate()
    model.fit(again.map(lambda _, batch: batch), verbose=0)  # still its own batches
    assert int(model.optimizer.iterations.numpy()) == 4, "as many as rank 1 has"
    return fitted(strategy, whole, dealt, whole_first)


def _halved(x, y):
    return x / 2, y


def fitted(strategy, whole, dataset, whole_first):
    model = cases.compiled(strategy, metrics=["accuracy"])
    if whole_first:
        model.fit(whole.batch(15), verbose=0, shuffle=False)
    history = model.fit(dataset, epochs=3, verbose=0, shuffle=False)
    return bodies.flat(model.get_weights()), history.history


def trained_plainly(whole_first):
    """The plain fit on the same global batches."""
    x, y = cases.rows(45)
    whole = tf.data.Dataset.from_tensor_slices((x, y))
    order = []  # step by step: rank 0's eight rows, then rank 1's seven
    queues = [list(range(45))[rank::2] for rank in range(2)]
    for _ in range(3):
        for queue, count in zip(queues, (8, 7), strict=True):
            order += queue[:count]
            del queue[:count]
    batches = [len(order[i * 15 : i * 15 + 15]) for i in range(3)]
    assert batches[:2] == [15, 15]
    dealt = tf.data.Dataset.from_tensor_slices((x[order] / 2, y[order])).batch(15)
    return fitted(None, whole, dealt, whole_first)


@pytest.mark.full_but("True-collective-2")
@pytest.mark.parametrize("whole_first", [False, True])
def test_training_on_shards_weighs_rows_exactly(world, backend, size, whole_first):
    """With a fit on the whole dataset before, its step knew the rows of a batch; this must not."""
    plain, expected = once(trained_plainly, whole_first)
    for mine, logged in world(backend, size).run(trained_on_shards, whole_first):
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
        for name, values in expected.items():
            np.testing.assert_allclose(logged[name], values, rtol=1e-5)


def trained_on_unlike_lengths(executions, unknown):
    """`fit` and `evaluate`: three batches of rank 0, two of rank 1; `unknown` has no length."""
    strategy = bodies.strategy()
    x, y = cases.rows(40)
    begin, end = ((0, 24), (24, 40))[strategy.rank]

    def own(context):
        dataset = tf.data.Dataset.from_tensor_slices((x[begin:end], y[begin:end]))
        filtered = dataset.filter(lambda x, y: True)
        return (filtered if strategy.rank in unknown else dataset).batch(8)

    dataset = strategy.distribute_datasets_from_function(own)
    return fitted_and_evaluated(strategy, dataset, executions)


def fitted_and_evaluated(strategy, dataset, executions):
    model = cases.compiled(strategy, metrics=["accuracy"], steps_per_execution=executions)
    history = model.fit(dataset, epochs=2, verbose=0, shuffle=False).history
    evaluated = model.evaluate(dataset, verbose=0)
    steps = int(model.optimizer.iterations.numpy())
    return bodies.flat(model.get_weights()), history, evaluated, steps


def trained_on_their_rows(executions):
    x, y = cases.rows(40)
    order = [*range(8), *range(24, 32), *range(8, 16), *range(32, 40), *range(16, 24)]
    dataset = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(16)
    return fitted_and_evaluated(None, dataset, executions)


@pytest.mark.parametrize("executions, unknown", [(1, [0, 1]), (1, [0]), (2, [])])
def test_an_epoch_lasts_as_long_as_any_rank_has_rows(world, backend, size, executions, unknown):
    """Breaks as a deadlock: rank 1 had no more batches, and rank 0 waited for it."""
    plain, expected, evaluated, steps = once(trained_on_their_rows, executions)
    ranks = world(backend, size).run(trained_on_unlike_lengths, executions, unknown, timeout=60)
    for mine, logged, found, taken in ranks:
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
        for name, values in expected.items():
            np.testing.assert_allclose(logged[name], values, rtol=1e-5)
        np.testing.assert_allclose(found, evaluated, rtol=1e-5)
        assert taken == steps == 6


def trained_on_items():
    """`fit` on shared items, the plain fit on the same rows, and what is said of what is slow."""
    strategy = bodies.strategy()
    x, y = cases.rows(30)

    class Items(keras.utils.PyDataset):
        begin = 0

        def __len__(self):
            return 5

        def __getitem__(self, index):
            time.sleep(0.02)
            rows = np.arange(6) + (self.begin + index * 6) % 30
            return x[rows], y[rows]

        def on_epoch_end(self):
            self.begin += 6

    def called(x, y):
        return tf.ensure_shape(tf.numpy_function(np.copy, [x], x.dtype), x.shape), y

    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        model = cases.compiled(strategy)
        model.fit(dtk.data.shard(Items(), strategy), epochs=2, verbose=0, shuffle=False)
        plain = cases.compiled(None)
        with undistributed():
            order = [*range(24), *range(6, 30)]  # four items of each epoch
            rows = tf.data.Dataset.from_tensor_slices((x[order], y[order]))
            plain.fit(rows.batch(12), verbose=0, shuffle=False)
        weights = [bodies.flat(each.get_weights()) for each in (model, plain)]
        model.fit(Items(), epochs=4, verbose=0, shuffle=False)
        os.environ["DTK_SELF_TEST"] = "only"
        try:
            next(iter(strategy.experimental_distribute_dataset(rows.map(called).batch(6))))
        finally:
            del os.environ["DTK_SELF_TEST"]
    return weights, told.getvalue()


@pytest.mark.full("a cheaper test holds its rule")
def test_items_are_made_by_one_rank_each_and_slow_ones_are_told_of(world, backend, size):
    first, second = world(backend, size).run(trained_on_items)
    for (mine, plain), _ in (first, second):
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
    said = r"dtk: .*every worker m|shard:"
    lines = [line for line in first[1].splitlines() if re.match(said, line)]
    assert len(lines) == 3
    assert lines[0].startswith("shard: 1 of 5 batches are left out of every epoch")
    items = (
        r"dtk: every worker makes every item of the PyDataset at .*test_shard.py:\d+, 0.02\d s each"
    )
    assert re.match(items, lines[1]) and "dtk.data.shard(" in lines[1]
    rows = r"dtk: at .*test_shard.py:\d+, every worker maps all rows of the dataset, not only its "
    assert re.match(rows + r"own: called \(.*test_shard.py:\d+\) calls PyFunc", lines[2])
    assert re.search(r"dtk.data.shard\(.* saves 0.\d{3} of 0.\d{3} s a step", lines[2])
    assert "every worker" not in second[1]


def trained_on_batches():
    """Batches as Keras's utilities make them, mapped in the way that rank 0 says, and as before."""
    strategy = bodies.strategy()
    x, y = cases.rows()
    called = []

    def doubled(x, y):
        return tf.ensure_shape(tf.numpy_function(seen, [x], x.dtype), x.shape), y

    def seen(x):
        called.append(len(x))
        return 2 * x

    def batches():  # the last one has a single row
        rows = tf.data.Dataset.from_tensor_slices((x[:25], y[:25]))
        return rows.map(lambda x, y: (x, y)).batch(12).prefetch(2)

    told, trained = io.StringIO(), []
    with contextlib.redirect_stdout(told):
        shared = dtk.data.shard(batches(), strategy).map(doubled).cache()
        for given, data in ((strategy, shared), (None, batches().map(doubled))):
            called.clear()
            model = cases.compiled(given)
            with undistributed() if given is None else contextlib.nullcontext():
                model.fit(data, epochs=2, verbose=0, shuffle=False)
            trained.append((bodies.flat(model.get_weights()), sum(called)))
        model = cases.compiled(strategy)
        model.fit(x, y, validation_data=batches().map(doubled), batch_size=96, verbose=0)
        series = {"data": x[:30], "targets": y[:30], "sequence_length": 3, "shuffle": False}
        windows = keras.utils.timeseries_dataset_from_array(**series, batch_size=8)
        print("windows", [len(one) for one, _ in dtk.data.shard(windows, strategy)])
        single = keras.utils.timeseries_dataset_from_array(**series, batch_size=None)
        with pytest.raises(ValueError, match="batch_size=None of a dataset of single elements"):
            dtk.data.shard(single, strategy)
    return trained, told.getvalue().splitlines()


def test_batches_are_cut_in_the_way_that_is_said_of_them(world, backend, size):
    """It took single elements, and the datasets of Keras's utilities have batches."""
    for rank, (trained, told) in enumerate(world(backend, size).run(trained_on_batches)):
        (mine, own), (plain, all_of_them) = trained
        assert np.linalg.norm(mine - plain) <= 1e-5 * np.linalg.norm(plain)
        assert own in (12, 13) and all_of_them == 50  # the cache holds the second epoch
        assert "windows [4, 4, 4, 2]" in told
        said = [one for one in told if "every worker maps" in one]
        assert len(said) == (rank == 0), told
        for one in said:
            assert "maps all rows of validation_data, not only its own: its map takes or" in one
            assert "dtk.data.shard(dataset, strategy).map(f), in place of dataset.map(f)" in one


def no_end_no_start():
    strategy, said = bodies.strategy(), []
    for dataset in (tf.data.Dataset.range(4).repeat(), tf.data.Dataset.range(1)):
        try:
            dtk.data.shard(dataset, strategy, 2)
        except ValueError as error:
            said.append(str(error))
    return said


def test_an_endless_source_or_none_at_all_is_refused_on_all(world, backend, size):
    for rank, (endless, nothing) in enumerate(world(backend, size).run(no_end_no_start)):
        assert endless.startswith(f"rank {rank}: shard of an endless dataset needs steps=")
        assert "rank 1 has no data at all (rows by rank: [1, 0])" in nothing


def seeds():
    own = dtk.data.set_seed(7, bodies.strategy())
    return own, np.random.rand()


def test_seeds_agree_where_they_must(world, backend, size):
    (first, drawn), (second, drawn_too) = world(backend, size).run(seeds)
    assert first == 7 != second
    assert drawn == drawn_too


def sharded_in_any_order():
    """What is said of datasets that each rank shuffles by itself; one with a seed is taken."""
    strategy = bodies.strategy()
    tf.random.set_seed(strategy.rank)
    rows = tf.data.Dataset.range(20)
    told = []
    for data, batch_size in ((rows.shuffle(20), 4), (rows.shuffle(20).batch(4), None)):
        with pytest.raises(DisagreementError) as raised:
            dtk.data.shard(data, strategy, batch_size)
        told.append(str(raised.value))
    tf.random.set_seed(1)
    alike = dtk.data.shard(rows.shuffle(20, seed=7), strategy, 4)
    return told, [int(row) for row in alike.unbatch()]


def test_ranks_that_shuffle_in_other_orders_share_nothing(world, backend, size):
    """They trained on some rows twice, and never on others."""
    ranks = world(backend, size).run(sharded_in_any_order)
    assert sorted(row for _, rows in ranks for row in rows) == [*range(20)]
    for rank, (told, _) in enumerate(ranks):
        for one in told:
            assert one.startswith(f"rank {rank}: the dataset that shard was given shuffles in")


def fitted_on_ragged_batches():
    """What is said of unlike numbers of ragged batches; how many steps are taken of as many."""
    strategy = bodies.strategy()
    with strategy.scope():
        rows = keras.Input((None,), ragged=True)
        total = keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1, keepdims=True), (1,))(rows)
        model = keras.Model(rows, keras.layers.Dense(1)(total))
        model.compile("sgd", "mse")
    ragged = tf.RaggedTensor.from_row_lengths(tf.ones(12), [1, 2, 3, 3, 2, 1])
    data = tf.data.Dataset.from_tensor_slices((ragged, tf.ones(6))).batch(1)
    own = strategy.distribute_datasets_from_function(lambda context: data.skip(strategy.rank))
    with pytest.raises(ValueError, match="ranks bring different numbers") as raised:
        model.fit(own, verbose=0)
    return str(raised.value), len(model.fit(own, steps_per_epoch=4, verbose=0).epoch)


def test_ragged_batches_of_unlike_numbers_are_refused_for_what_they_are(world, backend, size):
    """Ranks were told to start the same script with the same arguments."""
    for rank, (told, epochs) in enumerate(world(backend, size).run(fitted_on_ragged_batches)):
        assert f"rank {rank}: " in told and "(by rank: [6, 5])" in told
        assert epochs == 1
