"""Parts of Keras that came later than the first version that dtk supports, for tests of them."""

import inspect

import keras
import pytest

RENORM = pytest.mark.skipif(
    "renorm" not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="Keras's BatchNormalization has renorm from 3.14 on",
)
