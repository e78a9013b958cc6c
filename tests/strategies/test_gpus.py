"""Gradients go from GPU to GPU: proved without a GPU, by what is traced under its name.

TensorFlow computes on the CPU what it cannot put on `/gpu:0`, so a rank that pretends to have a GPU
trains as others do, and its graph says what a real one would do.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators import collective
from dtk.communicators.sequencer import CollectiveSequencer
from dtk.strategies import devices

from strategies import bodies


class Noted(keras.Model):
    """Notes the graph in which its step is traced."""

    def train_step(self, data):
        """Compute Keras's own step."""
        self.graph = tf.compat.v1.get_default_graph()
        return super().train_step(data)


def train(pretended, sharded=False):
    """Train a model with a table and a norm; return weights, messages and copies to the host."""
    bodies.strategy()  # TensorFlow's collectives start before anything else
    pin, devices.pin = devices.pin, lambda place, growth=None: "/gpu:0"
    try:
        make = dtk.strategies.AllReduceStrategy
        strategy = make("collective", shard_optimizer=sharded) if pretended else None
    finally:
        devices.pin = pin
    random = np.random.default_rng(0)
    x, y = random.integers(0, 9, (48, 4)), random.normal(size=(48, 1)).astype("float32")
    with bodies.scope_of(strategy):
        keras.utils.set_random_seed(2)
        given = keras.Input((4,))
        rows = keras.layers.Flatten()(keras.layers.Embedding(9, 5)(given))
        normed = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(8)(rows))
        model = Noted(given, keras.layers.Dense(1)(normed))
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"])
    with dtk.strategies.undistributed():
        model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    if not pretended:
        return bodies.flat(model.get_weights()), [], [], None
    world = strategy.communicator
    host, world.cards = world.cards, None  # other tests use this world, too
    operations = model.graph.get_operations()
    messages = [
        (
            one.type,
            one.get_attr("T").name,
            one.device.rpartition("/")[2],
            one.get_attr("communication_hint").decode(),
            int(tf.get_static_value(one.inputs[2])),
            [token.op.name for token in one.inputs if token.dtype == tf.resource],
        )
        for one in operations
        if one.type.startswith("Collective")
    ]
    copies = [
        (one.type, one.name)
        for one in operations
        if "CPU" in one.device and any(t.dtype in (tf.float16, tf.float32) for t in one.outputs)
    ]
    return bodies.flat(model.get_weights()), messages, copies, host.size


@pytest.mark.worlds(("collective", 2))
@pytest.mark.parametrize("sharded", [False, True])
def test_floats_go_from_gpu_to_gpu_and_everything_else_through_the_host(pool, sharded):
    alone = pool.run(train, False)[0][0]
    for weights, messages, copies, size in pool.run(train, True, sharded):
        assert size == 2
        assert np.linalg.norm(weights - alone) <= 1e-5 * np.linalg.norm(alone)
        floats = [one for one in messages if one[1] == "float32"]
        others = [one for one in messages if one[1] != "float32"]
        assert len(floats) >= 3, "gradients, rows of the table, moments"
        assert {(device, hint) for _, _, device, hint, _, _ in floats} == {("device:GPU:0", "nccl")}
        assert {(device, hint) for _, _, device, hint, _, _ in others} == {("device:CPU:0", "auto")}
        (card,) = {key for _, _, _, _, key, _ in floats}
        assert card not in {key for _, _, _, _, key, _ in others}
        ((_,),) = {tuple(tokens) for *_, tokens in floats}
        assert copies == []


def test_replicas_of_one_process_sum_by_nccl():
    first, _ = collective.replicas(["/gpu:0", "/gpu:1"], 0)

    @tf.function(autograph=False)
    def step():
        return first.allreduce([tf.zeros(4), tf.zeros(1 << 20), tf.zeros(2, tf.bfloat16)])

    graph = step.get_concrete_function().graph
    sums = [one for one in graph.get_operations() if one.type.startswith("Collective")]
    assert {one.type for one in sums} == {"CollectiveReduceV2"}
    for one in sums:
        assert one.device.endswith("GPU:0") and one.get_attr("communication_hint") == b"nccl"
        assert one.get_attr("T") == tf.float32, "NCCL in TensorFlow adds no bfloat16"


def eager():
    """Run an eager message in a scope of another device; return where it was."""
    bodies.strategy(2)
    with tf.device("CPU:1"):
        (told,) = CollectiveSequencer().run([tf.zeros(1)], lambda flat: [tf.identity(flat[0])])
    return told.device


@pytest.mark.worlds(("local", 1))
def test_eager_messages_name_their_device(pool):
    assert pool.run(eager)[0].endswith("CPU:0")
