"""The TensorFlow variable behind a Keras variable, and a Keras variable that is part of another."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.compat import tf_variables
from dtk.nests import Function

# Variables.


def stored(variable: keras.Variable) -> tf.Variable:
    """Return the TensorFlow variable behind a Keras variable, whatever scope is open."""
    return variable._value


def is_alone(variable: keras.Variable) -> bool:
    """Return whether a variable that replicas sum when they read it was created outside a scope."""
    return (
        variable.synchronization == "on_read"
        and variable._value is not None
        and not tf_variables.is_distributed(variable._value)
    )


def move_variable(variable: keras.Variable) -> None:
    """Give a Keras variable new storage, made in the current scope, with the value it has."""
    if variable._value is not None and not tf_variables.is_distributed(variable._value):
        variable._initialize(variable._value.numpy())


class VariablePart(keras.Variable):
    """One part of a partitioned variable, as an optimizer sees it."""

    def __init__(self, whole: keras.Variable, index: int):
        self.whole = whole
        self._part = (tf_variables.shards_of(whole._value) or ())[index]
        super().__init__(
            initializer=lambda shape, dtype: None,
            shape=self._part.shape,
            dtype=whole.dtype,
            name=f"{whole.name}_part_{index}",
        )
        self._path = whole.path
        self.constraint = whole.constraint

    def _initialize_with_initializer(self, initializer: Function[tf.Tensor]) -> None:
        self._value = self._part
