"""Calls of `fit` and its like, of every Keras model in this process.

The methods of `keras.Model` are replaced for good by the first call of `through`. Public names
only: under `dtk run` this is imported with any Keras, even one that dtk cannot train with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import keras

from dtk.nests import Args, Function, Kwargs

NAMES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


# Called as `handle(model, name, method, args, kwargs)`.
Handler: TypeAlias = Callable[[keras.Model, str, Function[object], Args, Kwargs], object]


def handler() -> Handler | None:
    """Return what handles the calls now; None where Keras's own do."""
    return getattr(keras.Model.fit, "_dtk_handler", None)


def through(handle: Handler) -> None:
    """Make every such call as `handle(model, name, method, args, kwargs)` from now on.

    A model's own override of a method is called as ever; what it calls of Keras's goes through
    here. A later call replaces the handler.
    """
    for name in NAMES:
        current = getattr(keras.Model, name)
        original = getattr(current, "_dtk_original", current)
        setattr(keras.Model, name, _handled(name, original, handle))


def _handled(name: str, original: Function[object], handle: Handler) -> Function[object]:
    @functools.wraps(original)
    def call(self: keras.Model, *args: object, **kwargs: object) -> object:
        return handle(self, name, functools.partial(original, self), args, kwargs)

    vars(call).update(_dtk_original=original, _dtk_handler=handle)
    return call
