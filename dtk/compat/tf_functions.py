"""Functions of TensorFlow's that a step calls: made part of its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import tensorflow as tf
from tensorflow.python.autograph.core import (
    ag_ctx,
)
from tensorflow.python.eager.polymorphic_function import (
    autograph_util,
)

from dtk.compat.replacing import replaced
from dtk.nests import Function, Nest

_LIBRARIES = ("dtk", "keras", "tensorflow")


def inlined_if(wanted: Callable[[], bool]) -> AbstractContextManager[None]:
    """Return a context in which a script's `tf.function` is traced into the graph that calls it.

    A loss inside a graph of its own could not be weighed by what the step knows outside it.

    Args:
        wanted: Whether to, asked at each call.
    """
    kind = type(tf.function(lambda: None))
    original = kind.__call__

    @functools.wraps(original)
    def call(
        self: tf.types.experimental.PolymorphicFunction, *args: object, **kwargs: object
    ) -> Nest:
        if not wanted() or _package(self.python_function) in _LIBRARIES:
            return original(self, *args, **kwargs)
        python = self.python_function
        if self._autograph:
            python = autograph_util.py_func_from_autograph(python, None)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):  # where the caller is not converted
            return python(*args, **kwargs)

    return replaced(kind, __call__=call)


def _package(function: Function[object]) -> str:
    return (getattr(function, "__module__", None) or "").partition(".")[0]
