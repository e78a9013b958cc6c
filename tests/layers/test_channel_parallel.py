"""Layers whose channels are divided equal the layers of one device, gradients and all."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.compat.keras_variables import shard_of

from support.world import communicator

KINDS = {
    "dense": (keras.layers.Dense, dtk.layers.ChannelParallelDense, 1),
    "conv1d": (keras.layers.Conv1D, dtk.layers.ChannelParallelConv1D, 1),
    "conv2d": (keras.layers.Conv2D, dtk.layers.ChannelParallelConv2D, 2),
    "conv3d": (keras.layers.Conv3D, dtk.layers.ChannelParallelConv3D, 3),
}


def square_of_sum(kernel):
    """A penalty of the whole that is not the sum of those of its parts."""
    return tf.reduce_sum(tf.convert_to_tensor(kernel)) ** 2


TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


def drawn(kind, rng, size):
    """Arguments of a layer and the shape of an input, at random; `size` channels or more."""
    dims = KINDS[kind][2]
    channels, filters = (int(n) for n in rng.integers(size, 6, 2))
    options = {
        "use_bias": bool(rng.integers(2)),
        "activation": str(rng.choice(["linear", "tanh", "softmax"])),
        "kernel_regularizer": [None, keras.regularizers.L1L2(0.1, 0.2), square_of_sum][
            rng.integers(3 if kind == "dense" else 2)
        ],
        "bias_regularizer": [None, "l2"][rng.integers(2)],
        "activity_regularizer": [None, "l1"][rng.integers(2)],
        "kernel_initializer": keras.initializers.GlorotNormal(int(rng.integers(100))),
        "bias_initializer": keras.initializers.RandomNormal(seed=3),
    }
    if kind == "dense":
        middle = tuple(int(n) for n in rng.integers(1, 4, rng.integers(0, 2)))
        return {"units": filters, **options}, (2, *middle, channels)
    strided = bool(rng.integers(2))
    options |= {
        "filters": filters,
        "kernel_size": [int(n) for n in rng.integers(1, 4, dims)],
        "strides": int(rng.integers(1, 4)) if strided else 1,
        "dilation_rate": 1 if strided else int(rng.integers(1, 3)),
        "padding": str(rng.choice(["same", "valid", "causal"][: 3 if dims == 1 else 2])),
    }
    return options, (2, *(int(n) for n in rng.integers(5, 8, dims)), channels)


def outcome(layer, x, seed, whole=lambda gradient, _: gradient, **options):
    """Output, loss, and the gradients by the input and by each weight."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, **options)
        weights = tf.constant(np.random.default_rng(seed).normal(size=y.shape), y.dtype)
        loss = tf.reduce_sum(tf.cos(y) * weights) + sum(layer.losses)
    gradients = tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])
    by_name = {
        v.name: whole(g, v) for v, g in zip(layer.trainable_variables, gradients[1:], strict=True)
    }
    return {"output": y, "loss": loss, "input": gradients[0], **by_name}


def gathered(gradient, variable):
    """Of a variable in parts, the gradient of the whole."""
    shard = shard_of(variable)
    return gradient if shard is None else shard.whole(gradient)


def same(got, expected, tolerance, context):
    for name, value in expected.items():
        value, found = np.asarray(value), np.asarray(got[name])
        assert found.shape == value.shape, (context, name)
        scale = max(1.0, float(np.abs(value).max(initial=0)))
        assert np.abs(found - value).max(initial=0) <= tolerance * scale, (context, name)


def equal_to_one_device(seed, count):
    """At random shapes, kernels, strides and so on."""
    comm = communicator()
    rng = np.random.default_rng(seed)
    for example, (kind, split) in enumerate(
        itertools.islice(itertools.cycle(itertools.product(KINDS, ("output", "input"))), count)
    ):
        dtype = "float32" if example % 5 == 4 else "float64"
        options, shape = drawn(kind, rng, comm.size)
        x = tf.constant(rng.normal(size=shape), dtype)
        plain, parallel, _ = KINDS[kind]
        one = plain(dtype=dtype, **options)
        parts = parallel(dtype=dtype, split=split, communicator=comm, **options)
        expected = outcome(one, x, example)
        got = outcome(parts, x, example, gathered)
        context = (kind, split, dtype, options, shape)
        same(got, expected, TOLERANCE[dtype], context)
        weights = {v.name: v for v in parts.trainable_variables}
        for variable in one.trainable_variables:
            part = weights[variable.name]
            shard = shard_of(part)
            sliced = variable.value if shard is None else shard.part(variable.value)
            np.testing.assert_array_equal(part.value, sliced)  # initial values: bit for bit
        assert shard_of(weights["kernel"]).size < shard_of(weights["kernel"]).length or (
            comm.size == 1
        )


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(
    ("local", 1),
    ("collective", 2),
    ("collective", 3),
    *(
        pytest.param(world, marks=pytest.mark.full)
        for world in (
            ("collective", 4),
            *(("horovod-mpi", size) for size in (2, 3)),
            ("horovod-gloo", 3),
            *(("mpi-wheel", size) for size in (2, 3, 4)),
        )
    ),
)
def test_divided_layers_equal_one_device(pool):
    pool.run(equal_to_one_device, 11, 16 if pool.size == 3 else 24, timeout=240)


def pair_and_bytes():
    """Two layers in a row, Megatron-LM's way: one all-reduce each way, of these bytes."""
    comm = communicator()
    rng = np.random.default_rng(3)
    x = tf.constant(rng.normal(size=(4, 6)), tf.float32)
    hidden = dtk.layers.ChannelParallelDense(
        7, "tanh", communicator=comm, gather_output=False, kernel_initializer=_seeded(1)
    )
    last = dtk.layers.ChannelParallelDense(
        5,
        split="input",
        input_is_split=True,
        communicator=comm,
        kernel_initializer=_seeded(2),
        bias_initializer="ones",
    )
    plain = keras.Sequential(
        [
            keras.layers.Dense(7, "tanh", kernel_initializer=_seeded(1)),
            keras.layers.Dense(5, kernel_initializer=_seeded(2), bias_initializer="ones"),
        ]
    )
    both = keras.Sequential([hidden, last])
    got, expected = outcome(both, x, 1, gathered), outcome(plain, x, 1)
    assert [shard_of(v).sizes for v in hidden.trainable_variables] == [(4, 3)] * 2
    for name in ("output", "loss", "input"):
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)
    before = comm.bytes_sent
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = both(x)
    assert comm.bytes_sent - before == 4 * 4 * 5  # the outputs
    tape.gradient(y, x)
    assert comm.bytes_sent - before == 4 * 4 * (5 + 6)  # and the gradients of the inputs
    assert hidden.compute_output_shape((None, 6)) == (None, (4, 3)[comm.rank])


def _seeded(seed):
    return keras.initializers.GlorotUniform(seed)


def numerical_gradient():
    """By differences, of all the loss and not of a formula."""
    comm = communicator()
    for split in ("output", "input"):
        layer = dtk.layers.ChannelParallelConv2D(
            3, 2, activation="tanh", split=split, communicator=comm, dtype="float64"
        )

        def loss(x, layer=layer):
            return tf.reduce_sum(layer(x) ** 2)

        x = tf.constant(np.random.default_rng(5).normal(size=(1, 3, 3, 3)))
        loss(x)
        theory, numeric = tf.test.compute_gradient(loss, [x])
        np.testing.assert_allclose(theory[0], numeric[0], rtol=1e-5, atol=1e-6)


@pytest.mark.worlds(("collective", 2))
def test_two_layers_need_one_allreduce_each_way(pool):
    pool.run(pair_and_bytes)
    pool.run(numerical_gradient)


def in_fit(steps):
    """Under a strategy whose replica is the whole group, with every constraint and regularizer."""
    group = communicator()
    strategy = dtk.strategies.AllReduceStrategy("local")

    def trained(kinds, prefix, seed, output, entry, **how):
        keras.utils.set_random_seed(seed)
        conv, dense = getattr(kinds, f"{prefix}Conv2D"), getattr(kinds, f"{prefix}Dense")
        unit, norm = keras.constraints.UnitNorm(1), keras.constraints.MaxNorm(0.5)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((6, 6, 3)),
                    conv(5, 3, activation="relu", kernel_constraint="max_norm", **output),
                    keras.layers.GlobalAveragePooling2D(),
                    dense(7, "relu", kernel_constraint=unit, kernel_regularizer="l2", **output),
                    dense(4, kernel_constraint=norm, kernel_regularizer=square_of_sum, **entry),
                ]
            )
            model.compile(keras.optimizers.Adam(0.01), "mse", **how)
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(20, 6, 6, 3)), rng.normal(size=(20, 4))
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        weights = [gathered(tf.convert_to_tensor(v.value), v) for v in model.weights]
        return history.history["loss"], *weights, model.predict(x, verbose=0)

    expected = trained(keras.layers, "", 4, {}, {})
    output, entry = {"communicator": group}, {"communicator": group, "split": "input"}
    # Ranks that have not been seeded alike: the group's first decides.
    seed, how = 4 + 10 * group.rank, {"steps_per_execution": steps}
    found = trained(dtk.layers, "ChannelParallel", seed, output, entry, **how)
    for got, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.worlds(("collective", 2), pytest.param(("horovod-mpi", 2), marks=pytest.mark.full))
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.full)])
def test_in_fit(pool, steps):
    pool.run(in_fit, steps, timeout=120)


def test_configurations():
    layer = dtk.layers.ChannelParallelConv1D(
        4, 3, split="input", input_is_split=True, kernel_initializer="ones", name="c"
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    assert (again.split, again.input_is_split) == ("input", True)
    node = dtk.layers.NodeParallelDense(3, name="n")
    assert dtk.layers.NodeParallelDense.from_config(node.get_config()).split == "output"


@pytest.mark.parametrize(
    "given, told",
    [
        ({"split": "rows"}, "split='rows'; use 'output' or 'input'"),
        ({"split": "input", "gather_output": False}, "use split='output' for it"),
        ({"input_is_split": True}, "use split='input' for it"),
        ({"activation": "softmax", "gather_output": False}, "part of the channels; use one of"),
        ({"activity_regularizer": "l2", "gather_output": False}, "use gather_output=True"),
        ({"lora_rank": 2}, "use a layer without them"),
    ],
)
def test_what_is_refused(given, told):
    with pytest.raises(ValueError, match=f"layer 'one': .*{told}"):
        dtk.layers.ChannelParallelDense(3, name="one", **given)


def test_what_cannot_be_divided():
    from dtk.communicators.local import NullCommunicator

    group = NullCommunicator(1, 3)
    with pytest.raises(ValueError, match="rank 1: layer 'a' divides 2 output channels among 3"):
        dtk.layers.ChannelParallelDense(2, communicator=group, name="a").build((None, 4))
    with pytest.raises(ValueError, match="divides 2 input channels among 3 ranks"):
        dtk.layers.ChannelParallelDense(4, split="input", communicator=group).build((None, 2))
    with pytest.raises(ValueError, match="groups=2; use groups=1"):
        dtk.layers.ChannelParallelConv2D(4, 3, groups=2)
    with pytest.raises(ValueError, match="nodes are outputs"):
        dtk.layers.NodeParallelDense(3, split="input")
    with pytest.raises(ValueError, match="enable_lora"):
        dtk.layers.NodeParallelDense(3).enable_lora(2)
