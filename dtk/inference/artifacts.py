"""Exported models: written by rank 0, run by the runtime of their format, and timed.

An artifact is written beside its path, loaded by the runtime of its format and run on a few rows.
Only then is it moved into its place.
"""

from __future__ import annotations

import importlib
import logging.handlers
import os
import re
import statistics
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from dtk import quiet
from dtk.communicators.base import Communicator
from dtk.communicators.root import on_root
from dtk.errors import at_rank
from dtk.inference.weights import check_ready, quantized_layers, ranks_of
from dtk.nests import Array, Specs, Tree
from dtk.patches import patch
from dtk.strategies.dtk_strategy import DtkStrategy
from dtk.trainer import model_files
from dtk.version import pip_install

# How each format's files end; a SavedModel is a folder.
ENDINGS = {"keras": ".keras", "litert": ".tflite", "onnx": ".onnx", "tf_saved_model": ""}
Format: TypeAlias = Literal["tf_saved_model", "litert", "onnx", "keras"]
# Runs an exported model: inputs -> outputs, see `load`.
Run: TypeAlias = Callable[[Tree], Tree]


class ExportError(RuntimeError):
    """Error of an artifact that was not made, or does not compute what the model does."""


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    format: Format = "tf_saved_model",
    *,
    strategy: DtkStrategy | Communicator | None = None,
    sample: Tree | Array = None,
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
    ranks = ranks_of(model, strategy)
    check_ready(model, ranks)
    if tolerance is None:
        lossy = bool(options.get("optimizations") or quantized_layers(model))
        # Eight bits: an entry on the border between two steps of 1/127 may fall to either side.
        tolerance = 0.1 if lossy else 1e-4

    def write(beside: object) -> None:
        place = Path(str(beside))
        x = _drawn(model) if sample is None and verify else sample
        try:
            if x is not None:
                model(x, training=False)  # Keras writes ONNX files of models that were called only
            _write(model, place, format, options)
        except Exception as error:
            if isinstance(error, ImportError):
                raise
            raise _failed(
                f"model {model.name!r} cannot be exported as {format}: {_gist(error)}; "
                f"{_cure(model, format)}"
            ) from error
        if verify:
            _verify(model, place, format, x, tolerance)

    def alone() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        model_files.write(model, path, write, f"{format} {options}")

    on_root(ranks, alone)
    return path


def _check_name(path: Path, format: str) -> None:
    ending = ENDINGS.get(format)
    if ending is None:
        raise ValueError(
            f"format={format!r}; known are {', '.join(sorted(ENDINGS))}. For TensorRT, give the "
            "file of 'onnx' to `trtexec --onnx=`"
        )
    if path.suffix != ending and (ending or path.suffix in ENDINGS.values()):
        what = f"files that end with {ending}" if ending else "a folder without such an ending"
        raise ValueError(
            f"{str(path)!r} for format={format!r}, which writes {what}; give "
            f"{str(path.with_suffix(ending))!r}, or another format"
        )


def _write(model: keras.Model, place: Path, format: str, options: Mapping[str, object]) -> None:
    if format == "keras":
        model.save(place, **options)
        return
    if format != "onnx":
        with quiet.filtered():  # of what LiteRT's converter writes, whatever the level
            model.export(str(place), format=format, verbose=False, **options)
        return
    _imported("tf2onnx")
    _imported("onnxruntime")
    # tf2onnx logs an operation that it does not know, and goes on without it.
    logger, errors = logging.getLogger("tf2onnx"), logging.handlers.BufferingHandler(2**20)
    errors.setLevel(logging.ERROR)
    logger.addHandler(errors)
    try:
        with patch(logger, propagate=False), warnings.catch_warnings():
            # Keras looks whether NumPy is an old one.
            warnings.filterwarnings("ignore", "In the future `np.object`", FutureWarning)
            model.export(str(place), format=format, verbose=False, **options)
    finally:
        logger.removeHandler(errors)
    if errors.buffer:
        raise ExportError("; ".join(record.getMessage() for record in errors.buffer))


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"ONNX needs {name}, which is not installed; run `{pip_install('export')}`"
        ) from error


def _failed(what: str) -> ExportError:
    return ExportError(at_rank(0, what))


def _cure(model: keras.Model, format: str) -> str:
    """Say what can be done about a conversion that fails."""
    if format in ("litert", "onnx") and quantized_layers(model):
        return (
            "a model of Keras's int8 becomes a SavedModel or a .keras file; for LiteRT export "
            "the model as it was before, with optimizations=[tf.lite.Optimize.DEFAULT]"
        )
    if format == "onnx":
        return (
            "use layers made of operations that tf2onnx knows (gelu with approximate=True, not "
            "the exact one), or another format"
        )
    return "change what it names, or try another format"


def _gist(error: Exception) -> str:
    """Return the line of an error that says what is wrong; Keras and TensorFlow add many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w+Error: ", line)]
    return next(iter([*named, *lines]), type(error).__name__)


def _verify(
    model: keras.Model, place: Path, format: str, x: Tree | Array, tolerance: float
) -> None:
    """Run artifact and model on the same rows."""
    wanted, leaves = model(x, training=False), keras.tree.flatten(x)
    inputs = getattr(model, "inputs", None)
    if format in ("litert", "onnx") and inputs and len(leaves) > 1 and not isinstance(x, dict):
        # These files know the inputs of a list by their names.
        x = {each.name: leaf for each, leaf in zip(inputs, leaves, strict=True)}
    try:
        outputs = load(place)(x)
    except Exception as error:
        raise _failed(
            f"what was exported as {format} cannot be run: {_gist(error)}; nothing was written"
        ) from error
    pairs = zip(keras.tree.flatten(wanted), keras.tree.flatten(outputs), strict=False)
    for number, (ours, theirs) in enumerate(pairs):
        ours = np.asarray(ours)
        if ours.shape != theirs.shape:
            difference = f"has shape {theirs.shape} in place of {ours.shape}"
        else:
            largest = float(np.abs(ours).max(initial=1e-30))
            far = float(np.abs(ours.astype("float64") - theirs).max(initial=0.0)) / largest
            if far <= tolerance:
                continue
            difference = f"differs by {far:.1e} of the largest output, more than {tolerance:.0e}"
        raise _failed(
            f"output {number} of what was exported as {format} {difference}; give tolerance= if "
            "that is to be expected, or sample= for rows as the model will see; nothing was written"
        )


def _drawn(model: keras.Model) -> Tree:
    """Return two rows of a model's inputs: random numbers from 0 to 1, or zeros."""
    specs = _specs_of(model)
    if specs is None:
        raise ValueError(
            f"model {model.name!r} does not say what its inputs are; give sample= (a few rows) to "
            "compare the artifact with the model, or verify=False"
        )
    random = np.random.default_rng(0)

    def rows(spec: tf.TensorSpec) -> Array:
        shape = (2, *[size or 1 for size in spec.shape[1:]])
        drawn = random.random(shape) if spec.dtype.is_floating else np.zeros(shape)
        return drawn.astype(spec.dtype.as_numpy_dtype)

    return keras.tree.map_structure(rows, specs)


def _specs_of(model: keras.Model) -> Specs:
    """Return what a model takes, with any number of rows; None if it does not say."""
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    specs = [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in inputs]
    if isinstance(model, keras.Sequential):
        return specs[0]
    return keras.tree.pack_sequence_as(model.input, specs)


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
    if path.is_dir():
        run = _saved_model(path)
    elif path.suffix in _RUNTIMES:
        run = _RUNTIMES[path.suffix](path)
    else:
        raise ValueError(
            f"{path} ends with {path.suffix!r}; known are folders of SavedModels, and files that "
            f"end with {', '.join(_RUNTIMES)}"
        )
    return lambda x: keras.tree.map_structure(np.asarray, run(x))


def _saved_model(path: Path) -> Run:
    loaded = tf.saved_model.load(str(path))  # which its functions do not keep alive
    return lambda x: loaded.serve(tf.nest.map_structure(tf.convert_to_tensor, x))


def _keras(path: Path) -> Run:
    model = keras.saving.load_model(path, compile=False)
    specs = _specs_of(model)
    call = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
    if specs is None:
        return call
    traced = call.get_concrete_function(specs)  # once, whatever the number of rows
    return lambda x: traced(
        keras.tree.map_structure(lambda v, s: tf.convert_to_tensor(v, s.dtype), x, specs)
    )


def _litert(path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*Warning: tf.lite.Interpreter is deprecated")
        with quiet.filtered():
            interpreter = tf.lite.Interpreter(str(path), num_threads=1)
            ((name, signature),) = interpreter.get_signature_list().items()
            runner = interpreter.get_signature_runner(name)
    return lambda x: _unnamed(runner(**_named(x, signature["inputs"])))


def _onnx(path: Path) -> Run:
    onnxruntime = _imported("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]
    return lambda x: _unnamed(dict(zip(outputs, session.run(None, _named(x, inputs)), strict=True)))


_RUNTIMES = {".keras": _keras, ".tflite": _litert, ".onnx": _onnx}


def _named(x: Tree, names: Sequence[str]) -> dict[str, Array]:
    if not isinstance(x, Mapping):
        leaves = keras.tree.flatten(x)
        if len(leaves) != 1 or len(names) != 1:
            raise ValueError(
                f"{len(leaves)} inputs without names, and the model takes {names}; give a dict by "
                "name"
            )
        x = {names[0]: leaves[0]}
    missing = sorted(set(names) - set(x))
    if missing:
        raise ValueError(f"no input {missing[0]!r}; given are {sorted(x)}, wanted {names}")
    return {name: np.asarray(x[name]) for name in names}


def _unnamed(outputs: dict[str, Array]) -> Tree:
    """Return outputs without the names that TensorFlow makes up for those that have none."""
    made_up = [re.fullmatch(r"(?:output|Identity)(?:_(\d+))?(?::0)?", name) for name in outputs]
    if not all(made_up):
        return outputs
    order = sorted(outputs, key=lambda name: int((re.search(r"_(\d+)", name) or "00")[1]))
    return outputs[order[0]] if len(order) == 1 else [outputs[name] for name in order]


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file, or of all files in a folder.

    Args:
        path: The file or folder.
    """
    files = [Path(path), *Path(path).rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())


class Latency(NamedTuple):
    """Milliseconds of a call.

    Attributes:
        median: Half of the calls took less.
        low: A quarter took less.
        high: A quarter took more.
        calls: How many were measured.
    """

    median: float
    low: float
    high: float
    calls: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ms ({self.low:.2f}-{self.high:.2f})"


def latency(call: Callable[[], object], calls: int = 50, warm_up: int = 5) -> Latency:
    """Measure how long a call takes in this process.

    Args:
        call: What is measured; it must wait for its result, as anything does that returns NumPy
            arrays.
        calls: How many are measured, 2 or more.
        warm_up: How many are made before.

    Returns:
        Median and quartiles.

    Raises:
        ValueError: Fewer than 2 calls.

    Example:
        >>> latency(lambda: sum(range(1000)), calls=10).calls
        10
    """
    if calls < 2:
        raise ValueError(f"calls={calls}, but quartiles take 2 or more")
    for _ in range(warm_up):
        call()
    seconds = timeit.repeat(call, number=1, repeat=calls)
    low, median, high = (1e3 * q for q in statistics.quantiles(seconds, n=4, method="inclusive"))
    return Latency(median, low, high, calls)
