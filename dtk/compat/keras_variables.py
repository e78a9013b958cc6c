"""The TensorFlow variable behind a Keras variable, and Keras variables for parts of another."""

from __future__ import annotations

import keras
import tensorflow as tf

from dtk.compat import tf_variables
from dtk.nests import Function


def stored(variable: keras.Variable) -> tf.Variable:
    """Return the TensorFlow variable behind a Keras variable, in any scope."""
    return variable._value


def is_alone(variable: keras.Variable) -> bool:
    """Return whether a variable that is summed when read was created outside a scope."""
    return (
        variable.synchronization == "on_read"
        and variable._value is not None
        and not tf_variables.is_distributed(variable._value)
    )


def move_variable(variable: keras.Variable) -> None:
    """Give a Keras variable new storage in the current scope; it keeps its value."""
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
