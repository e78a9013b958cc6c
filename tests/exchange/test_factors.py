"""Kernels' gradients travel as their factors where that is less, and the sums stay the same."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.communicators.local import LocalCommunicator, NullCommunicator
from dtk.exchange import factors

from exchange.exchanged import apart
from support import bodies

KERNEL = (200, 160)

KERNEL_BYTES = 4 * KERNEL[0] * KERNEL[1]


def data(rows):
    random = np.random.default_rng(1)
    return random.normal(size=(rows, KERNEL[0])).astype("float32"), random.integers(0, 10, rows)


def compiled(optimizer):
    keras.utils.set_random_seed(4)
    hidden = keras.layers.Dense(KERNEL[1], activation="relu")
    model = keras.Sequential([keras.Input(KERNEL[:1]), hidden, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.get(optimizer), loss)
    return model


def train(where, rows, batch, optimizer="adam", alike=True):
    """Weights after two epochs, and the bytes this rank sent in the second."""
    if where == "plain":
        model, counted = compiled(optimizer), LocalCommunicator()
    else:
        strategy = bodies.strategy()
        counted = strategy.communicator
        assert counted.alike  # one host
        counted.alike = alike
        with strategy.scope():
            model = compiled(optimizer)
    for _ in range(2):
        before = counted.bytes_sent
        model.fit(*data(rows), batch_size=batch, shuffle=False, verbose=0)
    counted.alike = True
    return np.concatenate([w.ravel() for w in model.get_weights()]), counted.bytes_sent - before


plain = functools.cache(functools.partial(train, "plain"))


@pytest.mark.full("tests/communicators holds all wires to the same")
@pytest.mark.worlds(("collective", 2), ("horovod-mpi", 3))
@pytest.mark.parametrize("rows, batch", [(57, 8), (9, 4)], ids=["uneven", "fewer-than-ranks"])
def test_few_rows_send_factors_and_end_at_the_same_weights(pool, rows, batch):
    results = pool.run(train, "dtk", rows, batch)
    for weights, sent in results:
        assert np.array_equal(weights, results[0][0])
        assert apart(weights, plain(rows, batch)[0]) <= 1e-5
        # All steps of an epoch together send less than one all-reduce of the kernel would.
        assert sent < KERNEL_BYTES


@pytest.mark.worlds(("collective", 2))
def test_processors_of_different_kinds_do_not_multiply_each_for_itself(pool):
    for _, sent in pool.run(train, "dtk", 9, 4, "adam", False):
        assert sent > 3 * KERNEL_BYTES  # in every step


@pytest.mark.full("equations of lossy exchanges are tested by themselves")
@pytest.mark.worlds(("collective", 2))
def test_many_rows_send_the_gradient(pool):
    rows = batch = 1200  # of 360 numbers, against a kernel of 32,000
    for weights, sent in pool.run(train, "dtk", rows, batch):
        assert apart(weights, plain(rows, batch)[0]) <= 1e-5
        assert KERNEL_BYTES < sent < 2 * KERNEL_BYTES


def gradient_in_graph(model, inputs):
    """The gradient of a model's first kernel, as an exchange gets it."""
    found = []

    @tf.function
    def step(values):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(values)) + sum(model.losses)
        kernel = model.trainable_variables[0].value
        found.append(factors.factored(tape.gradient(loss, kernel)))

    step.get_concrete_function(tf.TensorSpec([None, *inputs]))
    return found[0]


def dense(*before, units=128, **options):
    return keras.Sequential([*before, keras.layers.Dense(units, **options)])


@pytest.mark.parametrize(
    "model, inputs, is_factored",
    [
        (dense(), (256,), True),
        (dense(keras.layers.Flatten()), (8, 8, 4), True),
        (dense(), (12, 256), False),  # a row for each of 12 places
        (dense(units=2), (256,), False),  # too small to matter
        (dense(kernel_regularizer="l2"), (256,), False),  # a sum
        (keras.Sequential([keras.layers.Conv2D(64, 3)]), (8, 8, 32), False),
    ],
    ids=["dense", "flattened", "sequence", "small", "regularized", "convolution"],
)
def test_which_gradients_are_products_of_few_rows(model, inputs, is_factored):
    found = gradient_in_graph(model, inputs)
    assert isinstance(found, factors.Factored) == is_factored
    eager = tf.ones([256, 128])
    assert factors.factored(eager) is eager


def test_gradients_of_several_dtypes_keep_their_places_and_dtypes():
    random = np.random.default_rng(2)
    pairs = [
        [random.normal(size=(rows, n)).astype(dtype) for n in (300, 200)]
        for rows, dtype in ((3, "float32"), (2, "float64"), (5, "float32"))
    ]
    gradients = [factors.Factored(*map(tf.constant, pair)) for pair in pairs]
    # Claims two ranks, both with this one's rows.
    reduced = factors.reduce_products(
        dict(enumerate(gradients)), NullCommunicator(0, 2), pytest.fail, lambda i, g: g.product()
    )
    for i, (left, right) in enumerate(pairs):
        result = reduced[i]
        assert result.dtype == left.dtype
        np.testing.assert_allclose(result, 2 * left.T @ right, rtol=1e-4, atol=1e-4)


@tf.function
def sends_factors(counts):
    gradient = factors.Factored(tf.zeros([1, 512]), tf.zeros([1, 512]))
    return factors._pays([gradient], counts, factors.FLOPS_PER_BYTE)


def pays(*rows):
    return bool(sends_factors(tf.constant([[n] for n in rows], tf.int64)))


@pytest.mark.parametrize("size", [2, 8])
def test_factors_pay_up_to_some_number_of_rows_of_all_ranks(size):
    wanted = [pays(*[rows // size] * size) for rows in range(size, 2048, size)]
    assert wanted == sorted(wanted, reverse=True)
    # By bytes alone it would be 512, half of the 1024 numbers that 512 rows of both would be; a
    # product of n rows costs n/50 bytes' time for each entry, of a rank's own rows in any case.
    most = 8 * 512 * 512 / (8 * 512 + 512 * 512 / 50 * (1 - 1 / size))
    assert abs(size * wanted.count(True) - most) <= 2 * size
    # The rank with most rows decides, since all wait for it.
    assert pays(100, 100) and not pays(200, 0)


def order(beside):
    """Whether the second of two independent all-reduces waits for the first."""
    communicator = bodies.strategy().communicator

    @tf.function
    def step(one, other):
        with communicator.sequence(f"order {beside}"):
            first = communicator.allreduce(one)
            if not beside:
                return first, communicator.allreduce(other)
            with communicator.concurrent("test"):
                return first, communicator.allreduce(other)

    before = communicator.bytes_sent
    one, other = step(tf.ones([3]), tf.ones([5]))
    sums = float(one[0]), float(other[0])
    sent = communicator.bytes_sent - before
    graph = step.get_concrete_function(tf.ones([3]), tf.ones([5])).graph.get_operations()
    sending = _sending(graph)
    return len(sending), _comes_after(sending[-1], sending[0]), sums, sent


def _sending(graph):
    return [o for o in graph if o.type.startswith(("Collective", "Horovod"))]


def _comes_after(operation, earlier):
    seen, left = set(), [operation]
    while left:
        current = left.pop()
        if current not in seen:
            seen.add(current)
            left += [t.op for t in current.inputs] + list(current.control_inputs)
    return earlier in seen


def order_of_rows():
    """What of a table's rows waits for a whole gradient, and for its all-reduce."""
    communicator = bodies.strategy().communicator

    @tf.function
    def step(whole, values, indices):
        with communicator.sequence("order of rows"):
            gradient = tf.exp(whole)
            slices = tf.IndexedSlices(tf.exp(values), indices, (7, 2))
            summed, rows = communicator.allreduce([gradient, slices])
            return summed, rows.values, rows.indices

    given = tf.zeros([3]), tf.zeros([4, 2]), tf.constant([1, 5, 1, 0])
    summed, values, indices = step(*given)
    graph = step.get_concrete_function(*given).graph.get_operations()
    whole, values_of = (o for o in graph if o.type == "Exp")
    sending = _sending(graph)
    early = [o for o in sending if not _comes_after(o, whole) and not _comes_after(o, values_of)]
    (reduced,) = (o for o in sending if _comes_after(o, whole))
    (gathered,) = (o for o in sending if _comes_after(o, values_of))
    waits = _comes_after(gathered, reduced) or _comes_after(reduced, gathered)
    sums = float(summed[0]), float(values[0, 0]), indices.numpy().tolist()
    return len(sending), len(early), waits, sums


two_ways = pytest.mark.worlds(("collective", 2), ("horovod-mpi", 2))


@pytest.mark.not_on_pretended_gpus("over NCCL all messages have one order")
@two_ways
def test_rows_of_tables_and_whole_gradients_do_not_wait_for_each_other(pool):
    expected = [1.0 * pool.size, 1.0, [1, 5, 1, 0] * pool.size]
    for count, early, waits, sums in pool.run(order_of_rows):
        assert (count, early, waits) == (4, 2, False), "counts and indices go ahead"
        assert list(sums) == expected


def clocks():
    """How often a graph reads the clock before a message, and whether it waits for one beside."""
    communicator = bodies.strategy().communicator

    @tf.function
    def step(one, other):
        with communicator.sequence("clocks"):
            with communicator.concurrent("clocks"):
                beside = communicator.allreduce(other)
            return communicator.allreduce(one), beside

    graph = step.get_concrete_function(tf.ones([3]), tf.ones([5])).graph.get_operations()
    beside, sending = _sending(graph)
    clocks = [o for o in graph if o.type == "Timestamp" and not _comes_after(o, sending)]
    return len(clocks), any(_comes_after(clock, beside) for clock in clocks)


@pytest.mark.not_on_pretended_gpus("over NCCL all messages have one order")
@two_ways
def test_nothing_waits_for_what_runs_beside(pool):
    for count, waits, sums, sent in pool.run(order, True):
        assert (count, waits, sums, sent) == (2, False, (pool.size, pool.size), 32)
    for count, waits, _, _ in pool.run(order, False):
        assert (count, waits) == (2, True)
    # The clock did, and where that took longer than a message, the message took no time.
    assert pool.run(clocks) == [(1, False)] * pool.size
