"""Models to plan: saved ones, and functions that build them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import keras

from dtk.planning.quantity import PlanError

_ENDS = (".keras", ".h5")


def load(given: str) -> keras.Model:
    """Load a saved model, or build one by a function."""
    if given.endswith(_ENDS):
        return _saved(given)
    module, _, name = given.partition(":")
    where = f"--model {given}"
    if not module or not name.isidentifier():
        raise PlanError(
            f"{where}: expected a file that model.save wrote, such as model.keras, or "
            "package.module:function"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script's modules are beside it
    try:
        build = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise PlanError(f"{where}: cannot import {module}: {error}") from error
    if not callable(build):
        raise PlanError(f"{where}: {module} has no function {name}")
    try:
        model = build()
    except TypeError as error:
        raise PlanError(f"{where}: calling {name}() failed: {error}") from error
    if not isinstance(model, keras.Model):
        raise PlanError(
            f"{where}: {name}() returned a {type(model).__name__}; expected a keras.Model"
        )
    return model


def _saved(given: str) -> keras.Model:
    if not Path(given).exists():
        raise PlanError(f"--model {given}: no such file; write it with model.save({given!r})")
    try:
        return keras.saving.load_model(given)
    except (OSError, ValueError, TypeError) as error:
        raise PlanError(f"--model {given}: Keras cannot load it: {error}") from error
