"""MLflow, Weights & Biases and tqdm: one run, and one bar, of two ranks and after a restart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.full("trackers are 190 MB")

SCRIPT = """
import contextlib, os, pathlib
import keras, mlflow, numpy as np, wandb
from tqdm.keras import TqdmCallback
from wandb.integration.keras import WandbMetricsLogger
import dtk


class Crash(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if os.environ.get("DTK_RESTARTS", "0") == "0" and epoch == 1:
            os._exit(7)


def run_of_mlflow():
    kept = pathlib.Path("ckpt/mlflow_run")
    run = mlflow.start_run(run_id=kept.read_text() if kept.exists() else None)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(run.info.run_id)
    return run


strategy = dtk.strategies.AllReduceStrategy()
keras.utils.set_random_seed(0)
x = np.random.rand(64, 4).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
trackers = [mlflow.keras.MlflowCallback(), TqdmCallback()]
callbacks = [dtk.callbacks.Checkpoint("ckpt"), *trackers, Crash()]
if strategy.is_chief:
    wandb.init(project="sums", id="first", resume="allow", mode="offline")
    callbacks.append(WandbMetricsLogger())
with run_of_mlflow() if strategy.is_chief else contextlib.nullcontext():
    history = model.fit(x, x.sum(1), 16, epochs=4, verbose=0, callbacks=callbacks)
if strategy.is_chief:
    wandb.finish()
    print("losses", history.history["loss"])
"""


def test_two_ranks_and_a_restart_are_one_run_of_each(tmp_path):
    """Breaks as a second run, which MLflow's callback begins on rank 1."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--max-restarts", "1"]
    done = subprocess.run(
        [*command, "train.py"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={
            **os.environ,
            "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "WANDB_SILENT": "true",
        },
    )
    assert done.returncode == 0, done.stderr
    (losses,) = (line for line in done.stdout.splitlines() if "losses" in line)
    runs = [folder for folder in (tmp_path / "mlruns" / "0").iterdir() if folder.is_dir()]
    assert len(runs) == 1
    logged = [line.split() for line in (runs[0] / "metrics" / "loss").read_text().splitlines()]
    assert {step: f"{float(loss)}" for _, loss, step in logged} == {
        str(epoch): loss for epoch, loss in enumerate(losses.split("[")[-1].rstrip("]").split(", "))
    }
    folders = {one.name.rsplit("-", 1)[-1] for one in (tmp_path / "wandb").glob("offline-run-*")}
    assert folders == {"first"}
    bars = [line for line in done.stderr.splitlines() if "loss=" in line]
    assert bars and all(line.startswith("[0]") for line in bars), done.stderr
