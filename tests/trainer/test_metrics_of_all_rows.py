"""Metrics of a script's own that one replica counts, on the rows of all: as in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import dtk

from support import bodies


class Least(keras.metrics.Metric):
    """The least target so far, which begins with a large number."""

    def __init__(self):
        super().__init__(name="least")
        self.least = self.add_variable((), "zeros", aggregation="sum", name="least")

    def reset_state(self):
        self.least.assign(1e4)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.least.assign(ops.minimum(self.least, ops.min(ops.cast(y_true, "float32"))))

    def result(self):
        return 1.0 * self.least


def of_unmasked(y_true, y_pred):
    """A number for each word that is not masked, and for that of the batch."""
    right = ops.cast(ops.cast(y_true, "int32") == ops.argmax(y_pred, -1), "float32")
    return right * (1.0 + ops.mean(right))


def logged(devices):
    """Train a tagger whose words are masked, with a last batch of one row."""
    random = np.random.default_rng(0)
    words = random.integers(1, 9, (25, 6))
    words[np.arange(6)[None] >= random.integers(1, 7, 25)[:, None]] = 0
    with bodies.scope_of(bodies.strategy(devices) if devices else None):
        keras.utils.set_random_seed(1)
        embedded = keras.layers.Embedding(9, 4, mask_zero=True)
        layers = [embedded, keras.layers.Dense(3, activation="softmax")]
        model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        metrics = [of_unmasked, Least()]
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=metrics)
    with dtk.strategies.undistributed():
        fitted = model.fit(words, words % 3, batch_size=8, epochs=2, verbose=0)
    return fitted.history


@pytest.mark.worlds(("local", 1))
def test_masks_and_what_a_reset_has_set_are_counted_as_by_one_process(pool):
    (alone,), (replicas,) = pool.run(logged, 0), pool.run(logged, 2)
    assert alone["least"] == [0.0, 0.0]
    for name, values in alone.items():
        np.testing.assert_allclose(replicas[name], values, rtol=1e-5, err_msg=name)
