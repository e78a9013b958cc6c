"""Halos, against TensorFlow's convolutions and rows moved by hand; no rows are joined."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st

import dtk
from dtk.communicators.local import LocalCommunicator, NullCommunicator
from dtk.even_division import even_sizes
from dtk.layers.halo import (
    Halo,
    HaloExchange,
    Range,
    Window,
    add_rows,
    fits,
    parts_of,
    pieces,
    ranges_of,
)

from layers.test_channel_parallel import TOLERANCE, outcome, same
from layers.test_spatial import Between
from support.world import communicator

windows = st.builds(
    Window,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["same", "valid"]),
)


@given(windows, st.integers(1, 20))
def test_a_window_is_tensorflows(window, length):
    """Each output is the sum of the inputs under its taps."""
    assume(window.stride == 1 or window.dilation == 1)
    assume(window.outputs(length) > 0)
    rows = 2.0 ** np.arange(length)  # sums name what was added
    expected = tf.nn.conv1d(
        rows[None, :, None],
        np.ones((window.kernel, 1, 1)),
        window.stride,
        window.padding.upper(),
        dilations=window.dilation,
    )[0, :, 0].numpy()
    assert len(expected) == window.outputs(length)
    for output, value in enumerate(expected):
        start, stop = window.needs(Range(output, output + 1), length)
        taps = [row for row in range(start, stop, window.dilation) if 0 <= row < length]
        assert sum(rows[taps]) == value
        assert len(taps) == window.taps(output, length)


@given(windows, st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_ranks_get_the_rows_they_need(window, sizes):
    """However small their blocks are."""
    length, size = sum(sizes), len(sizes)
    assume(window.outputs(length) >= size)
    outputs = ranges_of(even_sizes(window.outputs(length), size))
    needs = tuple(window.needs(part, length) for part in outputs)
    halo = Halo(tuple(sizes), needs)
    own = [list(range(part.start, part.stop)) for part in ranges_of(sizes)]
    for rank in range(size):
        got = []
        for source in range(size):
            start, stop = halo.sent(source, rank)
            assert 0 <= start <= stop <= sizes[source]
            got += own[source][start:stop]
            assert halo.matrix[source][rank] == (stop - start if source != rank else 0)
        before, behind = halo.padding(rank)
        padded = [None] * before + got + [None] * behind
        wanted = range(needs[rank].start, needs[rank].stop)
        assert padded == [row if 0 <= row < length else None for row in wanted]


# A convolution over part of an image.


def halo_of(window, sizes):
    outputs = even_sizes(window.outputs(sum(sizes)), len(sizes))
    return Halo(
        tuple(sizes), tuple(window.needs(one, sum(sizes)) for one in ranges_of(outputs))
    ), outputs


def sums(window, rows):
    """The convolution of a row of numbers with ones, without padding."""
    count = (len(rows) - window.extent) // window.stride + 1
    return np.array([rows[i * window.stride :][: window.extent].sum() for i in range(count)])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), st.integers(0, 9))
def test_own_rows_and_those_of_others_add_up(kernel, stride, size, more):
    """Of any window for which the layer takes this way."""
    window = Window(kernel, stride, padding="same")
    sizes = [stride * count for count in even_sizes(size + more, size)]
    halo, outputs = halo_of(window, sizes)
    alone = HaloExchange(2, Halo((4,), (Range(0, 4),)), LocalCommunicator())
    size = len(sizes)
    exchanges = [HaloExchange(1, halo, NullCommunicator(rank, size)) for rank in range(size)]
    assume(fits([exchanges[0], alone], [window, Window(1, padding="same")]))
    image = 2.0 ** np.arange(sum(sizes))  # sums name what was added
    for rank, own in enumerate(ranges_of(sizes)):
        need = halo.needs[rank]
        used = halo.sent(rank, rank)
        start, stop = own.start + used.start, own.start + used.stop
        padded = np.pad(image[start:stop], (start - need.start, need.stop - stop))
        got = sums(window, padded)
        counts = [row[rank] for row in halo.matrix]
        above, below = sum(counts[:rank]), sum(counts[rank:])
        received = image[start - above : start], image[stop : stop + below]
        for rows, piece in zip(received, pieces(window, halo, rank), strict=True):
            got[slice(*piece.outputs)] += sums(window, np.pad(rows, (piece.before, piece.behind)))
        before, behind = halo.padding(rank)
        inside = image[max(0, need.start) : need.stop - behind]
        np.testing.assert_array_equal(got, sums(window, np.pad(inside, (before, behind))))
        assert len(got) == outputs[rank]


@pytest.mark.parametrize("axis", [1, 2])
def test_gradients_of_slices_are_added_in_their_rows(axis):
    x = tf.random.stateless_normal([2, 5, 5, 3], [1, 2], dtype="float64")
    ranges = [Range(1, 5), Range(0, 2), Range(1, 1), Range(3, 5)]
    index = [tuple([slice(None)] * axis + [slice(*rows)]) for rows in ranges]

    def loss(slices):
        return sum(tf.reduce_sum(tf.sin(one) * (i + 1)) for i, one in enumerate(slices))

    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        ours, plain = loss(parts_of(x, ranges, axis)), loss([x[one] for one in index])
    np.testing.assert_allclose(tape.gradient(ours, x), tape.gradient(plain, x), atol=1e-12)
    more = add_rows(
        x, tf.ones([2, 2, 5, 3] if axis == 1 else [2, 5, 2, 3], x.dtype), ranges[3], axis
    )
    expected = x.numpy()
    expected[index[3]] += 1
    np.testing.assert_array_equal(more, expected)


def traced(conv, shape):
    """The graph of a layer's gradients, by its input as well."""

    @tf.function
    def step(mine):
        with tf.GradientTape() as tape:
            tape.watch(mine)
            loss = tf.reduce_sum(tf.sin(conv(mine)))
        return tape.gradient(loss, [mine, *(v.value for v in conv.trainable_variables)])

    return step.get_concrete_function(tf.TensorSpec(shape, tf.float64)).graph


def joins_nothing():
    """Outputs and gradients are right, and no tensor of the step is larger than the part."""
    comm = communicator()
    x = tf.constant(np.random.default_rng(2).normal(size=(2, 12, 20, 3)))
    for kernel, strides, split in [
        (4, 1, "rows"),
        (3, 2, "rows"),
        (5, 1, "columns"),
    ]:
        options = {
            "filters": 2,
            "kernel_size": kernel,
            "strides": strides,
            "padding": "same",
            "kernel_initializer": keras.initializers.GlorotNormal(7),
        }
        conv = dtk.layers.SpatiallyParallelConv2D(
            split=split, communicator=comm, dtype="float64", **options
        )
        parts = Between(conv, split, (comm,), dtype="float64")
        expected = outcome(keras.layers.Conv2D(dtype="float64", **options), x, 1)
        same(outcome(parts, x, 1), expected, TOLERANCE["float64"], (kernel, strides, split))
        axis = 1 if split == "rows" else 2
        part = x.shape[axis] // comm.size
        shape = [2, 12, 20, 3]
        shape[axis] = part

        graph = traced(conv, shape)
        largest = max(
            out.shape.num_elements() or 0 for op in graph.get_operations() for out in op.outputs
        )
        assert largest == np.prod(shape), (kernel, strides, split)


@pytest.mark.worlds(("collective", 2))
def test_rows_are_not_joined(pool):
    pool.run(joins_nothing)
