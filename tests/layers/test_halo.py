"""The arithmetic of halos, against TensorFlow's convolutions and against rows moved by hand."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st

from dtk.even_division import even_sizes
from dtk.layers.halo import Halo, Range, Window, ranges_of

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


def test_known_ones():
    """3x3 at stride 1 takes a row from each side; at stride 2 and even height none from above."""
    one = Window(3, padding="same")
    needs = [one.needs(part, 8) for part in ranges_of([4, 4])]
    assert needs == [(-1, 5), (3, 9)]
    assert Halo((4, 4), tuple(needs)).matrix == [[0, 1], [1, 0]]
    two = Window(3, 2, padding="same")
    needs = [two.needs(part, 8) for part in ranges_of([2, 2])]
    assert needs == [(0, 5), (4, 9)]
    assert Halo((4, 4), tuple(needs)).matrix == [[0, 0], [1, 0]]
    assert two.front(7) == 1
