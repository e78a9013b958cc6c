"""A rank that fails in the middle of a step: the job ends, and the next one goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import optuna

import dtk

from search.bodies import failures, quiet

ROOT = Path(__file__).resolve().parents[2]
# Rank 1 never comes to the end of a step of the second trial, for which rank 0 waits.
SCRIPT = """
import sys
from pathlib import Path

import keras
import numpy as np
import optuna

import dtk

folder = sys.argv[1]
strategy = dtk.strategies.AllReduceStrategy("collective")
backend = optuna.storages.journal.JournalFileBackend(f"{folder}/study.journal")
study = optuna.create_study(
    study_name="study", storage=optuna.storages.JournalStorage(backend), load_if_exists=True
)

def step(batch, logs=None):
    if strategy.rank == 0 or batch == 0:
        return
    Path(folder, "dying").touch()
    raise ValueError("no such batch")

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 1:
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        stop = keras.callbacks.LambdaCallback(on_train_batch_begin=step)
        ones = np.ones((6, 2), "float32")
        model.fit(ones, ones[:, :1], batch_size=2, verbose=0, callbacks=[stop])
    return x

dtk.search.optimize(study, objective, 3, strategy=strategy, catch=ValueError, patience=2)
"""


def journal(tmp_path):
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
    return optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend))


def test_the_job_ends_and_the_next_one_makes_up_for_its_trial(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
    assert "the other ranks did not end this trial within 2 s" in done.stderr, done.stderr
    assert "ValueError: no such batch" in done.stderr
    assert failures(journal(tmp_path))[1][0] in ("RUNNING", "FAIL")
    with quiet():
        alone = dtk.strategies.AllReduceStrategy("local")
        found = dtk.search.optimize(journal(tmp_path), lambda trial: 1.0, 3, strategy=alone)
    states = [state for state, _ in failures(found)]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"], "three that count"
