"""What a Downpour may be, and with which consistency."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.exchange import Downpour, Quantized
from dtk.parameter_server import gradient_buffers
from dtk.parameter_server.consistency_models import Async, BoundedDelay, Sync
from dtk.strategies import parameter_server


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"push_every": 0}, "push_every=0; expected a number of steps"),
        *[({"push_every": wrong}, f"push_every={wrong}") for wrong in (2.5, True)],
        ({"fetch_every": -1}, "fetch_every=-1"),
        ({"push_every": 4, "fetch_every": 3}, "neither a divisor nor a multiple of push_every=4"),
        ({"significant": -1.0}, "significant=-1.0; expected the smallest change"),
        ({"significant": "1"}, "significant='1'; expected the smallest change"),
        ({"significant": float("inf")}, "significant=inf"),
        ({"bits": 17}, "expected 1 to 16"),
        ({"bits": 1, "significant": 0.1}, "use one of the two"),
    ],
)
def test_mistakes(arguments, said):
    with pytest.raises(ValueError, match=said):
        Downpour(**arguments)


@pytest.mark.parametrize(
    "exchange, consistency, said",
    [
        (Downpour(2), Sync(), "are not synchronous"),
        (Downpour(1, fetch_every=2), BoundedDelay(4), "later than the bound allows"),
        ("fp16", Async(), "expected dtk.exchange.Downpour"),
        (Quantized(1), Sync(), "are not synchronous"),
    ],
)
def test_what_does_not_go_together(exchange, consistency, said):
    with pytest.raises(ValueError, match=said):
        parameter_server._checked(exchange, consistency)


def test_what_does():
    fetches = [d.fetch for d in (Downpour(4), Downpour(4, fetch_every=2), Downpour(2, 6))]
    assert fetches == [4, 2, 6], "with every push unless told otherwise"
    for exchange, consistency in (
        (None, Sync()),
        (Downpour(2), BoundedDelay(4)),
        (Downpour(1, fetch_every=2), Async()),
    ):
        assert parameter_server._checked(exchange, consistency) is exchange
    for bits in ("3bit", Quantized(3), Downpour(bits=3)):
        assert parameter_server._checked(bits, Async()) == Downpour(bits=3)
    assert parameter_server._checked("32bit", Sync()) is None, "whole gradients, as without"
    assert Downpour(2, bits=32) == Downpour(2) and not Downpour(bits=32, significant=0.1).bits


@pytest.mark.parametrize("shapes", [[(7,), (3,)], [(40, 12)], [(7,), (40, 12), (3,)]], ids=str)
def test_a_server_may_hold_vectors_only_or_kernels_only(shapes):
    """Both once failed: what is coded, or what is not, was no list of tensors."""
    random = np.random.default_rng(0)
    weights = [keras.Variable(random.normal(size=shape), dtype="float32") for shape in shapes]
    layout = gradient_buffers.QuantizedLayout(weights, set(), 8)
    gradients = [tf.constant(random.normal(size=shape), tf.float32) for shape in shapes]

    @tf.autograph.experimental.do_not_convert
    def there_and_back(flat):
        (sent, codes), (kept,) = layout.compress([flat], tf.constant(1.0))
        return layout.decode(layout.dense[0], sent, codes), kept

    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], 0)
    joined, kept = tf.function(there_and_back)(flat)
    np.testing.assert_allclose(joined + kept, flat, atol=1e-6)


def test_what_is_no_number_is_sent_and_not_kept():
    """A NaN was never significant: its weight stood still from then on, and no loss told of it."""
    layout = gradient_buffers.FilteredLayout([keras.Variable(np.zeros(8))], set(), 0.1)
    flat = tf.constant([float("nan"), 0.05, 1.0, 0, 0, 0, 0, 0])
    (sent, places), (kept,) = layout.compress([flat], tf.constant(1.0))
    np.testing.assert_array_equal(layout.decode(layout.dense[0], sent, places)[:3], [np.nan, 0, 1])
    np.testing.assert_allclose(kept[:3], [0, 0.05, 0])
