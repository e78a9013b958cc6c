"""A disk that is full, or read-only from some moment on: real ones, of the test's own."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import h5py
import keras
import numpy as np
import pytest

import dtk
from dtk.callbacks.checkpointing import checkpoint_files

from callbacks.bodies import compiled, fails, fitted, strategy

SIZE = 4 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "dtk-test", str(place)],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place):
    """Leave 100 kB: not enough for the 280 kB of a checkpoint."""
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    (place / "filler").write_bytes(bytes(free - 100_000))


def close(place):
    """Cover the checkpoints by themselves, read-only."""
    place = str(place / "checkpoints")
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def reopen(place):
    subprocess.run(["umount", "-l", str(place / "checkpoints")], check=True)


def saving(disk, harm, heal, options):
    """Four epochs, of which the second and the third cannot be saved."""
    strategy()
    place = pathlib.Path(disk, "checkpoints")
    breaks, heals = {
        "full": (fill, lambda disk: (disk / "filler").unlink()),
        "read-only": (close, reopen),
    }[harm]
    epochs = []

    class Harm(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            strategy().communicator.barrier()
            if strategy().is_chief and epoch == 1:
                breaks(pathlib.Path(disk))
            if strategy().is_chief and epoch == 3 and heal:
                heals(pathlib.Path(disk))
            epochs.append(epoch)

    said = io.StringIO()
    callback = dtk.callbacks.Checkpoint(place, **options)
    model = compiled(keras.optimizers.SGD(0.01), width=8000)
    with contextlib.redirect_stdout(said):
        failure = fails(fitted, model, Harm(), callback, rows=16, epochs=4)
    strategy().communicator.barrier()
    whole = [callback.files.read(name)[0]["epoch"] for name in callback.files.names()]
    left = sorted(path.name for path in place.iterdir() if path.name.startswith("."))
    return failure, said.getvalue(), epochs, whole, left


@pytest.mark.full("a cheaper test holds its rule")
@pytest.mark.parametrize("harm", ["full", "read-only"])
@pytest.mark.worlds(("collective", 2))
def test_by_default_training_goes_on_and_the_last_good_one_stays(pool, disk, harm):
    results = pool.run(saving, str(disk), harm, True, {}, timeout=60)
    for failure, _, epochs, whole, left in results:
        assert failure is None and epochs == [0, 1, 2, 3]
        assert whole == [4, 1] and not left
    said = results[0][1]
    assert said.count("no checkpoint was written, the newest one is checkpoint-00000001") == 2
    assert ("No space left" if harm == "full" else "Read-only") in said
    assert all(not other for _, other, *_ in results[1:]), "rank 0 speaks"


@pytest.mark.worlds(("local", 1), ("collective", 2))
def test_raise_ends_fit_on_all_ranks(pool, disk):
    raising = {"on_save_error": "raise"}
    for failure, _, epochs, whole, left in pool.run(saving, str(disk), "full", False, raising):
        kind, text = failure
        assert kind == "CheckpointSaveError" and epochs == [0, 1]
        assert "the newest one is checkpoint-00000001" in text
        assert whole == [1] and not left


ENDS = """
import os, sys
import dtk, keras, numpy as np
strategy = dtk.strategies.AllReduceStrategy(communicator="local")
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1000)])
    model.compile("sgd", "mse")
place = sys.argv[1]
class Fill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        with open(place + "/filler", "wb") as file:
            file.write(bytes(free - 20_000))
model.fit(np.ones((8, 64)), np.ones((8, 1000)), verbose=0,
          callbacks=[Fill(), dtk.callbacks.Checkpoint(place + "/saved")])
print("trained")
"""


@pytest.mark.full("a cheaper test holds its rule")
def test_a_process_that_has_met_a_full_disk_ends_well(disk):
    """Breaks by SIGSEGV: HDF5 crashed, when the process ended, by a file it could not close."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(disk)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "no checkpoint was written" in done.stdout and done.stdout.endswith("trained\n")


def limited(directory, room):
    """Save 32 kB of weights in a file that may have so many; count what HDF5 keeps open."""
    strategy()
    path = pathlib.Path(directory, "x.weights.h5")
    model = compiled("sgd", width=1000)
    fitted(model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        failure = fails(checkpoint_files.save_weights, model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    gc.collect()
    held = h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)
    path.unlink()
    checkpoint_files.save_weights(model, path)
    weights, content = model.get_weights(), checkpoint_files.MemoryFile()
    model.save_weights(content)
    model.set_weights([0.0 * weight for weight in weights])
    model.load_weights(path)
    same = all(map(np.array_equal, model.get_weights(), weights))
    return failure, held, same and path.read_bytes() == content.getvalue()


@pytest.mark.parametrize("room", [0, 2048, 33_000])
@pytest.mark.worlds(("local", 1))
def test_hdf5_never_meets_the_error(pool, tmp_path, room):
    """Breaks as the end of the process, some time after HDF5 could not close its file."""
    ((failure, held, same),) = pool.run(limited, str(tmp_path), room)
    assert failure == ("OSError", "[Errno 27] File too large")
    assert held == 0 and same
