"""Saving a model where several processes may save it to one path, or one of them alone.

`model.save`, `save_weights` and `export` write somewhere beside the path first and then move what
they wrote into its place: who loads sees a whole file, whoever wrote it. Nothing is sent to other
processes, so that one may save alone.

Files of one export fit each other only: TensorFlow names its variables anew each time. So a folder
is moved as a whole, and one that holds the same model already is left to those who may be reading
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import keras

from dtk.compat import keras_models, keras_shards, saving_calls

# Where a SavedModel has room for what belongs to others.
_STAMP = Path("assets.extra", "dtk-model-hash")


def install() -> None:
    """Make everything that writes a model go through `write`, when processes are joined."""
    saving_calls.through(write)


def write(model: keras.Model, path: object, save: Callable[[object], object], how: str) -> object:
    """Write a model to a path, such that no process ever reads half of it."""
    _check_whole(model)
    with _local_reads(model):
        if not isinstance(path, str | os.PathLike) or "://" in os.fspath(path):
            return save(path)
        target = Path(path)
        if not target.parent.is_dir():
            return save(path)  # Keras says what is wrong, or makes it
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            beside = Path(folder, target.name)
            saved = save(str(beside) if isinstance(path, str) else beside)
            if (beside / "saved_model.pb").is_file():
                _exchange(beside, target, _stamp_of(model, how))
            else:
                _move(Path(folder), target.parent)
        return saved


def _check_whole(model: keras.Model) -> None:
    part = next((v for v in model.weights if not keras_shards.is_of_all(v)), None)
    if part is not None:
        raise ValueError(
            f"model {model.name!r}: this process holds only a part of it, such as of "
            f"{part.path!r}, and would save no more. Save what dtk.layers.whole(model) returns, "
            "which every rank calls, or use dtk.callbacks.Checkpoint"
        )


def _local_reads(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return a context in which metric state is read as it is in this process."""
    extended = getattr(keras_models.owner_of(model), "extended", None)
    local_reads = getattr(extended, "local_reads", None)
    return contextlib.nullcontext() if local_reads is None else local_reads()


def _move(source: Path, target: Path) -> None:
    """Move the files below one folder to the same places below another, over those there."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        if entry.is_dir():
            place.mkdir(exist_ok=True)
            _move(entry, place)
        else:
            entry.replace(place)


def _stamp_of(model: keras.Model, how: str) -> str:
    """Compute a hash by which processes find out that they export the same model."""
    digest = hashlib.blake2b(f"{type(model).__name__} {how}".encode(), digest_size=16)
    for variable in model.weights:
        digest.update(f"{tuple(variable.shape)} {variable.dtype}".encode())
        digest.update(keras.ops.convert_to_numpy(variable).tobytes())
    return digest.hexdigest()


def _exchange(source: Path, target: Path, stamp: str) -> None:
    """Move one folder to the place of another, unless that holds the same model."""
    (source / _STAMP.parent).mkdir(exist_ok=True)
    (source / _STAMP).write_text(stamp)
    with _locked(target.parent):
        there = target / _STAMP
        if there.is_file() and there.read_text() == stamp:
            return
        if target.exists():
            target.rename(source.parent / "before")
        source.rename(target)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from exchanging folders, where the file system has locks."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)
