"""What may go wrong while a model with a step of its own is built from the parts of a batch."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtk.compat import keras_models
from dtk.errors import DisagreementError


class Own(keras.Model):
    """A model whose step calls neither it nor its loss with the parts of a batch."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def call(self, x):
        if self.error is not None:
            raise self.error
        return x

    def train_step(self, data):
        return {"loss": tf.constant(0.0)}


@pytest.mark.parametrize("inside", ["call", "loss"])
@pytest.mark.parametrize(
    "error, passes",
    [
        (ValueError("two inputs"), False),
        (KeyError("image"), False),
        (AssertionError(), False),
        (OSError("no such vocabulary"), True),
        (DisagreementError("no such vocabulary"), True),
    ],
    ids=repr,
)
def test_only_errors_of_parts_that_do_not_fit_are_passed_over(error, passes, inside):
    """Every exception was: a model that cannot read its file trained on, or failed later."""

    def loss(y, outputs):
        raise error

    model = Own(error if inside == "call" else None)
    model.compile("sgd", loss if inside == "loss" else None)
    raises = pytest.raises((OSError, RuntimeError), match="no such vocabulary")
    with raises if passes else contextlib.nullcontext():
        keras_models.build_from(model, (np.zeros((2, 3)), np.zeros((2, 3))))
