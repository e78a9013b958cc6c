"""Export a model from rank 0, for all: written beside its path, run once, and then moved there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk import quiet
from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.errors import at_rank
from dtk.inference import artifacts, local_prediction
from dtk.inference.quantizing import quantized_layers
from dtk.nests import Array, Nest
from dtk.strategies.base import DtkStrategy
from dtk.trainer import saving
from dtk.version import pip_install

Format: TypeAlias = Literal["tf_saved_model", "litert", "onnx", "keras"]

# How far an artifact's outputs may be from the model's, relative to the largest of them.
_TOLERANCE = 1e-4
# Eight bits: an entry on the border between two steps of 1/127 may fall to either side.
_TOLERANCE_QUANTIZED = 0.1
_ROWS = 2
_NOT_WRITTEN = "nothing was written"


class ExportError(RuntimeError):
    """Error of an artifact that was not made, or does not compute what the model does."""


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    format: Format = "tf_saved_model",
    *,
    strategy: DtkStrategy | Communicator | None = None,
    sample: Nest | Array = None,
    verify: bool = True,
    tolerance: float | None = None,
    **options: object,
) -> Path:
    """Export a model from rank 0, while the others wait. Every rank calls this.

    The artifact is written beside its path, loaded by its own runtime and run on a few rows, of
    which it must compute what the model does. Then it is moved into its place, so that whoever
    loads it finds a whole one. `model.export` may be called as well, on one rank or all; it checks
    nothing, and so leaves an ONNX file with operations that no runtime knows.

    Args:
        model: A built model.
        path: Where to; its folder is made where it is missing, and what is there is replaced.
        format: "tf_saved_model", a folder for TensorFlow Serving; "litert", a file that ends with
            .tflite; "onnx", with .onnx, which needs the extra `export`; "keras", Keras's
            own file, which ends with .keras.
        strategy: The ranks; None takes the model's own.
        sample: Rows to compare artifact and model on, as the model takes them; None draws some, for
            models that know their inputs.
        verify: Whether to compare them.
        tolerance: The largest difference of an output, relative to the largest output; None is
            1e-4, or 0.1 for a model that is quantised and for LiteRT with `optimizations`.
        options: More for `keras.Model.export`, such as `input_signature`; for LiteRT
            `optimizations=[tf.lite.Optimize.DEFAULT]`, which stores weights in 8 bits, and
            `representative_dataset`; for ONNX `opset_version`.

    Returns:
        The path, on every rank.

    Raises:
        ValueError: There is no such format, or the path does not end as its files do.
        ExportError: It could not be converted, or computes something else; on every rank.
        ImportError: What the format needs is not installed; on every rank.
        DisagreementError: Ranks hold different weights.

    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> with tempfile.TemporaryDirectory() as place:
        ...     export(model, f"{place}/model.keras", "keras").name
        'model.keras'
    """
    path = Path(path)
    _check_name(path, format)
    ranks = local_prediction.ranks_of(model, strategy)
    local_prediction.check_ready(model, ranks)
    if tolerance is None:
        lossy = bool(options.get("optimizations") or quantized_layers(model))
        tolerance = _TOLERANCE_QUANTIZED if lossy else _TOLERANCE

    def write(beside: object) -> None:
        place = Path(str(beside))
        x = _drawn(model) if sample is None and verify else sample
        with _explained(model, format):
            if x is not None:
                model(x, training=False)  # Keras writes ONNX files of models that were called only
            _write(model, place, format, options)
        if verify:
            _verify(model, place, format, x, tolerance)

    def alone() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        saving.write(model, path, write, f"{format} {options}")

    on_root(ranks, alone)
    return path


def _check_name(path: Path, format: str) -> None:
    if format not in artifacts.ENDINGS:
        raise ValueError(f"format={format!r}; known are {', '.join(sorted(artifacts.ENDINGS))}")
    ending = artifacts.ENDINGS[format]
    if (
        path.suffix in artifacts.ENDINGS.values()
        and path.suffix != ending
        or (path.suffix != ending and ending)
    ):
        what = f"files that end with {ending}" if ending else "a folder without such an ending"
        raise ValueError(
            f"{str(path)!r} for format={format!r}, which writes {what}; give "
            f"{str(path.with_suffix(ending))!r}, or another format"
        )


def _write(model: keras.Model, place: Path, format: str, options: Mapping[str, object]) -> None:
    """Write one artifact, by Keras."""
    if format == "keras":
        model.save(place, **options)
    elif format == "onnx":
        _check_onnx_is_installed()
        with warnings.catch_warnings(), _errors_of("tf2onnx") as errors:
            # Keras looks whether NumPy is an old one.
            warnings.filterwarnings("ignore", "In the future `np.object`", FutureWarning)
            model.export(str(place), format=format, verbose=False, **options)
        if errors:
            raise ExportError("; ".join(errors))
    else:
        with quiet.filtered():  # of what LiteRT's converter writes, whatever the level
            model.export(str(place), format=format, verbose=False, **options)


def _check_onnx_is_installed() -> None:
    try:
        import onnxruntime  # noqa: F401
        import tf2onnx  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"ONNX needs {error.name}, which is not installed; run `{pip_install('export')}`"
        ) from error


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[list[str]]:
    """Return a context that gathers what a library logs as an error and then goes on from."""
    found: list[str] = []

    class Gather(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logger, handler = logging.getLogger(name), Gather(logging.ERROR)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


@contextlib.contextmanager
def _explained(model: keras.Model, format: str) -> Iterator[None]:
    """Say what can be done about a conversion that fails."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        cure = "change what it names, or try another format"
        if format in ("litert", "onnx") and quantized_layers(model):
            cure = (
                "a model of Keras's int8 becomes a SavedModel or a .keras file; for LiteRT export "
                "the model as it was before, with optimizations=[tf.lite.Optimize.DEFAULT]"
            )
        elif format == "onnx":
            cure = (
                "use layers made of operations that tf2onnx knows (gelu with approximate=True, not "
                "the exact one), or another format"
            )
        raise ExportError(
            at_rank(
                0, f"model {model.name!r} cannot be exported as {format}: {_gist(error)}; {cure}"
            )
        ) from error


def _gist(error: Exception) -> str:
    """Return the line of an error that says what is wrong; Keras and TensorFlow add many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+Error: ", line)]
    return next(iter([*named, *lines]), type(error).__name__)


def _verify(
    model: keras.Model, place: Path, format: str, x: Nest | Array, tolerance: float
) -> None:
    """Run artifact and model on the same rows."""
    wanted = keras.tree.map_structure(np.asarray, model(x, training=False))
    try:
        found = artifacts.load(place)(_by_name(model, x) if format in ("litert", "onnx") else x)
    except Exception as error:
        raise ExportError(
            at_rank(
                0, f"what was exported as {format} cannot be run: {_gist(error)}; {_NOT_WRITTEN}"
            )
        ) from error
    pairs = list(zip(_outputs(wanted), _outputs(found), strict=False))
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape:
            difference = f"has shape {theirs.shape} in place of {ours.shape}"
        else:
            largest = float(np.abs(ours).max(initial=1e-30))
            far = float(np.abs(ours.astype("float64") - theirs).max(initial=0.0)) / largest
            if far <= tolerance:
                continue
            difference = f"differs by {far:.1e} of the largest output, more than {tolerance:.0e}"
        raise ExportError(
            at_rank(
                0,
                f"output {number} of what was exported as {format} {difference}; give tolerance= "
                f"if that is to be expected, or sample= for rows as the model will see; "
                f"{_NOT_WRITTEN}",
            )
        )


def _drawn(model: keras.Model) -> Nest:
    """Return a few rows of a model's inputs: random numbers from 0 to 1, or zeros."""
    specs = artifacts.specs_of(model)
    if specs is None:
        raise ValueError(
            f"model {model.name!r} does not say what its inputs are; give sample= (a few rows) to "
            "compare the artifact with the model, or verify=False"
        )
    random = np.random.default_rng(0)

    def rows(spec: tf.TensorSpec) -> Array:
        shape = (_ROWS, *[size or 1 for size in spec.shape[1:]])
        if not spec.dtype.is_floating:
            return np.zeros(shape, spec.dtype.as_numpy_dtype)
        return random.random(shape).astype(spec.dtype.as_numpy_dtype)

    return keras.tree.map_structure(rows, specs)


def _by_name(model: keras.Model, x: Nest | Array) -> Nest:
    """Return several inputs by their names, which files of a flat list of inputs need."""
    inputs = getattr(model, "inputs", None)
    leaves = keras.tree.flatten(x)
    if isinstance(x, dict) or inputs is None or len(leaves) == 1:
        return x
    return {each.name: leaf for each, leaf in zip(inputs, leaves, strict=True)}


def _outputs(outputs: Nest) -> list[Array]:
    """Return outputs in an order that does not depend on how they are nested."""
    return [np.asarray(each) for each in keras.tree.flatten(outputs)]
