"""Calls of `fit` and its like, of every Keras model in this process.

The first call of `through` replaces the methods of `keras.Model` for good. Public names only:
`dtk run` imports this with any Keras, even a version that dtk cannot train with.
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
    """Return the present handler; None while the methods are Keras's own."""
    return getattr(keras.Model.fit, "_dtk_handler", None)


def through(handle: Handler) -> None:
    """Make every such call as `handle(model, name, method, args, kwargs)` from now on.

    A model's own override runs as before; Keras's methods that it calls go through here. A later
    call replaces the handler.
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
