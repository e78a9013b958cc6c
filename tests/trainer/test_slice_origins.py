"""The graph says of which lookups slices are one for each place, and of which one for each row."""

import keras
import pytest
import tensorflow as tf
from keras import ops

from dtk.trainer.tracing.lookups import LINES, PLACES, ROWS, pieces_of

LINES_OF_TABLE = 40
STORED = tf.Variable([[0, 1], [1, 0]], trainable=False)
COUNTER = tf.Variable(0)
SEEDS = keras.random.SeedGenerator(1)
KEYS = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
WORDS = keras.layers.TextVectorization(vocabulary=["a", "b", "c"])


def counted(x):
    COUNTER.assign_add(tf.reduce_max(x))
    return tf.range(3) + COUNTER


def within_branch(x):
    return tf.cond(tf.reduce_max(x) > 1, lambda: tf.range(2), lambda: tf.range(3))


def embedded(x):
    return ops.take(tf.ones([LINES_OF_TABLE, 3]), x, axis=0)


def of_places():
    yield "constants", lambda x: ops.arange(0, 6)
    yield "of the length", lambda x: ops.arange(0, ops.shape(x)[-1])
    yield "of the length from the end", lambda x: ops.arange(ops.shape(x)[1] - 1, -1, -1)
    yield "of a shape", lambda x: tf.range(tf.shape(x)[1])
    yield "of a layer's output", lambda x: ops.arange(ops.shape(embedded(x))[-2])
    yield "of a part of it", lambda x: ops.arange(ops.shape(embedded(x)[:, :-1])[1])
    yield "one for all", lambda x: ops.expand_dims(ops.arange(ops.shape(x)[1]), 0)
    yield "pairs", lambda x: ops.arange(4)[:, None] - ops.arange(4) + 3
    yield "a variable", lambda x: STORED
    yield "zeros of a column", lambda x: tf.zeros_like(embedded(x)[0, 0], tf.int32)
    yield (
        "of heads",
        lambda x: tf.range(
            tf.shape(
                tf.transpose(tf.reshape(embedded(x), [-1, tf.shape(x)[1], 3, 1]), [0, 2, 1, 3])
            )[2]
        ),
    )
    yield "of a product", lambda x: tf.range(tf.shape(embedded(x) @ tf.ones([3, 2]))[1])


def of_rows():
    yield "words", lambda x: x
    yield "words but the last", lambda x: x[:, :-1]
    yield "words as other numbers", lambda x: tf.cast(ops.where(x < 1, x, x + 1), "int64")
    yield "the first word", lambda x: x[:, 0]
    yield "flat", lambda x: tf.reshape(x, [-1])
    yield "a word before", lambda x: tf.concat([tf.zeros_like(x[:, :1]), x[:, 1:]], 1)
    yield "places of each row", lambda x: tf.zeros_like(x) + ops.arange(ops.shape(x)[1])
    yield "places broadcast", lambda x: ops.broadcast_to(ops.arange(ops.shape(x)[1]), ops.shape(x))
    yield "places tiled", lambda x: tf.tile(tf.range(3)[None], [tf.shape(x)[0], 1])
    yield "the largest of each row", lambda x: ops.argmax(embedded(x), -1)
    yield "strings", lambda x: KEYS(tf.gather(tf.constant(["a", "c"]), tf.minimum(x, 1)))
    yield "hashed", lambda x: keras.layers.Hashing(5)(x)
    yield "chosen", lambda x: tf.boolean_mask(x, x > 2)
    yield "drawn for each", lambda x: tf.random.uniform(tf.shape(x), 0, 9, tf.int32) + 0 * x


def unknown():
    yield "as many as there are rows", lambda x: ops.arange(ops.shape(x)[0])
    yield "as many as a row says", lambda x: ops.arange(ops.max(x))
    yield "drawn", lambda x: tf.random.uniform([3], 0, 9, tf.int32)
    yield "drawn by Keras", lambda x: keras.random.randint([3], 0, 9, seed=SEEDS)
    yield "counted", counted
    yield "the first row", lambda x: x[0]
    yield "of a branch", within_branch
    yield "rows turned", lambda x: tf.range(tf.shape(tf.transpose(x))[1])
    yield "rows in the middle", lambda x: tf.range(tf.shape(tf.reshape(embedded(x), [3, -1, 2]))[1])


def kinds_of(indices_of, spec, loss_of=None, own=True):
    """What is said of a table's gradient where data comes as `spec`."""
    table = tf.Variable(tf.ones([LINES_OF_TABLE, 2]))
    found = []

    @tf.function(input_signature=[spec], autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = (loss_of or (lambda t, i: tf.reduce_sum(tf.gather(t, i))))(table, indices_of(x))
        gradient = tape.gradient(loss, table)
        found.extend(pieces_of(gradient.indices, tf.compat.v1.get_default_graph() if own else None))

    step.get_concrete_function()
    return [piece[:2] for piece in found]


# As fit gives them; as a loop of the script's own may.
SPECS = {
    "in fit": {"spec": tf.TensorSpec([None, None], tf.int32)},
    "in a loop": {"spec": tf.TensorSpec([7, 5], tf.int32), "own": False},
}


@pytest.mark.parametrize("where", SPECS)
@pytest.mark.parametrize("indices_of", [pytest.param(f, id=name) for name, f in of_places()])
def test_places(indices_of, where):
    assert kinds_of(indices_of, **SPECS[where]) == [(PLACES, True)]


@pytest.mark.parametrize("where", SPECS)
@pytest.mark.parametrize("indices_of", [pytest.param(f, id=name) for name, f in of_rows()])
def test_rows(indices_of, where):
    ((kind, sure),) = kinds_of(indices_of, **SPECS[where])
    # Where a graph knows the number of rows, constants may have an entry for each.
    assert (kind, sure) == (ROWS, True) or (where == "in a loop" and not sure)


@pytest.mark.parametrize("indices_of", [pytest.param(f, id=name) for name, f in unknown()])
def test_unknown(indices_of):
    ((_, sure),) = kinds_of(indices_of, **SPECS["in fit"])
    assert not sure


def test_words_of_strings_and_ragged_ones():
    assert kinds_of(WORDS, tf.TensorSpec([None], tf.string)) == [(ROWS, True)]
    ragged = tf.RaggedTensorSpec([None, None], tf.int32)
    assert kinds_of(lambda x: x.values, ragged) == [(ROWS, True)]
    assert kinds_of(lambda x: x.to_tensor(), ragged) == [(ROWS, True)]
    ((_, sure),) = kinds_of(lambda x: tf.range(tf.shape(x.to_tensor())[1]), ragged)
    assert not sure


def test_lines_that_are_read_once():
    def loss_of(table, x):
        return tf.reduce_sum(tf.nn.embedding_lookup_sparse(table, x, None, combiner="sum"))

    spec = tf.SparseTensorSpec([None, None], tf.int64)
    assert kinds_of(lambda x: x, spec, loss_of) == [(LINES, True)]


def test_lines_of_sparse_rows_in_a_dense_layer():
    def loss_of(table, x):
        return tf.reduce_sum(keras.ops.matmul(x, table))

    spec = tf.SparseTensorSpec([None, LINES_OF_TABLE], tf.float32)
    assert kinds_of(lambda x: x, spec, loss_of) == [(LINES, True)]


def test_words_and_places_of_one_table():
    def loss_of(table, x):
        places = tf.gather(table, tf.range(tf.shape(x)[1]))
        return tf.reduce_sum((tf.gather(table, x) + places) ** 2) + tf.reduce_sum(
            tf.gather(table, tf.cast(x[:, 0], tf.int64))
        )

    found = kinds_of(lambda x: x, SPECS["in fit"]["spec"], loss_of)
    assert sorted(found) == [(PLACES, True), (ROWS, True), (ROWS, True)]


def test_nothing_is_known_of_what_is_computed_eagerly():
    ((kind, sure, count),) = pieces_of(tf.constant([1, 2]))
    assert (kind, sure, count) == (ROWS, False, 2)
