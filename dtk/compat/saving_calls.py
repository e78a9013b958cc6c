"""Keras functions that write a model, or its weights, to a path.

The first call of `through` replaces these functions for good.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TypeAlias

import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from dtk.nests import Function

_ADDRESS = re.compile(" at 0x[0-9a-f]+")
PLACES = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
    (keras.Model, "export"),
)

# Called as `write(model, path, save, how)`, see `through`.
Write: TypeAlias = Callable[[keras.Model, object, Callable[[object], object], str], object]


def through(write: Write) -> None:
    """Make every such call as `write(model, path, save, how)` from now on."""
    for owner, name in PLACES:
        current = getattr(owner, name)
        original = getattr(current, "_dtk_original", current)
        setattr(owner, name, _written(name, original, write))


def _written(name: str, original: Function[object], write: Write) -> Function[object]:
    @functools.wraps(original)
    def save(model: keras.Model, filepath: object, *args: object, **kwargs: object) -> object:
        how = _ADDRESS.sub("", f"{name} {args} {kwargs}")
        return write(model, filepath, lambda path: original(model, path, *args, **kwargs), how)

    save._dtk_original = original  # type: ignore[attr-defined]
    return save
