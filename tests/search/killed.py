"""A job of two ranks of which one dies in the middle of a trial; see test_killed.py.

python killed.py FOLDER kill|raise
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import optuna

import dtk

folder, how = sys.argv[1:]
strategy = dtk.strategies.AllReduceStrategy("collective")
backend = optuna.storages.journal.JournalFileBackend(f"{folder}/study.journal")
study = optuna.create_study(
    study_name="study", storage=optuna.storages.JournalStorage(backend), load_if_exists=True
)


def step(batch, logs=None):
    """Rank 1 never comes to the end of its second step, for which rank 0 waits."""
    if strategy.rank == 0 or batch == 0:
        return
    Path(folder, "dying").touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("no such batch")


def objective(trial):
    """The second trial trains."""
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
