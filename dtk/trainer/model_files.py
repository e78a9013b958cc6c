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
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from dtk.compat import keras_models, keras_variables
from dtk.trainer.gradients import shared_optimizer
from dtk.trainer.ranks import settings
from dtk.trainer.replica import trial_reasons
from dtk.trainer.strategy import tell

# A SavedModel has this folder for the files of other tools.
_STAMP = Path("assets.extra", "dtk-model-hash")


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
                # Nothing tells what a script's own code makes of weights.
                own = not isinstance(model, keras.Model) or trial_reasons.of_predict(model)
                stamp = None if own else f"{hash_of(model, how)} {settings_of(model)}"
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
        divided = several and exchange.divided
        if divided and any(np.any(keras.ops.convert_to_numpy(v)) for v in variables):
            tell(
                exchange.strategy,
                f"model {model.name!r} is saved in the middle of an accumulation window, and the "
                "file holds only one rank's part of it: save at the end of an epoch, or use "
                "dtk.callbacks.Checkpoint",
                once=True,
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


def settings_of(model: keras.Model) -> str:
    """Compute a hash of how a model's layers are configured and joined, but not of their code.

    Names of layers are left out: processes count them apart.
    """
    layers = [model, *keras_models.layers_of(model)]
    numbers = {layer.name: f"layer {number}" for number, layer in enumerate(layers)}

    def plain(value: object) -> object:
        if isinstance(value, str):
            return numbers.get(value, value)
        if isinstance(value, Mapping):
            is_lambda = value.get("class_name") == "__lambda__"  # whose code has its file's name
            return "lambda" if is_lambda else [[plain(k), plain(v)] for k, v in value.items()]
        if isinstance(value, list | tuple | tf.TensorShape):
            return [plain(one) for one in value]
        return settings.plain(value)

    def config_of(layer: keras.Layer) -> object:
        with contextlib.suppress(NotImplementedError):  # a script's own layer needs none
            return plain(layer.get_config())
        return None

    configs = repr([config_of(layer) for layer in layers])
    return hashlib.blake2b(configs.encode(), digest_size=16).hexdigest()


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
