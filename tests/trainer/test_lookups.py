"""Rows of a table are read where they are: the same rows, the same gradient, and no whole table."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from dtk.trainer.tracing import lookups

from strategies.test_equivalence import run
from support import graph_bodies
from support.once import once
from trainer import lookup_bodies

ROWS = 7
PLACES = [[0, -1, 3], [3, 6, -7]]


def looked_up(variable, indices, axis=0):
    """What is taken, its gradient as rows and where they go, and the operations it took."""
    kinds = set()

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            taken = keras.ops.take(variable, indices, axis=axis)
            loss = tf.reduce_sum(tf.cast(taken, tf.float32) ** 2)
        gradient = tape.gradient(loss, variable)
        kinds.update(op.type for op in tf.compat.v1.get_default_graph().get_operations())
        if isinstance(gradient, tf.IndexedSlices):
            return taken, gradient.values, gradient.indices, gradient.dense_shape
        return taken, gradient

    return [np.asarray(one) for one in step()], kinds


def table(dtype="float32"):
    values = np.random.default_rng(1).normal(size=(ROWS, 3))
    return keras.Variable(values, dtype=dtype, name="table")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("of", ["float32", "float64", "bfloat16"])
def test_rows_and_gradients_are_keras_s(dtype, of):
    variable, indices = table(of), tf.constant(PLACES, dtype)
    own, read = looked_up(variable, indices)
    with lookups.in_place():
        found, kinds = looked_up(variable, indices)
    assert "ResourceGather" in kinds and not {"ReadVariableOp", "GatherV2"} & kinds
    assert "ReadVariableOp" in read
    for one, other in zip(found, own, strict=True):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    "variable, indices, axis",
    [
        (table(), tf.constant([2, -1]), 1),
        (table(), tf.constant([2, 20]), None),
        (table(), tf.constant([1, 2], tf.int16), 0),
        (tf.constant(np.ones((4, 2), "float32")), tf.constant([1, -2]), 0),
        (table(), [1, 2], 0),
    ],
)
def test_other_lookups_stay_keras_s(variable, indices, axis):
    own = keras.ops.take(variable, indices, axis=axis)
    with lookups.in_place():
        found = keras.ops.take(variable, indices, axis=axis)
    np.testing.assert_array_equal(found, own)


def test_ragged_indices_another_value_and_another_type():
    variable, indices = table(), tf.constant([1, 2])
    ragged = tf.ragged.constant([[1], [2, 3]])
    with lookups.in_place():
        assert isinstance(keras.ops.take(variable, ragged, axis=0), tf.RaggedTensor)
        with keras.StatelessScope([(variable, tf.zeros((ROWS, 3)))]):
            assert not np.any(keras.ops.take(variable, indices, axis=0))
        with AutocastScope("float16"):
            assert keras.ops.take(variable, indices, axis=0).dtype == tf.float16


@pytest.mark.worlds(("collective", 2))
def test_steps_do_not_read_the_table(pool):
    for trained, predicted in pool.run(graph_bodies.operations_of_a_lookup):
        assert "ResourceGather" in trained
        assert "ResourceGather" in predicted and "ReadVariableOp" not in predicted


FULL = pytest.mark.full
EVERY = tuple(lookup_bodies.OPTIMIZERS)


@pytest.mark.parametrize(
    "backend, size, recipes, compiled",
    [
        ("mirrored", 2, ("adam",), {}),
        pytest.param("collective", 2, ("adam", "clipnorm"), {}, marks=FULL),
        pytest.param("mirrored", 2, ("adam",), {"jit_compile": True}, marks=FULL),
        pytest.param("collective", 3, EVERY, {"steps_per_execution": 2}, marks=FULL),
        pytest.param("horovod-mpi", 2, EVERY, {}, marks=FULL),
        pytest.param("mirrored", 3, EVERY, {}, marks=FULL),
    ],
)
def test_places_and_words_train_as_in_one_process(world, backend, size, recipes, compiled):
    """Slices of places were gathered, not summed: Adam squared each worker's part by itself."""
    devices = () if backend == "mirrored" else (0,)
    results = run(
        world,
        backend,
        size,
        lookup_bodies.train_with,
        recipes,
        compiled,
        *devices,
        meanwhile=lambda: once(lookup_bodies.train_plain, recipes),
    )
    for mine in results:
        check_equal(mine, once(lookup_bodies.train_plain, recipes))


@pytest.mark.worlds(("local", 1))
def test_places_and_words_in_a_loop_of_ones_own(pool):
    (mine,) = pool.run(lookup_bodies.loop, 2)
    check_equal(mine, once(lookup_bodies.loop))


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("local", 1))
def test_places_that_are_looked_up_eagerly_are_refused(pool):
    """The self-test compared gradients, which are the same, and not what Adam makes of slices."""
    (said,) = pool.run(lookup_bodies.refusal_of_eager_steps)
    assert "their squares differ by" in said and "Nothing was updated" in said


@pytest.mark.worlds(("local", 1))
def test_one_process_may_look_up_eagerly(pool):
    """Nothing is summed there, and it was refused as on two."""
    (mine,) = pool.run(lookup_bodies.train_with, ("adam",), {"run_eagerly": True})
    check_equal(mine, once(lookup_bodies.train_plain, ("adam",)))


@FULL
@pytest.mark.worlds(("served", 2))
def test_places_and_words_train_as_in_one_process_behind_servers(pool):
    (mine,) = pool.run(lookup_bodies.train_served, EVERY, timeout=240)
    check_equal(mine, once(lookup_bodies.train_plain, EVERY))


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("served", 2))
def test_lookups_of_which_no_graph_tells_are_tried_or_refused_behind_servers(pool):
    ((tried, refused),) = pool.run(lookup_bodies.told_of_opaque_lookups)
    assert tried == "trained"
    assert "of which nothing tells whether they belong to rows" in refused


def check_equal(mine, expected):
    assert mine.keys() == expected.keys()
    apart = {
        name: np.linalg.norm(mine[name] - wanted) / np.linalg.norm(wanted)
        for name, wanted in expected.items()
    }
    assert max(apart.values()) <= 1e-5, apart
