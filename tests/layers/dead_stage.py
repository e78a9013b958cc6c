"""A pipeline of two ranks, of which one dies in the middle of an epoch; see test_dead_stage.py.

python dead_stage.py FOLDER kill|raise 0|1
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import dtk

folder, how, rank = sys.argv[1:]
strategy = dtk.strategies.AllReduceStrategy("collective", model_parallel=2)


def die(batch, logs=None):
    """End a stage between two steps, while the other one begins the next."""
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
