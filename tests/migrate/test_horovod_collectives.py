"""Horovod's collectives: numbers, gradients and errors are those of Horovod 0.28.1 on two ranks."""

from __future__ import annotations

import importlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk.migrate.horovod as hvd
from dtk.errors import CommunicatorError, NotDistributedError, ReplacedError
from migrate.test_horovod import initialized, real

two_ranks = pytest.mark.worlds(("collective", 2))
each = pytest.mark.worlds(("collective", 2), ("mpi-wheel", 2))


def as_lists(found):
    if isinstance(found, tf.IndexedSlices):
        return [as_lists(found.values), as_lists(found.indices)]
    if isinstance(found, (list, tuple)):
        return [as_lists(one) for one in found]
    return None if found is None else found.numpy().tolist()


def scaled():
    with initialized():
        small = tf.constant([3, -3, 5, -5])
        wide = tf.constant([2**60 + 1], tf.int64)
        return as_lists(
            [
                hvd.allreduce(small, op=hvd.Sum, prescale_factor=0.5),
                hvd.allreduce(small, op=hvd.Sum, postscale_factor=0.3),
                hvd.allreduce(small, op=hvd.Max, prescale_factor=0.5),
                hvd.allreduce(tf.constant([3, 200], tf.uint8), op=hvd.Sum, prescale_factor=0.5),
                hvd.allreduce(wide, op=hvd.Sum, prescale_factor=2.0),
                hvd.reducescatter(tf.constant([4, 4]), op=hvd.Sum, prescale_factor=0.5),
            ]
        )


@two_ranks
def test_integers_are_scaled_in_float64(pool):
    """A factor of 0.5 was made an integer, 0, and so was every result."""
    for found in pool.run(scaled):
        assert found == [
            [2, -2, 4, -4],
            [1, -1, 3, -3],
            [1, -1, 2, -2],
            [2, 200],
            [2**62],
            [4],
        ]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_floats_are_scaled_in_float32(dtype):
    """The factor was rounded to 16 bits first: x * 0.19151945 was off by a bit."""
    with initialized():
        given = tf.cast(tf.range(1, 200), dtype)
        right = tf.cast(tf.cast(given, tf.float32) * 0.19151945, dtype)
        for place in ("prescale_factor", "postscale_factor"):
            found = hvd.allreduce(given, op=hvd.Sum, **{place: 0.19151945})
            assert found.dtype == dtype
            assert bool(tf.reduce_all(found == right))


def weighed(found, rank):
    """A loss in which each element has a weight of its own, and each rank other ones."""
    weights = [tf.range(tf.size(t)) + 1 + rank for t in found]  # all are vectors
    parts = zip(found, weights, strict=True)
    return tf.add_n([tf.reduce_sum(t * tf.cast(w, t.dtype)) for t, w in parts])


def gradients():
    """Of each collective, eagerly and in a graph."""
    with initialized():
        rank = hvd.rank()
        x = tf.Variable([1.0 + rank, 2.0 - rank])
        calls = {
            "sum": lambda: [hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)],
            "average": lambda: [hvd.allreduce(x, postscale_factor=3.0)],
            "fp16": lambda: [hvd.allreduce(x, compression=hvd.Compression.fp16)],
            "max": lambda: [hvd.allreduce(x, op=hvd.Max)],
            "gather": lambda: [hvd.allgather(x[: 1 + rank])],
            "from 0": lambda: [hvd.broadcast(x, 0)],
            "from 1": lambda: [hvd.broadcast(x, 1)],
            "scatter": lambda: [hvd.reducescatter(x, op=hvd.Sum)],
            "scatter mean": lambda: [hvd.reducescatter(x)],
            "all to all": lambda: [hvd.alltoall(x)],
            "splits": lambda: [hvd.alltoall(x, splits=[1, 1])[0]],
            "group": lambda: hvd.grouped_allreduce([x, x * 2]),
            "gathers": lambda: hvd.grouped_allgather([x[:1], x * 2]),
            "scatters": lambda: hvd.grouped_reducescatter([x, x * 2]),
        }

        def gradient(call):
            with tf.GradientTape() as tape:
                loss = weighed(call(), rank)
            return tf.convert_to_tensor(tape.gradient(loss, x))

        eager = {name: as_lists(gradient(call)) for name, call in calls.items()}
        graph = tf.function(lambda: {name: gradient(call) for name, call in calls.items()})
        assert eager == {name: as_lists(found) for name, found in graph().items()}
        return eager


@two_ranks
def test_gradients_are_horovods(pool):
    """They were None, without a word."""
    both = {
        "sum": [6.0, 10.0],
        "average": [4.5, 7.5],
        "fp16": [1.5, 2.5],
        "max": [2.0, 3.0],
        "scatter": [2.0, 4.0],
        "scatter mean": [1.0, 2.0],
        "group": [4.5, 7.5],
        "scatters": [3.0, 6.0],
    }
    first, second = pool.run(gradients)
    assert first == both | {
        "gather": [1.5, 0.0],
        "from 0": [1.5, 2.5],
        "from 1": [0.0, 0.0],
        "all to all": [1.0, 2.0],
        "splits": [1.0, 2.0],
        "gathers": [4.5, 5.0],
    }
    assert second == both | {
        "gather": [2.5, 3.5],
        "from 0": [0.0, 0.0],
        "from 1": [1.5, 2.5],
        "all to all": [2.0, 3.0],
        "splits": [2.0, 3.0],
        "gathers": [9.5, 9.0],
    }


def second_order():
    with initialized():
        x = tf.Variable([2.0])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                y = hvd.allreduce(x**2, op=hvd.Sum) ** 3
            first = inner.gradient(y, x)
        return as_lists([first, outer.gradient(first, x)])


@two_ranks
def test_gradients_have_gradients(pool):
    assert pool.run(second_order) == [[[1536.0], [3840.0]]] * 2, "Horovod's own"


def mismatched():
    with initialized():
        rank, said = hvd.rank(), []
        ones = tf.ones([17])
        for call in (
            lambda: hvd.allgather(tf.ones([17, 10 * (rank + 1)])),
            lambda: hvd.allreduce(tf.ones([17 + rank])),
            lambda: hvd.allreduce(tf.cast(ones, "int32" if rank else "float32"), op=hvd.Sum),
            lambda: hvd.broadcast(tf.ones([17 + rank]), 0),
            lambda: hvd.broadcast(ones, rank),
            lambda: hvd.allreduce(ones) if rank else hvd.broadcast(ones, 0),
        ):
            with pytest.raises(CommunicatorError) as error:
                call()
            said.append(str(error.value))
        return said, as_lists(hvd.allreduce(tf.ones([2]), op=hvd.Sum))


@each
def test_every_rank_refuses_what_ranks_give_differently(pool):
    """Roots that differ went unseen; otherwise one rank raised, and the other waited for it."""
    for rank, (said, after) in enumerate(pool.run(mismatched)):
        assert after == [2.0, 2.0], "the next collective works"
        for message, *parts in zip(
            said,
            ["(10,)", "(17,)", "float32 (17,)", "(17,)", "root 0", "broadcast"],
            ["(20,)", "(18,)", "int32 (17,)", "(18,)", "root 1", "all-reduce"],
            strict=True,
        ):
            assert message.startswith(f"rank {rank}: ")
            of_0, of_1 = message.split("; rank 1 is in ")
            assert parts[0] in of_0 and parts[1] in of_1.partition(". ")[0]


def values():
    """What the names of `horovod.tensorflow` alone return."""
    with initialized():
        rank = hvd.rank()
        variable = tf.Variable([float(rank)])
        slices = tf.IndexedSlices(tf.ones([1, 2]) * (rank + 1), tf.constant([1 + rank]))
        hvd.barrier()
        found = {
            "all to all": hvd.alltoall(tf.range(4.0) + 10 * rank),
            "splits": hvd.alltoall(tf.range(3.0) + 10 * rank, splits=[1, 2]),
            "group": hvd.grouped_allreduce([tf.ones([2]) * (rank + 1), slices]),
            "gathers": hvd.grouped_allgather([tf.ones([1 + rank]), tf.ones([1]) * rank]),
            "scatters": hvd.grouped_reducescatter([tf.range(2.0) * (rank + 1)]),
            "sparse": hvd.allreduce(slices, op=hvd.Sum),
            "place": [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()],
            "included": hvd.process_set_included_op(),
            "from 1": hvd.broadcast_([variable], 1),
            "variable": variable,
            "arguments": hvd.allreduce(1.0, device_dense="", process_set=hvd.global_process_set),
        }
        return {name: as_lists(one) for name, one in found.items()}


@two_ranks
def test_values_are_horovods(pool):
    """These names were missing."""
    for rank, found in enumerate(pool.run(values)):
        assert found == {
            "all to all": [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]][rank],
            "splits": [[[0.0, 10.0], [1, 1]], [[1.0, 2.0, 11.0, 12.0], [2, 2]]][rank],
            "group": [[1.5, 1.5], [[[0.5, 0.5], [1.0, 1.0]], [1, 2]]],
            "gathers": [[1.0, 1.0, 1.0], [0.0, 1.0]],
            "scatters": [[[0.0], [1.5]][rank]],
            "sparse": [[[1.0, 1.0], [2.0, 2.0]], [1, 2]],
            "place": [rank, 2, rank, 2],
            "included": 1,
            "from 1": [[1.0]],
            "variable": [1.0],
            "arguments": 1.0,
        }


def loop(in_graph):
    """A loop as Horovod's examples have it: each rank's own rows, and weights from rank 0."""
    with initialized():
        rank, size = hvd.rank(), hvd.size()
        keras.utils.set_random_seed(1 + rank)
        table = keras.layers.Embedding(4, 2)
        model = keras.Sequential([keras.Input((2,)), table, keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables(model.variables, root_rank=0)

        def step(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(rows, training=True) ** 2)
            tape = hvd.DistributedGradientTape(tape)
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

        step = tf.function(step) if in_graph else step
        rows = np.arange(8).reshape(4, 2) % 4
        for _ in range(3):
            step(tf.constant(rows[rank * 4 // size : (rank + 1) * 4 // size]))
        return model.get_weights()


@two_ranks
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_loop_with_a_tape_ends_as_one_process_with_all_rows(pool, in_graph):
    alone = loop(in_graph)
    for weights in pool.run(loop, in_graph):
        for one, other in zip(weights, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def without_a_tape():
    with initialized():
        variable, optimizer = tf.Variable([1.0]), keras.optimizers.SGD(0.1)
        summed = tf.Variable([1.0])
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = summed * summed
        optimizer.apply_gradients([(tape.gradient(loss, summed), summed)])
        optimizer = keras.optimizers.SGD(0.1)
        with pytest.raises(NotDistributedError, match=r"strategy\.run"):
            optimizer.apply_gradients([(tf.ones([1]), variable)])


@two_ranks
def test_a_loop_that_sums_nothing_is_refused(pool):
    pool.run(without_a_tape)


def test_tapes_have_the_rest_of_keras_own():
    with initialized():
        x, y = tf.Variable(2.0), tf.Variable(1.0)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = x * x
        assert tape.watched_variables() == (x,)
        found = tape.gradient(loss, {"x": x, "y": y})
        assert float(found["x"]) == 4.0 and found["y"] is None
        with pytest.raises(ReplacedError, match="process_set"):
            hvd.DistributedGradientTape(tf.GradientTape(), process_set=object())
        with pytest.raises(ReplacedError, match=r"dtk\.layers"):
            tape.register_local_source(x)


def test_what_is_not_there_says_what_is():
    for name, cure in (
        ("SyncBatchNormalization", "synchronized=True"),
        ("PartialDistributedGradientTape", "DistributedGradientTape"),
        ("join", "steps_per_epoch"),
    ):
        with pytest.raises(ReplacedError, match=cure):
            getattr(hvd, name)()
    with pytest.raises(AttributeError, match=r"hvd\.nothing is not in .* docs/migrating\.md"):
        _ = hvd.nothing
    with initialized():
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]))
        for arguments in ({"op": hvd.Max}, {"prescale_factor": 2.0}):
            with pytest.raises(ReplacedError, match="IndexedSlices"):
                hvd.allreduce(slices, **arguments)
        with pytest.raises(ReplacedError, match="process_set"):
            hvd.allgather([1.0], process_set=object())
        with pytest.raises(ReplacedError, match="process_set_id=1"):
            hvd.size_op(1)
        with pytest.raises(TypeError, match="devise_dense"):
            hvd.allreduce(1.0, devise_dense="")


@real
def test_every_name_of_horovod_tensorflow_is_there_or_says_what_is():
    missing = []
    for name, theirs in vars(importlib.import_module("horovod.tensorflow")).items():
        if name.startswith("_") or isinstance(theirs, types.ModuleType):
            continue
        try:
            getattr(hvd, name)
        except AttributeError as error:
            assert "docs/migrating.md" in str(error)
            missing.append(name)
    helpers = {"check_extension", "check_num_rank_power_of_2", "split_list", "version"}
    more = {"handle_average_backwards_compatibility", "vars_to_refs", "refs_to_vars"}
    assert set(missing) <= helpers | more | {"LocalGradientAggregationHelper"}
