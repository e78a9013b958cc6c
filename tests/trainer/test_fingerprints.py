"""Ranks compare weights by hashes: of small ones, and of sums of the bits of large ones."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from dtk.trainer.ranks import shared_weights
from dtk.trainer.ranks.shared_weights import fingerprint


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1000, (1 << 18) + 5])
def test_one_bit_and_the_order_of_two_numbers_count(monkeypatch, dtype, size):
    monkeypatch.setattr(shared_weights, "_AT_ONCE", 1 << 16)
    values = np.random.default_rng(0).normal(size=size).astype(dtype)
    found = fingerprint(tf.constant(values))
    assert found == fingerprint(tf.Variable(values.copy()))
    for place in (0, size // 2, size - 1):
        other = values.copy()
        other[place] = np.nextafter(values[place], np.array(9, dtype))
        assert fingerprint(tf.constant(other)) != found
        other = values.copy()
        other[[place, place - 7]] = other[[place - 7, place]]
        assert fingerprint(tf.constant(other)) != found
