"""What a step of `fit` is traced to, on every rank."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from support import bodies


def operations_of_a_lookup():
    """Kinds of operations of steps of `fit` and `predict`, up to what an embedding returns."""
    kinds = []

    def note(inputs):
        graph = tf.compat.v1.get_default_graph()
        kinds.append({op.type for op in graph.get_operations()})
        return inputs

    layers = keras.layers
    with bodies.strategy().scope():
        found = [keras.Input((2,), dtype="int32"), layers.Embedding(7, 3), layers.Lambda(note)]
        model = keras.Sequential(found)
        model.compile("sgd", "mse")
    x = np.zeros((4, 2), "int32")
    model.fit(x, np.zeros((4, 2, 3)), batch_size=4, verbose=0)
    trained = kinds[-1]  # before it Keras finds out shapes
    model.predict(x, batch_size=4, verbose=0)
    return trained, next(one for one in reversed(kinds) if one)  # the last are of eager layers


def what_updates_wait_for():
    """Names of the collectives before each update of a weight, in a step with several buckets."""
    graphs = []

    class Noting(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            graphs.append(tf.compat.v1.get_default_graph())
            super().update_step(gradient, variable, learning_rate)

    def conv(name):
        return keras.layers.Conv2D(512, 1, use_bias=False, name=name)  # 1 MB

    with bodies.strategy().scope():
        model = keras.Sequential([keras.Input((1, 1, 512)), conv("a"), conv("b"), conv("c")])
        model.compile(Noting(0.1), "mse")
    x = np.ones((4, 1, 1, 512), "float32")
    model.fit(x, x, batch_size=4, verbose=0)
    updates = [op for op in graphs[-1].get_operations() if op.type == "AssignSubVariableOp"]
    return [collectives_before(op) for op in updates]


def collectives_before(op):
    """Names of the collectives that an operation has to wait for."""
    left, seen = [op], set()
    while left:
        one = left.pop()
        if one.name not in seen:
            seen.add(one.name)
            left += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
    operations = map(op.graph.get_operation_by_name, seen)
    return sorted(one.name for one in operations if one.type.startswith("Collective"))
