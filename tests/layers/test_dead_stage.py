"""A stage of a pipeline that dies is named, and the others do not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A pipeline of two ranks, of which one dies between two steps, while the other begins the next.
SCRIPT = """
import os, signal, sys
from pathlib import Path

import keras
import numpy as np

import dtk

folder, how, rank = sys.argv[1:]
strategy = dtk.strategies.AllReduceStrategy("collective", model_parallel=2)

def die(batch, logs=None):
    if strategy.rank != int(rank) or batch < 3:
        return
    Path(folder, "dying").touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no such batch")

with strategy.scope():
    stages = [
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh")]),
        keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]),
    ]
    model = dtk.layers.Pipeline(stages, microbatches=2, schedule="1f1b")
    model.compile("sgd", "mse")
ones = np.ones((40, 4), "float32")
dying = keras.callbacks.LambdaCallback(on_train_batch_begin=die)
model.fit(ones, ones[:, :1], batch_size=4, verbose=0, callbacks=[dying])
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "how, rank, said",
    [
        ("kill", 0, "rank 0, host localhost failed first, by SIGKILL"),
        ("kill", 1, "rank 1, host localhost failed first, by SIGKILL"),
        ("raise", 1, "rank 1, host localhost failed first, with exit code 1"),
    ],
)
def test_a_dead_stage_is_named_and_the_job_ends(tmp_path, how, rank, said):
    script = tmp_path / "dead_stage.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(script), str(tmp_path), how, str(rank)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert ("ValueError: no such batch" in done.stderr) == (how == "raise")
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
