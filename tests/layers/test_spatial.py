"""Layers over parts of an image equal the layers of one device, gradients and all."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtk
from dtk.communicators.local import LocalCommunicator

from layers.test_channel_parallel import TOLERANCE, outcome, same
from support.newer_keras import RENORM
from support.world import communicator

KINDS = {
    "conv": (keras.layers.Conv2D, dtk.layers.SpatiallyParallelConv2D),
    "max": (keras.layers.MaxPooling2D, dtk.layers.SpatiallyParallelMaxPooling2D),
    "average": (keras.layers.AveragePooling2D, dtk.layers.SpatiallyParallelAveragePooling2D),
    "up": (keras.layers.UpSampling2D, dtk.layers.SpatiallyParallelUpSampling2D),
    "norm": (
        keras.layers.BatchNormalization,
        dtk.layers.SpatiallyParallelBatchNormalization,
    ),
}


def drawn(kind, rng):
    """Arguments of a layer at random."""
    if kind == "up":
        size = [int(n) for n in rng.integers(1, 4, 2)]
        return {"size": size, "interpolation": str(rng.choice(["nearest", "bilinear"]))}
    if kind == "norm":
        return {
            "gamma_initializer": keras.initializers.RandomNormal(1.0, seed=2),
            "beta_regularizer": "l2",
        }
    window = [int(n) for n in rng.integers(1, 6, 2)]
    padding = str(rng.choice(["same", "valid"]))
    if kind != "conv":
        strides = [None, 1, [2, 3]][rng.integers(3)]
        return {"pool_size": window, "strides": strides, "padding": padding}
    strided = bool(rng.integers(2))
    return {
        "filters": 2,
        "kernel_size": window,
        "strides": [int(n) for n in rng.integers(1, 4, 2)] if strided else 1,
        "dilation_rate": 1 if strided else [int(n) for n in rng.integers(1, 3, 2)],
        "padding": padding,
        "activation": "tanh",
        "bias_initializer": "ones",
        "kernel_regularizer": "l2",
        "kernel_initializer": keras.initializers.GlorotNormal(7),
    }


def enough_outputs(layer, shape, size):
    try:
        rows, columns = layer.compute_output_shape(shape)[1:3]
    except ValueError:  # the window is larger than the image
        return False
    return min(rows, columns) >= size


class Between(keras.layers.Layer):
    """A layer between the borders of a region, uneven ones as well."""

    def __init__(self, layer, split, groups, **kwargs):
        super().__init__(**kwargs)
        kinds, same = dtk.layers, {"dtype": self.dtype_policy}
        self.before, self.layer, self.after = [], layer, []
        if split != "columns":
            self.before.append(kinds.SplitRows(groups[0], **same))
            self.after.append(kinds.GatherRows(groups[0], **same))
        if split != "rows":
            self.before.append(kinds.SplitColumns(groups[-1], **same))
            self.after.append(kinds.GatherColumns(groups[-1], **same))

    def call(self, x, training=None):
        for border in self.before:
            x = border(x)
        x = self.layer(x, training=training) if training else self.layer(x)
        for border in self.after:
            x = border(x)
        return x


def equal_to_one_device(seed, count, pair):
    """At random shapes, kernels, strides and so on; `pair` has a grid of two rows."""
    comm = communicator()
    rng = np.random.default_rng(seed)
    tried = 0
    while tried < count:
        kind = list(KINDS)[tried % len(KINDS)]
        split = ["rows", "columns"][int(rng.integers(2))]
        groups = (comm,)
        if pair:
            split = "both"
            groups = pair_of(comm)
        dtype = "float32" if kind == "up" or tried % 4 == 3 else "float64"
        options = drawn(kind, rng)
        shape = (2, *(int(n) for n in rng.integers(comm.size, 11, 2)), 2)
        plain, parallel = KINDS[kind]
        one = plain(dtype=dtype, **options)
        if not enough_outputs(one, shape, comm.size):
            continue
        x = tf.constant(rng.normal(size=shape), dtype)
        given = groups if pair else comm
        layer = parallel(dtype=dtype, split=split, communicator=given, **options)
        parts = Between(layer, split, groups, dtype=dtype)
        training = {"training": True} if kind == "norm" else {}
        expected = outcome(one, x, tried, **training)
        got = outcome(parts, x, tried, **training)
        context = (kind, split, dtype, options, shape)
        same(got, expected, TOLERANCE[dtype], context)
        for got_state, state in zip(
            parts.non_trainable_variables, one.non_trainable_variables, strict=True
        ):
            np.testing.assert_allclose(
                got_state.value, state.value, rtol=1e-6, err_msg=str(context)
            )
        tried += 1


@functools.cache
def pair_of(comm):
    """Two groups for rows and for columns: 2x1 of two ranks, 2x2 of four."""
    columns = comm.size // 2
    if columns == 1:
        return comm, LocalCommunicator()
    return comm.split(comm.rank % columns), comm.split(columns + comm.rank // columns)


@pytest.mark.full("layers are built of collectives, whose gradients are tested")
@pytest.mark.worlds(("collective", 2), ("collective", 3))
def test_parts_of_an_image_equal_the_whole(pool):
    pool.run(equal_to_one_device, 5, 10, False, timeout=240)


@pytest.mark.worlds(("collective", 2))
def test_rows_and_columns_at_once(pool):
    pool.run(equal_to_one_device, 6, 5, True, timeout=240)


@pytest.mark.worlds(
    *(
        pytest.param(world, marks=pytest.mark.full)
        for world in (
            ("local", 1),
            *(("collective", size) for size in (2, 4)),
            *(("horovod-mpi", size) for size in (2, 3)),
            ("horovod-gloo", 3),
            *(("mpi-wheel", size) for size in (2, 3, 4)),
        )
    )
)
def test_many_parts_of_images_equal_the_whole(pool):
    pool.run(equal_to_one_device, 7, 40, False, timeout=290)
    if pool.size == 4:
        pool.run(equal_to_one_device, 8, 15, True, timeout=290)


def bytes_and_hops():
    """What a step sends is what docs/model-parallel.md derives."""
    comm = communicator()
    conv = dtk.layers.SpatiallyParallelConv2D(5, 3, padding="same", communicator=comm)
    before, after = dtk.layers.SplitRows(comm), dtk.layers.GatherRows(comm)
    x = tf.ones([3, 8, 8, 2])
    after(conv(before(x)))  # they agree on who has what
    row, part, kernel = 3 * 8 * 2 * 4, 3 * 4 * 8 * 4, 3 * 3 * 2 * 5 * 4
    sent = [comm.bytes_sent]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = before(x)
        sent.append(comm.bytes_sent)
        y = conv(y)
        sent.append(comm.bytes_sent)
        y = after(y)
        sent.append(comm.bytes_sent)
    tape.gradient(y, [x, *(v.value for v in conv.trainable_variables)])
    sent.append(comm.bytes_sent)
    # forward: nothing, a row, the part; backward: the row's gradient, the weights', the part's
    backward = row + kernel + 5 * 4 + part * 2
    assert np.diff(sent).tolist() == [0, row, part * 5, backward]
    # windows that do not cross the border send nothing
    pool = dtk.layers.SpatiallyParallelMaxPooling2D(2, communicator=comm)
    pool(before(x))
    sent = comm.bytes_sent
    pool(before(x))
    assert comm.bytes_sent == sent


@pytest.mark.worlds(("collective", 2))
def test_bytes_of_a_halo(pool):
    pool.run(bytes_and_hops)


def normalized_over_replicas():
    """Statistics over parts of an image and over the replicas of a strategy are sums of sums."""
    from support import bodies

    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(22, 4, 4, 2)), rng.normal(size=(22, 1))

    def trained(strategy, norm):
        keras.utils.set_random_seed(1)
        with bodies.scope_of(strategy):
            layers = [keras.Input((4, 4, 2)), norm, keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    norm = dtk.layers.SpatiallyParallelBatchNormalization(
        synchronized=True, communicator=LocalCommunicator()
    )
    parts = trained(bodies.strategy(), norm)
    with dtk.strategies.undistributed():
        plain = trained(None, keras.layers.BatchNormalization())
    for got, expected in zip(parts, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.worlds(pytest.param(("collective", 2), marks=pytest.mark.full))
def test_statistics_over_replicas(pool):
    pool.run(normalized_over_replicas, timeout=120)


@pytest.mark.parametrize(
    "kind, given, told",
    [
        ("conv", {"filters": 2, "kernel_size": 3, "split": "depth"}, "use 'rows', 'columns' or"),
        ("max", {"split": "both"}, "a pair of communicators for 'both'"),
        (
            "conv",
            {"filters": 2, "kernel_size": 3, "activity_regularizer": "l1"},
            "behind GatherRows",
        ),
        ("up", {"interpolation": "bicubic"}, "use 'nearest' or 'bilinear'"),
        pytest.param("norm", {"renorm": True}, "use renorm=False", marks=RENORM),
        ("norm", {"axis": 2}, "the axis of the channels"),
    ],
)
def test_what_is_refused(kind, given, told):
    with pytest.raises(ValueError, match=f"layer 'one': .*{told}"):
        KINDS[kind][1](name="one", **given)


def test_what_cannot_be_divided():
    from dtk.communicators.local import NullCommunicator

    group = NullCommunicator(0, 3)
    layer = dtk.layers.SpatiallyParallelConv2D(2, 3, communicator=group, name="one")
    with pytest.raises(ValueError, match="an image of unknown size"):
        layer.build((None, None, 8, 1))
    pool = dtk.layers.SpatiallyParallelMaxPooling2D(4, communicator=group, name="one")
    with pytest.raises(ValueError, match="rank 0: layer 'one' makes 2 rows of 9, for 3 ranks"):
        pool.build((None, 3, 8, 1))
    for border in (dtk.layers.SplitRows, dtk.layers.GatherColumns):
        with pytest.raises(ValueError, match="an image of unknown size"):
            border(group).build((None, None, None, 1))


def test_configurations():
    layer = dtk.layers.SpatiallyParallelConv2D(4, 3, split="columns", dilation_rate=2)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    border = dtk.layers.GatherColumns(data_format="channels_first")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(border))
    assert again.get_config() == border.get_config()
