"""What the tests of factors run, on every rank at once."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from dtk.communicators.local import LocalCommunicator

from strategies import bodies

KERNEL = (200, 160)


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
    graph = step.get_concrete_function(tf.ones([3]), tf.ones([5])).graph
    sending = [o for o in graph.get_operations() if o.type.startswith(("Collective", "Horovod"))]
    return len(sending), _comes_after(sending[-1], sending[0]), sums, sent


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
    sending = [o for o in graph if o.type.startswith(("Collective", "Horovod"))]
    early = [o for o in sending if not _comes_after(o, whole) and not _comes_after(o, values_of)]
    (reduced,) = (o for o in sending if _comes_after(o, whole))
    (gathered,) = (o for o in sending if _comes_after(o, values_of))
    waits = _comes_after(gathered, reduced) or _comes_after(reduced, gathered)
    sums = float(summed[0]), float(values[0, 0]), indices.numpy().tolist()
    return len(sending), len(early), waits, sums


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
    beside, sending = (o for o in graph if o.type.startswith(("Collective", "Horovod")))
    clocks = [o for o in graph if o.type == "Timestamp" and not _comes_after(o, sending)]
    return len(clocks), any(_comes_after(clock, beside) for clock in clocks)


def _comes_after(operation, earlier):
    seen, left = set(), [operation]
    while left:
        current = left.pop()
        if current not in seen:
            seen.add(current)
            left += [t.op for t in current.inputs] + list(current.control_inputs)
    return earlier in seen
