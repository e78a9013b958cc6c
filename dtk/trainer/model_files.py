"""Save a model safely even if several processes save it to the same path.

`model.save`, `save_weights`, `export` and `tf.train.Checkpoint` write next to the path first and
then move the result into place, so a reader always sees a whole file. No rank waits for another, so
one may save alone.

The files of one export only fit each other: TensorFlow names its variables anew each time. So a
folder is moved as a whole; a folder that already holds the same model stays, since another process
may be reading it.
"""

from __future__ import annotations

import contextlib
import dis
import fcntl
import functools
import hashlib
import inspect
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_variables
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.strategy import tell

# A SavedModel has this folder for the files of other tools.
_STAMP = Path("assets.extra", "dtk-model-hash")
# Packages of which all is known by its name; and values that are known by their `repr`.
_LIBRARIES = ("dtk", "keras", "logging", "ml_dtypes", "numpy", "tensorflow")
_PLAIN = (bool, int, float, complex, bytes, range, slice, tf.DType)


def install() -> None:
    """Make everything that writes a model go through `write`, or `write_checkpoint`."""
    keras_models.patch_saving(write, write_checkpoint)
    keras_models.patch_folders(_make_folder, _remove_folder)


def _make_folder(path: str, *, original: Callable[[str], object]) -> None:
    """Make a folder for a callback's files, unless another process is faster."""
    try:
        original(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _remove_folder(path: str, *, original: Callable[[str], object]) -> None:
    """Remove a folder that another process may be removing."""
    if "://" not in path:
        shutil.rmtree(path, ignore_errors=True)
        if not os.path.exists(path):
            return
    with contextlib.suppress(FileNotFoundError, tf.errors.NotFoundError):
        original(path)


def write(model: keras.Model, path: object, save: Callable[[object], object], how: str) -> object:
    """Write a model to a path so that no process ever reads half of it."""
    _check_whole(model)
    _tell_of_window(model, how)
    # Metric state is read as this process's own, not summed.
    extended = getattr(keras_models.owner_of(model), "extended", None)
    with getattr(extended, "undistributed", contextlib.nullcontext)():
        if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
            return save(path)
        target = Path(path)
        if how.startswith("export"):
            target.parent.mkdir(parents=True, exist_ok=True)  # as Keras does
        if not target.parent.is_dir():
            return save(path)  # Keras makes the folder, or raises its own error
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            beside = Path(folder, target.name)
            saved = save(str(beside) if isinstance(path, str) else beside)
            if (beside / "saved_model.pb").is_file():
                settings = settings_of(model)
                stamp = None if settings is None else f"{hash_of(model, how)} {settings}"
                _exchange(beside, target, stamp)
            else:
                _move(Path(folder), target.parent)
        return saved


def write_checkpoint(prefix: str, save: Callable[[str], object]) -> object:
    """Write a checkpoint of TensorFlow's, whose files only fit each other."""
    if "://" in prefix or not tf.executing_eagerly():
        return save(prefix)
    target = Path(prefix)
    target.parent.mkdir(parents=True, exist_ok=True)  # as TensorFlow does
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        save(str(Path(folder, target.name)))
        with _locked(target.parent):
            _move(Path(folder), target.parent)
    return tf.constant(prefix)


def _check_whole(model: keras.Model) -> None:
    weights = getattr(model, "weights", ())  # a FeatureSpace has none
    part = next((v for v in weights if not keras_variables.is_of_all(v)), None)
    if part is not None:
        raise ValueError(
            f"model {model.name!r}: this process holds only a part of it (for example, a part of "
            f"{part.path!r}), and would save only that. Call dtk.layers.whole(model) on every rank "
            "and save the model that it returns, or use dtk.callbacks.Checkpoint"
        )


def _tell_of_window(model: keras.Model, how: str) -> None:
    """Print once that a file has one rank's part of an accumulation window."""
    if how.startswith("export"):
        return
    for exchange, variables in shared_optimizer.windows_of(model):
        several = exchange.strategy.num_replicas_in_sync > 1
        if not several or not exchange.divided or exchange.told_of_window:
            continue
        if any(np.any(keras.ops.convert_to_numpy(v)) for v in variables):
            exchange.told_of_window = True
            tell(
                exchange.strategy,
                f"model {model.name!r} is saved in the middle of an accumulation window, and the "
                "file holds only one rank's part of it: save at the end of an epoch, or use "
                "dtk.callbacks.Checkpoint",
            )


def _move(source: Path, target: Path) -> None:
    """Move the files below one folder to the same places below another; replace files there."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir():
            place.mkdir(exist_ok=True)
            _move(entry, place)
        else:
            entry.replace(place)


def hash_of(model: keras.Model, how: str = "") -> str:
    """Compute a hash of a model's weights, and of how they are written; see `settings_of`."""
    layers = [
        f"{type(layer).__name__} {getattr(getattr(layer, 'activation', None), '__name__', '')}"
        for layer in keras_models.layers_of(model)
    ]
    kind = f"{type(model).__name__} {how}".rstrip()
    digest = hashlib.blake2b(f"{kind} {layers}".encode(), digest_size=16)
    for variable in model.weights:
        digest.update(f"{tuple(variable.shape)} {variable.dtype}".encode())
        digest.update(keras.ops.convert_to_numpy(variable).tobytes())
    return digest.hexdigest()


def settings_of(model: keras.Model) -> str | None:
    """Compute a hash of what a model makes of its weights; None where nothing tells it.

    It is of the configurations of the layers, and of a script's own code with the attributes,
    constants and functions that it reads. Names of layers are left out: processes count them apart.
    """
    layers = keras_models.layers_of(model)
    numbers = {layer.name: f"layer {number}" for number, layer in enumerate(layers)}
    seen: dict[int, object] = {}

    def told(value: object) -> object:
        value = getattr(value, "python_function", value)  # of a tf.function
        if isinstance(value, str):
            return numbers.get(value, value)
        if isinstance(value, _PLAIN) or value is None or value is ...:
            return repr(value)
        if isinstance(value, np.ndarray | np.generic | tf.Tensor):
            array = np.asarray(value)
            entries = array.tolist() if array.dtype == object else array.tobytes()
            return [str(array.dtype), array.shape, entries]
        if isinstance(value, Mapping):
            # A lambda's code has the name of its file; `told_code` leaves it out.
            left_out = "config" if value.get("class_name") == "__lambda__" else None
            return [[told(key), told(one)] for key, one in value.items() if key != left_out]
        if isinstance(value, list | tuple | tf.TensorShape):
            return [told(one) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(told(one)) for one in value)
        if isinstance(value, types.CodeType):
            return [value.co_code, value.co_names, told(value.co_consts)]
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.MethodType):
            return [told(value.__func__), told(value.__self__)]
        if isinstance(value, functools.partial):
            return told([value.func, value.args, value.keywords])
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        kinds = (type, types.ModuleType, types.BuiltinFunctionType)
        is_function = isinstance(value, types.FunctionType)
        by_name = isinstance(value, kinds) or is_function and _is_of_library(value)
        if by_name or _package_of(value) in _LIBRARIES:
            return getattr(value, "__qualname__", type(value).__qualname__)
        # `layers` has those that predictions need.
        if isinstance(value, keras.Layer | keras.Metric | keras.Optimizer | tf.Module):
            return type(value).__qualname__
        if id(value) in seen:
            return "seen"
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            return told_code(value)
        # A TypeError if it has no attributes, and may have anything.
        return [type(value).__qualname__, told(_own_functions(type(value))), told(vars(value))]

    def told_code(function: types.FunctionType) -> object:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        known, package = function.__globals__, _package_of(function)
        read = [(name, known[name]) for name in _read_by(function.__code__, True) if name in known]
        # Of other things, such as a whole module, it reads a part.
        kinds = (*_PLAIN, str, tuple, np.ndarray)
        kept = [x for x in read if isinstance(x[1], kinds) or _package_of(x[1]) == package]
        return [told(one) for one in (function.__code__, function.__defaults__, cells, kept)]

    def told_layer(layer: keras.Layer) -> object:
        config: object = None
        with contextlib.suppress(NotImplementedError):  # a script's own layer needs none
            config = told(layer.get_config())
        functions = _own_functions(type(layer))
        names = {name for one in functions.values() for name in _read_by(one.__code__)}
        own = [one for one in type(layer).__mro__ if not _is_of_library(one)]
        given = [{k: v for k, v in vars(one).items() if k in names} for one in (*own, layer)]
        passed = [f for f in vars(layer).values() if isinstance(f, types.FunctionType)]
        passed = [f for f in passed if not _is_of_library(f)]
        return [type(layer).__name__, config, told([*functions.items(), *given, *passed])]

    try:
        told_layers = repr([told_layer(layer) for layer in layers])
    except Exception:  # a script's own objects raise whatever they raise
        return None
    return hashlib.blake2b(told_layers.encode(), digest_size=16).hexdigest()


def _package_of(value: object) -> str:
    """Return the first name of the module that defines a function, class, or an object's class."""
    module = getattr(value, "__module__", None) or type(value).__module__
    return str(module).partition(".")[0]


def _is_of_library(value: object) -> bool:
    package = _package_of(value)
    return package in _LIBRARIES or package != "__main__" and package in sys.stdlib_module_names


def _read_by(code: types.CodeType, is_global: bool = False) -> list[str]:
    """Return the names of the attributes, or globals, that code reads, with functions in it."""
    kinds = ("LOAD_GLOBAL",) if is_global else ("LOAD_ATTR", "LOAD_METHOD")
    names = [str(one.argval) for one in dis.get_instructions(code) if one.opname in kinds]
    inside = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return sorted({*names, *(name for one in inside for name in _read_by(one, is_global))})


def _own_functions(cls: type) -> dict[str, types.FunctionType]:
    """Return the functions of a class that a script has written, those of its properties too."""
    found = {}
    for one in cls.__mro__:
        for name, member in () if _is_of_library(one) else vars(one).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = getattr(function, "python_function", function)
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, types.FunctionType) and not _is_of_library(function):
                found[f"{one.__qualname__}.{name}"] = function
    return found


def _exchange(source: Path, target: Path, stamp: str | None) -> None:
    """Move one folder to the place of another, unless the other holds the same model.

    Without a stamp, nothing tells whether it does.
    """
    if stamp is not None:
        (source / _STAMP.parent).mkdir(exist_ok=True)
        (source / _STAMP).write_text(stamp)
    with _locked(target.parent):
        there = target / _STAMP
        if there.is_file() and there.read_text() == stamp:
            return
        before = source.parent / "before"
        if target.exists():
            target.rename(before)
        source.rename(target)
        for entry in before.iterdir() if before.is_dir() else ():
            if not (target / entry.name).exists():  # a file of one's own, beside the model's
                entry.rename(target / entry.name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Return a context that keeps other processes from moving folders, if the file system can."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
