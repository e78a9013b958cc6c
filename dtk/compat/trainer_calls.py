"""Calls of `fit` and its like, of every Keras model in this process.

Private names used: keras.src.backend.tensorflow.trainer.TensorFlowTrainer, whose methods are
replaced for good by the first call of `through`. Each has a test in
tests/strategies/test_private_names.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

from dtk.nests import Args, Function, Kwargs

NAMES = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


# Called as `handle(model, name, method, args, kwargs)`.
Handler: TypeAlias = Callable[[keras.Model, str, Function[object], Args, Kwargs], object]


def handler() -> Handler | None:
    """Return what handles the calls now; None where Keras's own do."""
    return getattr(TensorFlowTrainer.fit, "_dtk_handler", None)


def through(handle: Handler) -> None:
    """Make every such call as `handle(model, name, method, args, kwargs)` from now on.

    A model's own override of a method is called as ever; what it calls of Keras's goes through
    here. A later call replaces the handler.

    Args:
        handle: Gets the model, the method's name, Keras's own method bound to the model, and what
            it was called with.
    """
    for name in NAMES:
        current = getattr(TensorFlowTrainer, name)
        original = getattr(current, "_dtk_original", current)
        setattr(TensorFlowTrainer, name, _handled(name, original, handle))


def _handled(name: str, original: Function[object], handle: Handler) -> Function[object]:
    @functools.wraps(original)
    def call(self: keras.Model, *args: object, **kwargs: object) -> object:
        return handle(self, name, functools.partial(original, self), args, kwargs)

    call._dtk_original = original  # type: ignore[attr-defined]
    call._dtk_handler = handle  # type: ignore[attr-defined]
    return call
