"""Trains behind parameter servers, and kills one of its own tasks in the middle.

dtk run -n 2 --ps 2 losing_tasks.py worker:1 DIRECTORY
"""

import contextlib
import json
import os
import sys
import time

import keras
import psutil
from sklearn.datasets import load_digits

import dtk

role, _, index = sys.argv[1].partition(":")
strategy = dtk.strategies.ParameterServerStrategy("async")
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]


def victim():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ValueError):
            config = json.loads(process.environ().get("TF_CONFIG", "{}"))
            mine = config.get("cluster") == cluster and process.status() != "zombie"
            if mine and config["task"] == {"type": role, "index": int(index)}:
                return process
    raise LookupError(sys.argv[1])


class Kill(keras.callbacks.Callback):
    steps = 0
    seen_again = False

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 90 and role != "nobody":
            before = strategy.traffic[int(index)]["steps"]
            victim().kill()
            self.before, self.killed = before, time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        if role == "worker" and self.steps > 90:
            # Some steps were under way; many more mean that it takes part again.
            if strategy.traffic[int(index)]["steps"] > self.before + 10:
                self.seen_again = self.model.stop_training = True
            self.model.stop_training |= time.monotonic() - self.killed > 60


images, labels = load_digits(return_X_y=True)
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
kill = Kill()
try:
    history = model.fit(
        images[:640] / 16,
        labels[:640],
        batch_size=16,
        epochs=10_000 if role == "worker" else 4,
        verbose=0,
        callbacks=[dtk.callbacks.Checkpoint(sys.argv[2], resume=True), kill],
    ).history
except dtk.errors.ClusterError:
    print(f"noticed after {time.monotonic() - kill.killed:.1f} s", flush=True)
    raise
iterations = int(model.optimizer.iterations.numpy())
print(f"epochs {len(history['loss'])} iterations {iterations} seen again {kill.seen_again}")
