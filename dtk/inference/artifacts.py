"""Exported models, run as whoever serves them would: by the runtime of their format."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk import quiet
from dtk.nests import Array, Nest, Specs
from dtk.version import pip_install

# How each format's files end; a SavedModel is a folder.
ENDINGS = {"keras": ".keras", "litert": ".tflite", "onnx": ".onnx", "tf_saved_model": ""}

# Runs an exported model: inputs -> outputs, see `load`.
Run: TypeAlias = Callable[[Nest], Nest]


def load(path: str | os.PathLike[str]) -> Run:
    """Load what `export` has written, by its format's own runtime.

    Args:
        path: File or folder; its ending says the format, as of `export`.

    Returns:
        A function of inputs: an array, or where there are several a dict by the names of the
        model's inputs. It returns an array, or where there are several outputs a dict by their
        names (a list, where the model returned a list). LiteRT's runs in one thread.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ImportError: ONNX's runtime is not installed.
        ValueError: The file is in no format that is known here.

    Example:
        >>> import keras, numpy as np, tempfile
        >>> from dtk.inference import export
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     run = load(export(model, f"{place}/model.keras", "keras"))
        ...     run(np.ones((3, 4), "float32")).shape
        (3, 2)
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; give the path that export was given")
    ending = path.suffix
    if path.is_dir():
        return _saved_model(path)
    if ending == ".tflite":
        return _litert(path)
    if ending == ".onnx":
        return _onnx(path)
    if ending == ".keras":
        return _keras(path)
    raise ValueError(
        f"{path} ends with {ending!r}; known are folders of SavedModels, and files that end with "
        f"{', '.join(filter(None, ENDINGS.values()))}"
    )


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file, or of all files in a folder.

    Args:
        path: The file or folder.
    """
    path = Path(path)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _saved_model(path: Path) -> Run:
    loaded = tf.saved_model.load(str(path))  # which its functions do not keep alive

    def run(x: Nest) -> Nest:
        inputs = tf.nest.map_structure(tf.convert_to_tensor, x)
        return keras.tree.map_structure(_as_array, loaded.serve(inputs))

    return run


def _keras(path: Path) -> Run:
    model = keras.saving.load_model(path, compile=False)
    specs = specs_of(model)
    call = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
    if specs is None:
        return lambda x: keras.tree.map_structure(_as_array, call(x))
    traced = call.get_concrete_function(specs)  # once, whatever the number of rows

    def run(x: Nest) -> Nest:
        given = keras.tree.map_structure(lambda v, s: tf.convert_to_tensor(v, s.dtype), x, specs)
        return keras.tree.map_structure(_as_array, traced(given))

    return run


def specs_of(model: keras.Model) -> Specs:
    """Return what a model takes, with any number of rows; None if it does not say."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    specs = [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in inputs]
    if isinstance(model, keras.Sequential):
        return specs[0]
    return keras.tree.pack_sequence_as(model.input, specs)


def _litert(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Warning: tf.lite.Interpreter is deprecated")
        with quiet.filtered():
            interpreter = tf.lite.Interpreter(str(path), num_threads=1)
            ((name, signature),) = interpreter.get_signature_list().items()
            runner = interpreter.get_signature_runner(name)
    inputs = signature["inputs"]

    def run(x: Nest) -> Nest:
        return _unnamed(runner(**_named(x, inputs)))

    return run


def _onnx(path: Path) -> Run:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            f"running an ONNX file needs onnxruntime; run `{pip_install('export')}`"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]

    def run(x: Nest) -> Nest:
        found = session.run(None, _named(x, inputs))
        return _unnamed(dict(zip(outputs, found, strict=True)))

    return run


def _named(x: Nest, names: list[str]) -> dict[str, Array]:
    """Return the inputs by name."""
    if isinstance(x, Mapping):
        missing = sorted(set(names) - set(x))
        if missing:
            raise ValueError(f"no input {missing[0]!r}; given are {sorted(x)}, wanted {names}")
        return {name: _as_array(x[name]) for name in names}
    leaves = keras.tree.flatten(x)
    if len(leaves) != 1 or len(names) != 1:
        raise ValueError(
            f"{len(leaves)} inputs without names, and the model takes {names}; give a dict by name"
        )
    return {names[0]: _as_array(leaves[0])}


def _unnamed(outputs: dict[str, Array]) -> Nest:
    """Return outputs without the names that TensorFlow makes up for those that have none."""
    made_up = [re.fullmatch(r"(?:output|Identity)(?:_(\d+))?(?::0)?", name) for name in outputs]
    if not all(made_up):
        return outputs
    order = sorted(outputs, key=lambda name: int((re.search(r"_(\d+)", name) or "00")[1]))
    return outputs[order[0]] if len(order) == 1 else [outputs[name] for name in order]


def _as_array(value: tf.Tensor) -> Array:
    return np.asarray(value)
