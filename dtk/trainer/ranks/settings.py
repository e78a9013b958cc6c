"""What a model is made of besides its variables, to compare between ranks before training.

Ranks that search for settings, each by itself, or adapt a vocabulary to their own rows, would train
another model on each rank under weights of one shape.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models

SAME_SETTINGS = (
    "make the model with the same settings on every rank, and adapt layers to the same rows; "
    "dtk.search runs one study for all ranks"
)
# Names count layers of a process, and shapes are of what it was built from; seeds are the ranks'
# own, and rank 0's rate is taken by all.
_OF_A_RANK = {
    *("name", "module", "registered_name", "build_config", "batch_shape", "keras_history"),
    *("input_layers", "output_layers", "inbound_nodes", "seed", "learning_rate"),
}


def settings_of(model: keras.Model) -> list[tuple[str, object]]:
    """Return pairs of a description and a value, in the same order on all ranks."""
    of_model = f"of model {model.name!r}"
    compiled = _told(model.get_compile_config) if model.compiled else None
    pairs = [(f"{path} given to compile {of_model}", value) for path, value in _flat(compiled)]
    layers = [
        x for x in keras_models.layers_of(model) if not isinstance(x, keras.layers.InputLayer)
    ]
    for number, layer in enumerate(layers):
        kind = f"layer {number} ({type(layer).__name__}) {of_model}"
        # A functional model's own configuration names its layers.
        config = None if isinstance(layer, keras.Model) else _told(layer.get_config)
        pairs += [(f"{path} of {kind}", value) for path, value in _flat(config)]
        if keras_models.is_from_keras(type(layer)):
            pairs += [(f"{name} of {kind}", value) for name, value in _adapted(layer)]
    return pairs


def _told(describe: Callable[[], object]) -> object:
    """Return a configuration; or that there is none, as of what a script cannot serialize."""
    try:
        with warnings.catch_warnings(action="ignore"):  # such as of lambdas, which stay here
            return describe()
    except Exception as error:  # a script's own get_config raises whatever it raises
        return {"configuration": f"none: {type(error).__name__}"}


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of a configuration with their paths."""
    if isinstance(value, Mapping):
        kind = value.get("class_name")
        # A lambda's code as bytes differs by what else its process knows.
        inner = {} if kind == "__lambda__" else value
        for key, one in inner.items():
            if key not in _OF_A_RANK or isinstance(one, Mapping):
                yield from _flat(one, f"{path}.{key}" if path else str(key))
        if "Policy" in str(kind):
            yield f"{path}.name", repr(value.get("config"))
    elif isinstance(value, list | tuple) and len(value) <= 20:
        for index, one in enumerate(value):
            yield from _flat(one, f"{path}[{index}]")
    elif path:
        yield path, plain(value)


def plain(value: object) -> object:
    """Return a value that can be compared with another process's."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value if value == value else "nan"  # which is equal to none
    if isinstance(value, np.ndarray | np.generic | tf.Tensor | tf.Variable):
        array = np.asarray(value)
        # Strings are objects, of which an array has the addresses.
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return array.shape, hashlib.blake2b(content, digest_size=8).hexdigest()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return getattr(value, "__name__", type(value).__name__)


def _adapted(layer: keras.Layer) -> Iterator[tuple[str, object]]:
    """Yield what a layer has learned that is no variable: vocabularies, boundaries, moments."""
    if hasattr(layer, "save_assets"):
        with tempfile.TemporaryDirectory(prefix="dtk-") as folder:
            layer.save_assets(folder)
            for file in sorted(Path(folder).rglob("*")):
                if file.is_file():
                    yield file.name, hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    for name, value in sorted(vars(layer).items()):
        if isinstance(value, np.ndarray | tf.Tensor) or name == "bin_boundaries":
            yield name, plain(value)
