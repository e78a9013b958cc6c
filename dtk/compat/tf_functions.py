"""Trace the `tf.function`s that a step calls into the step's own graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import (
    ag_ctx,
)
from tensorflow.python.eager.polymorphic_function import (
    autograph_util,
    function_type_utils,
    polymorphic_function,
)

from dtk.compat.replacing import replaced
from dtk.nests import Args, Function, Kwargs, Nest

_LIBRARIES = ("dtk", "keras", "tensorflow")


def inlined_if(wanted: Callable[[], bool]) -> AbstractContextManager[None]:
    """Return a context in which a script's `tf.function` is traced into the graph that calls it.

    A loss in a separate graph could not be weighed by tensors of the step's graph.
    """
    original = polymorphic_function.Function.__call__

    @functools.wraps(original)
    def call(
        self: tf.types.experimental.PolymorphicFunction, *args: object, **kwargs: object
    ) -> Nest:
        if not wanted() or _package(self.python_function) in _LIBRARIES:
            return original(self, *args, **kwargs)
        python, given = self.python_function, _canonical(self, args, kwargs)
        if self._autograph:
            python = autograph_util.py_func_from_autograph(python, None)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):  # even if the caller is not converted
            return python(*given.args, **given.kwargs)

    return replaced(polymorphic_function.Function, __call__=call)


def _canonical(
    function: tf.types.experimental.PolymorphicFunction, args: Args, kwargs: Kwargs
) -> inspect.BoundArguments:
    """Return the arguments with which TensorFlow would trace a function."""
    given = function_type_utils.canonicalize_function_inputs(
        args, kwargs, function._function_type, function._default_values, function._is_pure
    )
    given.arguments = tf.nest.map_structure(_tensor_of, given.arguments)
    return given


def _tensor_of(leaf: object) -> object:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def _package(function: Function[object]) -> str:
    return (getattr(function, "__module__", None) or "").partition(".")[0]
